"""From a spec to the plan of its agents. Pure: the same spec gives the same plan."""

import hashlib
import io
import tarfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import mlbench_cli
from mlbench_cli.agent.messages import AT_START, MachinesPlan
from mlbench_cli.engines.environment import contract_environment, plan_rank, plan_ranks
from mlbench_cli.engines.placement import NodeShare, share_nodes
from mlbench_cli.model.cluster_details import MachineDetails
from mlbench_cli.model.spec import HOLD_SECONDS, RunSpec
from mlbench_cli.tasks.catalog import packages_of
from task_images.facts import read_task_code

MEETING_SECONDS = 300.0
MACHINES_HOLD_SECONDS = 24 * 3600.0
PODS_GRACE_SECONDS = 10.0  # of the 60 that Kubernetes gives a container to end; the rest is for handing over
GRACE_SECONDS = 5.0
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
# Files of mlbench that the machines need besides the tasks.
_MODULES = (
    *("mlbench_cli/__init__.py", "mlbench_cli/isolation.py", "mlbench_cli/errors.py"),
    *("mlbench_cli/model/__init__.py", "mlbench_cli/model/faults.py", "mlbench_cli/model/network.py"),
    *("mlbench_cli/util/__init__.py", "mlbench_cli/util/files.py"),
)
_FOLDERS = ("task_images", "mlbench_cli/agent")
# What the agent alone needs.
_AGENT = (
    "mlbench_cli/agent",
    *("task_images/__init__.py", "task_images/contract.py", "task_images/cores.py"),
)
RUN = "task_images.run"  # a rank of the task that its first argument names
PREPARE = "task_images.prepare"  # prepares the data of the task that its first argument names
_START = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); "
    "from mlbench_cli.agent.{} import main; sys.exit(main(sys.argv[1:]))"
)


def make_plan(
    spec: RunSpec,
    details: MachineDetails,
    nodes: Sequence[NodeShare],
    *,
    lock: str,
    launcher: Sequence[str] = (),
    grace: float = GRACE_SECONDS,
) -> MachinesPlan:
    """The plan of a run on these nodes. `lock` says how its machines are kept from other runs (see agent/lock.py).

    The agents complete MASTER_ADDR, MASTER_PORT and MLBENCH_HOSTS when all are there.
    """
    contract = contract_environment(spec, AT_START, AT_START, AT_START)
    return {
        **plan_ranks(spec, "MachinesRun", {**details.env, **spec.env, **contract}, {}),
        "nodes": [
            {
                "name": node.name,
                "address": node.address,
                "workers": list(node.workers),
                "ranks": [plan_rank(spec, rank) for rank in node.ranks(spec)],
            }
            for node in nodes
        ],
        "python": details.python,
        "installed_code_only": spec.runs_task_program and not launcher,
        "launcher": list(launcher),
        "interface": details.interface,
        "interface_variables": list(INTERFACE_VARIABLES),
        "meeting_seconds": MEETING_SECONDS + (spec.absent_seconds or 0.0),
        "grace": grace,
        "lock": lock,
        "hold_seconds": MACHINES_HOLD_SECONDS,
        "echo": False,
        "stays": False,
        "collects": None,
    }


def pod_host(spec: RunSpec, worker: int) -> str:
    """The name of a worker's pod, by the run's headless service."""
    return f"{spec.name}-{worker}.{spec.name}"


def start_command(python: str, code_folder: str, module: str) -> list[str]:
    """The command that starts an agent (`module` "node") or a head on its machine. The caller appends its folder."""
    return [python, "-I", "-S", "-c", _START.format(module), code_folder]


def make_pods_plan(spec: RunSpec, environment: Mapping[str, str], *, lock: str, collects: list[int]) -> MachinesPlan:
    """The plan of a run whose nodes are the pods of its workers. Their devices are the container's."""
    task = find_task(spec.argv)
    return {
        **plan_ranks(spec, "PodsRun", environment, {}),
        "gpus_per_worker": 0,
        "nodes": [
            {
                "name": pod_host(spec, number),
                "address": None,
                "workers": list(node.workers),
                "ranks": [plan_rank(spec, rank) for rank in node.ranks(spec)],
            }
            for number, node in enumerate(share_nodes(spec))
        ],
        "python": None,
        "installed_code_only": spec.runs_task_program,
        "launcher": [],
        "interface": None,
        "interface_variables": [],
        "meeting_seconds": spec.pods.start_timeout + MEETING_SECONDS,
        "grace": PODS_GRACE_SECONDS,
        "lock": lock,
        "hold_seconds": float(HOLD_SECONDS),
        "echo": True,
        "stays": True,
        "collects": collects,
        "packages": [] if task is None else list(packages_of(task)),
    }


# --- code -----------------------------------------------------------------------------------------------------------


@cache
def pack_code() -> tuple[bytes, str]:
    """The code for the machines as a tar that depends only on the files, and its SHA-256."""
    root, names = _find_files((*_MODULES, *_FOLDERS))
    data = _pack({name: (root / name).read_bytes() for name in names})
    return data, hashlib.sha256(data).hexdigest()


def find_task(argv: Sequence[str]) -> str | None:
    """The task whose program a command runs: `python -m task_images.run TASK`; None for other commands."""
    words = [*argv, "", "", "", ""]
    return words[3] if words[:2] == ["python", "-m"] and words[2] in (RUN, PREPARE) else None


@cache
def pack_task_code(task: str | None) -> bytes:
    """The code for the pods of one run, as `pack_code`: the agent, and that of the task if it is mlbench's own."""
    root, names = _find_files((*_MODULES, *_AGENT))
    files = {name: (root / name).read_bytes() for name in names}
    if task is not None:
        with suppress(OSError):  # the code of a third-party task is in the image
            files |= {f"task_images/{name}": data for name, data in read_task_code(task, root).items()}
    return _pack(files)


def _pack(files: Mapping[str, bytes]) -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in sorted(files):
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(files[name]), 0o644
            archive.addfile(member, io.BytesIO(files[name]))
    return sink.getvalue()


def _find_files(places: Sequence[str]) -> tuple[Path, list[str]]:
    """The project's folder, and in order the names of these files and of those in these folders."""
    root = Path(mlbench_cli.__file__).parents[1]
    found = (
        path for place in places for path in ((root / place).rglob("*") if (root / place).is_dir() else [root / place])
    )
    files = (path for path in found if path.is_file() and "__pycache__" not in path.parts)
    return root, sorted(path.relative_to(root).as_posix() for path in files)
