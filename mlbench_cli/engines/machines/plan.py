"""From a spec to the plan of its agents. Pure: the same spec gives the same plan."""

import io
import tarfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import mlbench_cli
from mlbench_cli.agent.agent import AT_START
from mlbench_cli.engines.environment import contract_environment, plan_rank, plan_ranks
from mlbench_cli.engines.machines.details import MachineDetails
from mlbench_cli.engines.machines.placement import NodeShare
from mlbench_cli.model.spec import RunSpec

if TYPE_CHECKING:
    from mlbench_cli.agent.messages import MachinesPlan

MEETING_SECONDS = 300.0
GRACE_SECONDS = 5.0
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
# Files of mlbench that the machines need besides the tasks.
_MODULES = (
    *("mlbench_cli/__init__.py", "mlbench_cli/isolation.py", "mlbench_cli/errors.py"),
    *("mlbench_cli/model/__init__.py", "mlbench_cli/model/faults.py", "mlbench_cli/model/network.py"),
)
_FOLDERS = ("task_images", "mlbench_cli/agent")
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
) -> "MachinesPlan":
    """The plan of a run on these nodes. `lock` says how its machines are kept from other runs (see agent/lock.py).

    The agents complete MASTER_ADDR, MASTER_PORT and MLBENCH_HOSTS when all are there.
    """
    contract = contract_environment(spec, AT_START, AT_START, AT_START)
    return {
        **plan_ranks(spec, "MachinesRun", {**details.env, **spec.kubernetes.env, **contract}, {}),
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
        "meeting_seconds": MEETING_SECONDS,
        "grace": grace,
        "lock": lock,
    }


def start_command(python: str, code_folder: str, module: str) -> list[str]:
    """How an agent ("node") or a head is started on its machine; its folder is the last word, which the caller adds."""
    return [python, "-I", "-S", "-c", _START.format(module), code_folder]


# --- code -----------------------------------------------------------------------------------------------------------


@cache
def pack_code() -> tuple[bytes, str]:
    """The code for the machines as a tar that depends only on the files, and its SHA-256."""
    import hashlib

    root, names = _find_files((*_MODULES, *_FOLDERS))
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in names:
            member = tarfile.TarInfo(name)
            data = (root / name).read_bytes()
            member.size, member.mode = len(data), 0o644
            archive.addfile(member, io.BytesIO(data))
    data = sink.getvalue()
    return data, hashlib.sha256(data).hexdigest()


def _find_files(places: Sequence[str]) -> tuple[Path, list[str]]:
    """The project's folder, and in order the names of these files and of those in these folders."""
    root = Path(mlbench_cli.__file__).parents[1]
    found = (
        path for place in places for path in ((root / place).rglob("*") if (root / place).is_dir() else [root / place])
    )
    files = (path for path in found if path.is_file() and "__pycache__" not in path.parts)
    return root, sorted(path.relative_to(root).as_posix() for path in files)
