"""Messages between clients and agents: plans, and the state of ranks. Standard library only.

Plans and states have a `schema_version`: 1. A field that is added is optional; one that changes its meaning makes a new
version.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from mlbench_cli.agent.processes import ProcessNote

SCHEMA_VERSION = 1
AT_START = "chosen at start"  # placeholder in render() for facts known only at the start
STARTED = ".state/started"  # in RUN/nodes/K: made by the node's agent, of which there is one only
NOT_INSTALLED = "pip could not install "  # how a start problem begins if an image lacks packages of a task


class RankPlan(TypedDict):
    """One rank: `argv` None if it runs nothing; `environment` is its own part of the contract."""

    rank: int
    argv: list[str] | None
    environment: Mapping[str, str]


class NodePlan(TypedDict):
    """One machine. `name` and `address` are None if only the machine itself knows them."""

    name: str | None
    address: str | None
    workers: list[int]
    ranks: list[RankPlan]


class FaultPlan(TypedDict):
    """Faults, and what follows. `script` as model/faults.py reads it; `from_start`: times count from the start of
    the ranks, and not from the first update of a training."""

    script: str | None
    seed: int
    ranks: int
    workers: int
    policy: str
    checkpoint_every: str | None
    detect_seconds: float | None
    from_start: bool


class HubPlan(TypedDict):
    """The port of node 0 and the run's token, if they are known before the start."""

    port: int
    token: str


class PlanOptions(TypedDict, total=False):
    """Fields that a plan may lack."""

    pin: bool
    absent_seconds: float  # after which the run starts without nodes that are missing
    packages: list[str]  # of the task: those that the image lacks are installed before the start
    faults: FaultPlan
    hub: HubPlan


class RunPlan(PlanOptions):
    """Fields of every plan. Times are in seconds."""

    kind: str
    schema_version: int
    name: str
    spec_hash: str
    timeout: float
    gpus_per_worker: int
    environment: Mapping[str, str]  # of all ranks
    defaults: Mapping[str, str]  # where the user's environment has no such variable


class LocalShape(TypedDict, total=False):
    """The network between so many workers on one machine, if it is shaped."""

    network: str
    workers: int


class LocalPlan(RunPlan, LocalShape):
    """A run on one machine, within its agent's request."""

    ranks: list[RankPlan]


class MachinesPlan(RunPlan):
    """RUN/plan.json."""

    nodes: list[NodePlan]
    python: str | None  # None: the one that runs the agent, or the user's own
    installed_code_only: bool
    launcher: list[str]
    interface: str | None
    interface_variables: list[str]
    meeting_seconds: float
    grace: float
    lock: str
    hold_seconds: float  # for which a node that has ended tries to reach a head that does not answer
    echo: bool  # logs also go to the agents' standard output
    stays: bool  # nodes without a command of their own end with node 0
    collects: list[int] | None  # nodes whose output is fetched; None: all


class RankFacts(TypedDict):
    """One rank. Times are seconds since 1970; `exit_code` and `signal` are None until its process has ended."""

    rank: int
    pid: int | None
    phase: str  # model.Phase
    exit_code: int | None
    signal: int | None
    started: float | None
    finished: float | None
    seconds: float | None  # from start to end, by the monotonic clock
    stopped: bool  # ended because the agent was ending the run
    out_of_memory: str | None  # "cgroup" or "machine": whose count of memory kills rose
    start_error: str | None
    peak_rss_bytes: int | None  # of its largest process
    memory_limit_bytes: int | None  # of this control group or machine, if memory ran out
    restarts: int  # how often it was started again


class BoundRank(TypedDict):
    """CPUs and GPUs that a rank may use; `cpus` None where the system cannot tell."""

    rank: int
    cpus: list[int] | None
    gpus: list[str]


class Cause(TypedDict):
    """The reason that ended a run on all nodes. `time` is seconds since 1970 by the clock of node 0."""

    why: str
    node: int
    rank: int | None
    time: float


class AgentState(ProcessNote):
    """state.json: what an agent knows of its ranks. Times are seconds since 1970."""

    schema_version: int
    run_id: str
    name: str
    spec_hash: str
    master_port: int
    started: float | None
    finished: float | None
    seconds: float | None  # from the start of the first rank to the end of the last, by the monotonic clock
    stepped_seconds: float  # by which the wall clock was set in that time
    ended: str | None  # model.Ending; the promise that everything is over
    first: Cause | None  # what ended it; of several machines only node 0 knows the order
    first_failed: int | None
    disk_full: bool
    start_problem: str | None
    network_problem: str | None
    ranks: list[RankFacts]


class Digest(TypedDict):
    """Of a file; `size` in bytes."""

    size: int
    sha256: str


class NodeResults(TypedDict):
    """results.json: what a client fetches of a machine; `logs` by rank, `archive` None if it could not be packed."""

    schema_version: int
    archive: Digest | None
    logs: Mapping[str, Digest]
    problem: str | None


class NodeState(AgentState, total=False):
    """What is there at times, and what one machine of several adds."""

    stopping: str  # model.Ending, as long as it has not ended
    deadline: float  # when it ends its ranks, by the monotonic clock of its machine
    idle_since: float | None  # since when no rank has used a CPU, if for long
    stalled_seconds: float  # for which the agent itself did not run
    node: int
    node_name: str
    address: str | None
    interface: str | None
    master_address: str
    began: float
    cpus: list[int] | None
    gpus: list[str]
    bound: list[BoundRank]
    slurm: dict[str, str]


def pending_facts(rank: int) -> RankFacts:
    """The facts of a rank that has not been started."""
    return {
        "rank": rank,
        "pid": None,
        "phase": "pending",
        "exit_code": None,
        "signal": None,
        "started": None,
        "finished": None,
        "seconds": None,
        "stopped": False,
        "out_of_memory": None,
        "start_error": None,
        "peak_rss_bytes": None,
        "memory_limit_bytes": None,
        "restarts": 0,
    }
