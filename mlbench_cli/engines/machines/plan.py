"""From a spec to what the supervisors of its machines do: pure, the same spec gives the same plan."""

import io
import tarfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NotRequired, TypedDict

import mlbench_cli
from mlbench_cli.engines.environment import contract_environment
from mlbench_cli.engines.local.supervisor import AT_START
from mlbench_cli.engines.machines.details import MachineDetails
from mlbench_cli.engines.machines.placement import NodeShare
from mlbench_cli.spec import RunSpec

MEETING_SECONDS = 300.0
LEASE_SECONDS = 60.0
GRACE_SECONDS = 5.0
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
# What the machines need of the tool itself, besides the tasks.
_MODULES = (
    *("mlbench_cli/__init__.py", "mlbench_cli/isolation.py", "mlbench_cli/engines/__init__.py"),
    *("mlbench_cli/engines/machines/__init__.py", "mlbench_cli/engines/machines/meeting.py"),
    *("mlbench_cli/engines/machines/node.py", "mlbench_cli/engines/machines/host_lock.py"),
    *("mlbench_cli/engines/machines/interfaces.py", "mlbench_cli/engines/machines/rank_processes.py"),
)
_FOLDERS = ("task_images", "mlbench_cli/engines/local")
_START = "import sys; sys.path.insert(0, sys.argv.pop(1)); from mlbench_cli.engines.machines.node import main; sys.exit(main(sys.argv[1:]))"  # noqa: E501


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


class MachinesPlan(TypedDict):
    """RUN/plan.json. Times are in seconds."""

    kind: str
    schema_version: int
    name: str
    spec_hash: str
    timeout: float
    gpus_per_worker: int
    environment: Mapping[str, str]
    defaults: Mapping[str, str]
    nodes: list[NodePlan]
    python: str
    installed_code_only: bool
    launcher: list[str]
    interface: str | None
    interface_variables: list[str]
    meeting_seconds: float
    lease_seconds: float | None
    grace: float
    lock: str
    pin: NotRequired[bool]


def make_plan(
    spec: RunSpec,
    details: MachineDetails,
    nodes: Sequence[NodeShare],
    *,
    lock: str,
    launcher: Sequence[str] = (),
    grace: float = GRACE_SECONDS,
) -> MachinesPlan:
    """The plan of a run on these nodes. `lock` says how its machines are kept from other runs (see `host_lock`).

    The supervisors complete MASTER_ADDR, MASTER_PORT and MLBENCH_HOSTS when all are there.
    """
    environment = {
        **details.env,
        **spec.kubernetes.env,
        **contract_environment(spec, AT_START, AT_START, AT_START),
        "PYTHONUNBUFFERED": "1",
    }
    if spec.cpus is not None:
        environment["OMP_NUM_THREADS"] = str(max(1, int(spec.cpus) // spec.processes_per_worker))
    plan = MachinesPlan(
        kind="MachinesRun",
        schema_version=1,
        name=spec.name,
        spec_hash=spec.hash,
        timeout=spec.timeout,
        gpus_per_worker=spec.gpus_per_worker if spec.device == "gpu" else 0,
        environment=environment,
        defaults={} if spec.cpus is not None else {"OMP_NUM_THREADS": AT_START},
        nodes=[
            NodePlan(
                name=node.name,
                address=node.address,
                workers=list(node.workers),
                ranks=[_plan_rank(spec, rank) for rank in node.ranks(spec)],
            )
            for node in nodes
        ],
        python=details.python,
        installed_code_only=spec.runs_task_program and not launcher,
        launcher=list(launcher),
        interface=details.interface,
        interface_variables=list(INTERFACE_VARIABLES),
        meeting_seconds=MEETING_SECONDS,
        lease_seconds=LEASE_SECONDS,
        grace=grace,
        lock=lock,
    )
    if spec.pin:
        plan["pin"] = True
    return plan


def _plan_rank(spec: RunSpec, rank: int) -> RankPlan:
    environment = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % spec.processes_per_worker),
        "NODE_RANK": str(rank // spec.processes_per_worker),
        "MLBENCH_OUTPUT_DIR": f"output/rank-{rank}",
    }
    if rank >= spec.world_size:  # parameter servers are workers of one process each, after the others
        node = spec.workers + rank - spec.world_size
        environment |= {"LOCAL_RANK": "0", "NODE_RANK": str(node), "MLBENCH_ROLE": "server"}
    return RankPlan(rank=rank, argv=list(spec.argv) if spec.run_on_all or rank == 0 else None, environment=environment)


def start_command(python: str, code_folder: str) -> list[str]:
    """How a supervisor is started on its machine; its folder RUN/nodes/K is the last word, which the caller adds."""
    return [python, "-I", "-S", "-c", _START, code_folder]


# --- code -----------------------------------------------------------------------------------------------------------


@cache
def pack_code() -> tuple[bytes, str]:
    """What the machines run, as a tar that depends on the files alone, and its SHA-256."""
    import hashlib

    root = Path(mlbench_cli.__file__).parents[1]
    found = (path for folder in _FOLDERS for path in (root / folder).rglob("*") if path.is_file())
    files = (path for path in found if "__pycache__" not in path.parts)
    names = sorted([*_MODULES, *(path.relative_to(root).as_posix() for path in files)])
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in names:
            member = tarfile.TarInfo(name)
            data = (root / name).read_bytes()
            member.size, member.mode = len(data), 0o644
            archive.addfile(member, io.BytesIO(data))
    data = sink.getvalue()
    return data, hashlib.sha256(data).hexdigest()
