"""What a level measures, how long that takes, and which shortfall it would find: said before anything starts."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlbench_cli.errors import UsageError
from task_images.certify import rules
from task_images.certify.rules import TESTS

_DISK_MBPS = 400.0  # assumed
_RESERVE = 1.25  # of the time of the plan
_NOISE, _SCALE = 0.005, 0.01  # of repeats, and among healthy nodes: Primus #712


@dataclass(frozen=True)
class Plan:
    """The stages of a cluster without suspects, with their seconds, and those of a confirmation: how long it usually
    takes to clear a suspect, to name it, and at most."""

    stages: Mapping[str, float]
    nodes: int
    devices: int
    clear: float
    name: float
    longest: float
    per_hour: float | None = None

    @property
    def seconds(self) -> float:
        """Of a cluster without suspects."""
        return math.fsum(self.stages.values())

    @property
    def again(self) -> float:
        """Seconds of the stages that are repeated without the nodes that were named."""
        return sum(self.stages.get(name, 0.0) for name in ("collectives", "training"))

    @property
    def timeout(self) -> float:
        """After which the run is ended: the plan, its confirmation, and as much again for slow machines."""
        return 2 * self.seconds + self.longest + self.again + 600

    def confirmation_within(self, budget: float) -> float:
        """How long a confirmation may take so that the run ends in time, slow machines included. It begins behind the
        screen, beside the stages that are then repeated."""
        return max(0.0, min(self.longest, budget - _RESERVE * self.seconds))


def make_plan(
    parameters: Mapping[str, Any], nodes: int, per_node: int, *, gpu: bool, one_machine: bool, per_hour: float | None
) -> Plan:
    """The plan of a run with these parameters of the task."""
    turns = nodes if one_machine else 1
    burst, asked = float(parameters["burst_seconds"]), parameters["stages"]
    node = (8 if gpu else 4) * burst + float(parameters["sustained_seconds"])
    node += 2 * float(parameters["disk_bytes"]) / _DISK_MBPS / 1e6 + (3.0 if gpu else 0.5)
    rounds = nodes - 1 + nodes % 2
    rounds = rounds if nodes <= 16 or not parameters["matchings"] else min(rounds, int(parameters["matchings"]))
    group = 3.0 if gpu else 0.1
    start = 8.0 + 1.5 * nodes if one_machine else 30.0  # libraries are loaded; on one machine in turns
    stages = {
        "drift": start,
        "node": float(parameters["rounds"]) * node * turns,
        "pairs": float(parameters["rounds"]) * rounds * group * (nodes // 2 if one_machine else 1),
        "collectives": 4 * len(parameters["sizes"]) * (group + 0.05 * float(parameters["samples"])),
        "training": float(parameters["training_seconds"]) + group + 3,
        "soak": 3600 * float(parameters["soak_hours"]),
    }
    span = rules.span_needed(float(parameters["least_dip_seconds"]), 1)
    used = {name: seconds for name, seconds in stages.items() if name in asked or name == "drift"}
    longest = float(parameters["confirm_seconds"])
    most = max(rules.LOOKS)
    clear = rules.moment_due(most - rules.need(most, rules.ERROR / len(rules.LOOKS)), span)
    return Plan(used, nodes, nodes * per_node, clear, span, longest, per_hour)


def check_budget(plan: Plan, seconds: float) -> None:
    """Raises UsageError for a budget that the plan does not fit in, naming the stage that is the first not to."""
    spent = 0.0
    for name, needed in plan.stages.items():
        spent += needed
        if spent > seconds:
            raise UsageError(
                f"A budget of {seconds / 60:.3g} min is too small: with the stage {name} the plan takes "
                f"{spent / 60:.1f} min, and {plan.seconds / 60:.1f} min in all.",
                hint="Raise --budget, choose --level quick, or measure one stage with --only.",
            )


def smallest_shortfalls() -> dict[str, float]:
    """Test -> the shortfall of one node that is found 95 times in 100, with the noise of quiet machines."""
    found = {}
    for name, test in TESTS.items():
        fail = -math.log1p(-test.fail)
        at_screen = max(rules.SCREEN_SHARE * fail, rules.SCREEN_DEVIATIONS * _SCALE) + 1.645 * 0.75 * _NOISE
        found[name] = -math.expm1(-max(at_screen, fail + 1.55 * 1.23 * _NOISE))
    return found


def cluster_nodes(details: Mapping[str, Any]) -> int | None:
    """How many nodes a cluster's record says that it has; None if it does not say."""
    hosts: Sequence[Any] = details.get("hosts") or ()
    if hosts:
        return len(hosts)
    partitions: Mapping[str, Any] = details.get("partitions") or {}
    chosen = details.get("partition")
    for name, partition in partitions.items():
        if name == chosen or (chosen is None and (partition.get("default") or len(partitions) == 1)):
            return int(partition["nodes"])
    nodes = details.get("nodes")
    return int(nodes) if isinstance(nodes, int) else None
