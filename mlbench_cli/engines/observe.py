"""From the states of a run's agents to an observation, on every engine. Pure, tested on facts."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from mlbench_cli.agent.messages import SCHEMA_VERSION, NodeResults, NodeState, pending_facts
from mlbench_cli.engines import diagnosis
from mlbench_cli.errors import DamagedRun
from mlbench_cli.model.run import Ending, Finding, NodeClock, Observation, Phase, Run, WorkerState
from mlbench_cli.model.spec import RunSpec

SCARCE_BYTES = 1 << 20  # of free disk, below which a head cannot take in more
STALE_SECONDS = 60.0  # maximum age of the last heartbeat of an agent whose process is not visible
Facts = Mapping[str, Any]
Tail = Callable[[int], list[str]]


class NodeReport(Struct, frozen=True):
    """What is known of one machine: its agent's state (None: nothing yet) and results (None: not packed).

    `alive` is None if its process cannot be seen from here; `beat_age` is in seconds. `is_here`: its files are those of
    the run's folder here, so that nothing has to arrive.
    """

    state: Facts | None = None
    results: Facts | None = None
    alive: bool | None = None
    beat_age: float | None = None
    is_here: bool = False

    def has_whole_log(self, rank: int) -> bool | None:
        """Whether no line of a rank's log is missing in the run's folder here; None if it is not a rank of this node,
        as far as is known."""
        for entry in self.state["ranks"] if self.state is not None else ():
            if entry["rank"] == rank:
                return self.is_over or (self.is_here and Phase(entry["phase"]).is_final)
        return None

    @property
    def has_ended(self) -> bool:
        """Whether its ranks have ended and it has written everything."""
        if self.state is None or not self.state["ended"]:
            return False
        return self.results is not None or not self.may_live

    @property
    def may_live(self) -> bool:
        """Whether the node's agent may still work: its process is seen, or its last sign of life is recent."""
        if self.alive is not None:
            return self.alive
        return self.beat_age is not None and self.beat_age < STALE_SECONDS

    @property
    def is_lost(self) -> bool:
        """Whether it began, has not ended, and shows no sign of life."""
        return self.state is not None and not self.state["ended"] and not self.may_live

    @property
    def is_over(self) -> bool:
        """Whether this node is done."""
        return self.has_ended or self.is_lost


def check_state(name: str, facts: object) -> dict[str, Any]:
    """`facts` if they are the state of an agent of the run `name`. Raises DamagedRun."""
    state = _check(name, facts, NodeState)
    try:
        for entry in state["ranks"]:
            Phase(entry["phase"])
        for word in (state["ended"], state.get("stopping"), (state["first"] or {}).get("why")):
            if word is not None:
                Ending(word)
    except ValueError as error:
        raise damaged(name, str(error)) from None
    return state


def check_results(name: str, facts: object) -> dict[str, Any]:
    """`facts` if they are the results of a node of the run `name`. Raises DamagedRun."""
    return _check(name, facts, NodeResults)


def _check(name: str, facts: object, kind: type) -> dict[str, Any]:
    found = facts.get("schema_version") if isinstance(facts, dict) else None
    if isinstance(found, int) and found != SCHEMA_VERSION:
        raise DamagedRun(
            f'Another version of mlbench runs "{name}": its agents write version {found}, and this one reads version '
            f"{SCHEMA_VERSION}.",
            hint=f"Use that version for this run, or: mlbench delete {name} --force",
        )
    try:
        msgspec.convert(facts, kind)
    except msgspec.ValidationError as error:
        raise damaged(name, str(error)) from None
    assert isinstance(facts, dict)
    return facts


def damaged(name: str, problem: str) -> DamagedRun:
    """The error for what cannot be read of the run `name`."""
    return DamagedRun(
        f'What an agent of the run "{name}" has written about it is damaged: {problem}.',
        hint=f"mlbench delete {name} --force",
    )


