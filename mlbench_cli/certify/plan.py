"""What a level measures and how long that takes: said before anything starts."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mlbench_cli.errors import UsageError
from mlbench_cli.util.text import counted, duration, rough_duration
from task_images.certify import rules
from task_images.certify.rules import TESTS

_DISK_MBPS = 400.0  # assumed, like the others
_GPU_RATE, _CPU_RATE, _LOCAL_RATE = 2e10, 1e9, 3e8  # of collectives, in bytes per second
_START_RESERVE = 30.0  # seconds of a budget, for libraries that load slowly
_NOISE, _SCALE = 0.005, 0.01  # of repeats, and among healthy nodes: Primus #712


@dataclass(frozen=True)
class Plan:
    """Seconds of the stages of a cluster without suspects; how long it takes to clear a suspect, and to name it; and
    when the confirmation ends at last, since the stage drift."""

    stages: Mapping[str, float]
    nodes: int
    devices: int
    clear: float
    name: float
    confirmed: float
    per_hour: float | None = None  # dollars

    @property
    def seconds(self) -> float:
        """Of a cluster without suspects."""
        return math.fsum(self.stages.values())

    @property
    def longest(self) -> float:
        """How long a confirmation may take."""
        return max(0.0, self.confirmed - self.stages.get("node", 0.0) - self.stages.get("pairs", 0.0))

    @property
    def timeout(self) -> float:
        """After which the run is ended: the plan twice for slow machines, and its confirmation."""
        return 2 * self.seconds + self.confirmed + 600

    def within(self, budget: float) -> "Plan":
        """The plan with a confirmation that ends so early that twice the time for what follows is left. Raises
        UsageError for a budget that the stages do not fit in, naming the first one that does not."""
        spent = 0.0
        for name, needed in self.stages.items():
            spent += needed
            if spent > budget:
                raise UsageError(
                    f"A budget of {rough_duration(budget)} is too small: with the stage {name} the plan takes "
                    f"{rough_duration(spent)}, and {rough_duration(self.seconds)} in all.",
                    hint="Raise --budget, choose --level quick, or measure one stage with --only.",
                )
        kept = math.fsum(2 * self.stages.get(name, 0.0) for name in ("drift", "collectives", "training"))
        kept += self.stages.get("soak", 0.0) + _START_RESERVE
        return replace(self, confirmed=float(round(max(0.0, min(self.confirmed, budget - kept)))))

    def describe(self, cluster: str, level: str) -> str:
        """For people."""
        hours, named = self.devices * self.seconds / 3600, self.seconds + self.name
        parts = ", ".join(f"{name} {seconds / 60:.1f}" for name, seconds in self.stages.items())
        price = ""
        if self.per_hour is not None:
            whole, slow = (f"${self.per_hour * seconds / 3600:.2f}" for seconds in (self.seconds, named))
            price = f", {whole}, or {slow} with a slow node"
        lines = [
            f"Plan for {counted(self.nodes, 'node')} of {cluster}, level {level}: {duration(self.seconds)} "
            f"(minutes: {parts}), {hours:.2f} device-hours{price}.",
            *self._describe_comparison(),
        ]
        if cluster == "local":
            lines.append("Workers on this machine stand for nodes: this tests the procedure, and accepts no cluster.")
        return "\n".join(lines)

    def _describe_comparison(self) -> list[str]:
        tests = ["matmul.sustained", "memory", "disk.write"] if "node" in self.stages else []
        tests += ["network"] if "pairs" in self.stages else []
        if not tests:
            return ["No node is compared with others."]
        if self.nodes < rules.LEAST_FLEET:
            return [f"{self.nodes} nodes are too few to name one of them: at least {rules.LEAST_FLEET} are needed."]
        shortfalls = (rules.smallest_shortfall(TESTS[test].fail, _SCALE, _NOISE) for test in tests)
        least = ", ".join(f"{100 * short:.1f} % ({TESTS[t].title})" for t, short in zip(tests, shortfalls, strict=True))
        clear, name, longest = (f"{seconds / 60:.0f} min" for seconds in (self.clear, self.name, self.longest))
        text = f"A node that looks slow is measured again beside others: {clear} usually clear it"
        if self.longest < self.name:
            text += f". To name it takes {name}, and the budget leaves {longest}: it stays on watch."
        else:
            text += f", {name} name it ({longest} at most)."
        return [text, f"Smallest shortfall found in 95 of 100 runs on quiet machines: {least}."]


def make_plan(
    parameters: Mapping[str, Any], nodes: int, per_node: int, *, gpu: bool, one_machine: bool, per_hour: float | None
) -> Plan:
    """The plan of a run with these parameters of the task."""
    burst, asked = float(parameters["burst_seconds"]), parameters["stages"]
    node = (8 if gpu else 4) * burst + float(parameters["sustained_seconds"])
    node += 2 * float(parameters["disk_bytes"]) / _DISK_MBPS / 1e6 + (3.0 if gpu else 0.5)
    rounds, group = nodes - 1 + nodes % 2, 3.0 if gpu else 0.1
    calls, rate = float(parameters["samples"]), _GPU_RATE if gpu else _LOCAL_RATE if one_machine else _CPU_RATE
    if nodes > 16 and parameters["matchings"]:
        rounds = min(rounds, int(parameters["matchings"]))
    stages = {
        "drift": 8.0 + 1.5 * nodes if one_machine else 30.0,  # libraries are loaded; on one machine in turns
        "node": float(parameters["rounds"]) * node * (nodes if one_machine else 1),
        "pairs": float(parameters["rounds"]) * rounds * group * (nodes // 2 if one_machine else 1),
        "collectives": 4 * sum(group + calls * (0.01 + size / rate) for size in parameters["sizes"]),
        "training": float(parameters["training_seconds"]) + group + 3,
    }
    used = {name: seconds for name, seconds in stages.items() if name in asked or name == "drift"}
    if "soak" in asked:  # the last cycle begins within the hours
        cycle = stages["node"] / float(parameters["rounds"]) + used.get("collectives", 0.0) + used.get("training", 0.0)
        used["soak"] = 3600 * float(parameters["soak_hours"]) + cycle
    span, most = rules.span_needed(float(parameters["least_dip_seconds"]), 1), max(rules.LOOKS)
    clear = rules.moment_due(most - rules.need(most, rules.ERROR / len(rules.LOOKS)), span)
    return Plan(used, nodes, nodes * per_node, clear, span, float(parameters["confirm_seconds"]), per_hour)