class Snapshot(Struct, frozen=True):
    """All machines of a run at one moment (`time`, seconds since 1970)."""

    time: float
    nodes: Mapping[int, NodeReport]
    exists: bool = True  # the run's folder is there
    is_canceled: bool = False
    is_served: bool = True  # the head that nodes with disks of their own send to is running
    free_bytes: int | None = None  # of the disk of the run's folder
    needs_all: bool = True  # else nodes that never came are not waited for once node 0 is done

    @property
    def is_over(self) -> bool:
        """Whether all nodes are done."""
        waited = [report for report in self.nodes.values() if self.needs_all or report.state is not None]
        is_begun = self.needs_all or self.nodes.get(0, NodeReport()).state is not None
        return self.exists and bool(waited) and is_begun and all(report.is_over for report in waited)

    @property
    def is_begun(self) -> bool:
        """Whether any agent has written its state."""
        return any(report.state is not None for report in self.nodes.values())

    @property
    def shows_life(self) -> bool:
        """Whether any agent may still work."""
        return any(report.state is not None and report.may_live for report in self.nodes.values())


def observe(spec: RunSpec, names: Sequence[str | None], snapshot: Snapshot, tail: Tail) -> Observation:
    """The observation that follows from the machines alone; an engine that knows more may replace `ended`.

    `names` are the names of the processes' nodes as far as they are known before the run.
    """
    first = find_first(snapshot)
    ended = find_ending(snapshot, first) if snapshot.is_over else None
    facts = merge_states(spec, snapshot, ended, first)
    findings = [*diagnosis.diagnose(facts, tail, timeout=spec.timeout), *_node_findings(snapshot, first, ended)]
    reports = _reports_by_rank(snapshot)
    workers = tuple(
        _worker(spec, own, reports.get(rank, NodeReport()), names[rank] if rank < len(names) else None, facts)
        for rank, own in enumerate(facts["ranks"])
    )
    states = [report.state for _, report in sorted(snapshot.nodes.items()) if report.state is not None]
    waited = [report for report in snapshot.nodes.values() if snapshot.needs_all or report.state is not None]
    seconds = [None if report.state is None else report.state.get("seconds") for report in waited]
    known = ended is not None and bool(seconds) and None not in seconds
    return Observation(
        time=snapshot.time,
        workers=workers,
        findings=tuple(findings),
        ended=ended,
        first_failed=facts["first_failed"],
        # All machines start their ranks when node 0 tells them to.
        seconds=max((value for value in seconds if value is not None), default=None) if known else None,
        clocks=_find_clocks(states),
    )


def explain_absence(run: Run, seen: Observation, what: str) -> Observation:
    """How a run ended of which its cluster has nothing, as `what` says: it was never submitted, or is gone."""
    if run.manifests.exists():
        gone = Finding("run_gone", f"{what}: it was deleted, or has expired.")
        return replace(seen, ended=Ending.LOST, findings=(gone, *seen.findings))
    words = f"{what}: it was not submitted, or has been deleted."
    finding = Finding("not_started", words, hint="Start it again.", retryable=True)
    return replace(seen, ended=Ending.NEVER_STARTED, findings=(finding,))


def find_first(snapshot: Snapshot) -> Facts | None:
    """What ended the run on all nodes: the first cause according to node 0, else according to the other nodes."""
    states = [report.state for report in snapshot.nodes.values() if report.state is not None]
    return next((state["first"] for state in states if state.get("first")), None)


def find_ending(snapshot: Snapshot, first: Facts | None) -> Ending:
    """How a run ended once all of its machines are done."""
    states = [report.state for report in snapshot.nodes.values() if report.state is not None]
    words = [state["ended"] for state in states]
    is_unstarted = any(state["start_problem"] for state in states) and not any(state["started"] for state in states)
    if is_unstarted and not snapshot.is_canceled:
        return Ending.NEVER_STARTED  # even if node 0 came second: Kubernetes stops it as soon as one pod has failed
    if first is not None:
        return Ending.LOST if first["why"] == "lost" else Ending(first["why"])
    if any(report.is_lost for report in snapshot.nodes.values()):
        return Ending.LOST
    if all(word == Ending.EXITED for word in words):
        return Ending.EXITED
    order = (Ending.CANCELED, Ending.DEADLINE, Ending.NEVER_STARTED, Ending.FAILED)
    return next((ending for ending in order if ending in words), Ending.LOST)


def merge_states(spec: RunSpec, snapshot: Snapshot, ended: Ending | None, first: Facts | None) -> Facts:
    """One state as an agent writes it, from those of all machines."""
    states = [report.state for report in snapshot.nodes.values() if report.state is not None]
    ranks: dict[int, Facts] = {facts["rank"]: facts for state in states for facts in state["ranks"]}
    idle = [state.get("idle_since") for state in states]
    known = [moment for moment in idle if moment is not None]
    failed = first["rank"] if first is not None and first["why"] == "failed" else None
    return {
        "name": spec.name,
        "ranks": [ranks.get(rank) or pending_facts(rank) for rank in range(spec.process_count)],
        "first_failed": failed,
        "idle_since": max(known) if known and len(known) == len(idle) else None,
        "finished": ended and (max((facts["finished"] or 0.0 for facts in ranks.values()), default=0.0) or None),
        "disk_full": any(state["disk_full"] for state in states),
        "stalled_seconds": max((state.get("stalled_seconds", 0.0) for state in states), default=0.0),
        "start_problem": next((problem for state in states if (problem := state["start_problem"])), None),
        "network_problem": next((problem for state in states if (problem := state.get("network_problem"))), None),
        "ended": None if ended in (Ending.LOST, None) else str(ended),
        "stopping": first["why"] if first is not None else None,
    }


def _node_findings(snapshot: Snapshot, first: Facts | None, ended: Ending | None) -> list[Finding]:
    found = []
    if ended is None and snapshot.free_bytes is not None and snapshot.free_bytes < SCARCE_BYTES:
        found.append(
            Finding(
                "head_disk_full",
                "The disk with the run's folder is full: what other machines write cannot arrive there.",
                hint="Free some space there; the machines keep their files and send them again.",
                retryable=True,
                evidence={"free_bytes": snapshot.free_bytes},
            )
        )
    lost = {number for number, report in snapshot.nodes.items() if report.is_lost}
    if first is not None and first["why"] == "lost":
        lost.add(first["node"])
    for number in sorted(lost):
        report = snapshot.nodes.get(number, NodeReport())
        name = (report.state or {}).get("node_name") or f"node {number}"
        found.append(
            Finding(
                "node_lost",
                f"The agent on {name} is gone (it was killed, or the machine went down), so its ranks ended.",
                hint="Run it again.",
                retryable=True,
                evidence={"node": number, "beat_age": report.beat_age},
            )
        )
    if ended is Ending.CANCELED and not snapshot.is_canceled:
        found.append(
            Finding(
                "canceled_by_other",
                "Someone else stopped the run: its agents got SIGTERM.",
                hint="Run it again.",
                retryable=True,
            )
        )
    for number, report in snapshot.nodes.items():
        if report.results is not None and (problem := report.results.get("problem")):
            what = "its output" if report.results["archive"] is None else "all of its output"
            found.append(Finding("output_incomplete", f"Node {number} could not pack {what}: {problem}."))
    return found


def _reports_by_rank(snapshot: Snapshot) -> dict[int, NodeReport]:
    """The report of the node of each rank whose node has written its state."""
    reports: dict[int, NodeReport] = {}
    for report in snapshot.nodes.values():
        for entry in report.state["ranks"] if report.state is not None else ():
            reports.setdefault(entry["rank"], report)
    return reports


def _worker(spec: RunSpec, own: Facts, report: NodeReport, name: str | None, facts: Facts) -> WorkerState:
    """One rank, from its `own` facts and the `report` of its node; `name` is that of its node if known before."""
    phase, reason = Phase(own["phase"]), None
    if report.is_lost and not phase.is_final:
        phase, reason = Phase.LOST, "the agent is gone"
    elif own["stopped"]:
        failed, ending = facts["first_failed"], facts["stopping"] or "ended"
        reason = f"stopped: rank {failed} failed" if failed is not None else f"stopped: {ending.replace('_', ' ')}"
    elif phase is Phase.FAILED:
        reason = diagnosis.describe_exit(own)
    elif own["rank"] and not spec.run_on_all:
        reason = "only rank 0 runs the command"
    elif phase is Phase.PENDING and report.state is not None and not report.state["ended"]:
        phase, reason = Phase.STARTING, "waiting for the other machines"
    return WorkerState(
        own["rank"],
        phase,
        reason,
        name if report.state is None else node_name(report.state),
        own["exit_code"],
        own["started"],
        own["finished"],
        restarts=own["restarts"],
        seconds=own.get("seconds"),
    )


def node_name(state: Facts) -> str:
    """The name of the machine of an agent: as its cluster calls it, else as it calls itself."""
    return str(state.get("node_name") or state["host"])


def _find_clocks(states: Sequence[Facts]) -> tuple[NodeClock, ...]:
    """The agents' records of their machines' clocks, after the run has ended."""
    return tuple(
        NodeClock(node=node_name(state), stepped_seconds=state["stepped_seconds"])
        for state in states
        if state.get("seconds") is not None
    )
