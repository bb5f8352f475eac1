"""Provenance: the code, packages and machine of a run, recorded in run.json before it starts.

Facts that only the ranks know (versions of CUDA, NCCL and MPI; on clusters everything) are reported by them in the
event `environment`. Facts that a machine cannot provide are left out without an error.
"""

import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec import Struct, to_builtins
from msgspec.structs import replace

from mlbench_cli import __version__, isolation
from mlbench_cli.agent.processes import boot_id
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.util.masking import mask_words
from mlbench_cli.util.text import one_line
from task_images import facts as environment
from task_images.contract import anonymize

LOADER = ("LD_AUDIT", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH")
MAX_VARIABLE = 2000
GIT_SECONDS = 5.0  # timeout of git; a large repository on a slow disk is left out


class TaskCode(Struct, frozen=True):
    """The code of a catalog task, and what the method adds to it, on this machine: see environment.digest_code."""

    task: str
    digest: str
    method_digest: str = ""


class CommandRecord(Struct, frozen=True):
    """The code of a user's command. `digest`: hex SHA-256 of the files that it names, None if it names none.

    `interpreter`: the Python that runs it, by the user's PATH; None if it is another program.
    """

    digest: str | None
    files: tuple[str, ...] = ()
    interpreter: str | None = None


class SourceCommit(Struct, frozen=True):
    """The git commit of the folder in which a command of the user runs.

    `modified`: a tracked file differs from the commit; `untracked`: there are files that are neither tracked nor
    ignored.
    """

    commit: str  # hex object name
    modified: bool
    untracked: bool


class MachineRecord(Struct, frozen=True):
    """The machine of the ranks. `cores`: usable by this process; `cpu_quota`: in cores."""

    platform: str
    architecture: str
    cores: int
    memory_bytes: int
    cpu: str | None = None
    cpu_quota: float | None = None  # of the cgroup; None: no limit
    gpus: tuple[str, ...] = ()  # models
    gpu_driver: str | None = None


class Provenance(Struct, frozen=True):
    """The provenance of a run.

    command_line  as given to mlbench, without secrets; empty for an anonymous run
    code          None for a command of the user
    command       None for a catalog task, and on clusters
    experiment    name and beginning of the id, to keep runs apart whose code is unknown
    source        None for a catalog task, on clusters, and without a git repository
    packages      name to version, of the environment that runs the ranks; None on clusters, where rank 0 reports them,
                  and for a command whose environment is not known
    machine       None on clusters, where each rank reports its own
    session       identifies this machine and its boot, to group runs; None on clusters
    loader        variables by which libraries and modules of others get into the ranks; None on clusters, where the
                  ranks report LD_PRELOAD
    """

    mlbench: str
    python: str
    command_line: tuple[str, ...] = ()
    code: TaskCode | None = None
    command: CommandRecord | None = None
    experiment: str | None = None
    source: SourceCommit | None = None
    packages: Mapping[str, str] | None = None
    machine: MachineRecord | None = None
    session: str | None = None
    loader: Mapping[str, str] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, as `parse_provenance` takes them."""
        document: dict[str, Any] = json.loads(json.dumps(to_builtins(self)))
        return document


def collect_provenance(
    spec: RunSpec,
    command_line: Sequence[str] = (),
    command: CommandRecord | None = None,
    experiment: str | None = None,
) -> Provenance:
    """Collect the provenance of a run, which starts in the current folder, before its start. Takes about 20 ms, with
    git 30 ms. `command_line` are mlbench's arguments; secrets are masked here.
    """
    local = spec.engine == "local"
    path = _package_path(command) if local else None
    git = _start_git(Path()) if local and not spec.runs_task_program else None  # works while we collect
    known = Provenance(
        mlbench=__version__,
        python=platform.python_version(),
        command_line=() if spec.anonymous else mask_words(command_line),
        code=_task_code(spec.task, spec.method.get("name", "")) if spec.runs_task_program else None,
        command=command,
        experiment=experiment,
        packages=environment.list_packages(path) if path is not None else None,
        machine=_machine() if local else None,
        session=_session() if local else None,
        loader=_list_loader_variables(spec) if local else None,
    )
    return known if git is None else replace(known, source=_read_commit(git))


def _package_path(command: CommandRecord | None) -> list[str] | None:
    """Where the packages of the ranks are; None if unknown. A command may run in a virtual environment of its own."""
    if command is None:
        return isolation.protected_path()
    prefix = Path(command.interpreter or "").parent.parent
    if command.interpreter and prefix == Path(sys.prefix):
        return isolation.protected_path()
    is_own = (prefix / "pyvenv.cfg").exists() or (prefix / "conda-meta").exists()
    return sorted(map(str, prefix.glob("lib/python3*/site-packages"))) if command.interpreter and is_own else None


def _list_loader_variables(spec: RunSpec) -> dict[str, str]:
    """Variables of LOADER that are set; of an anonymous run, digests of them. Catalog tasks get no PYTHONPATH."""
    names = [name for name in LOADER if name != "PYTHONPATH" or not spec.runs_task_program]
    found = {name: value for name in names if (value := os.environ.get(name))}
    if spec.anonymous:
        return {name: anonymize(value) for name, value in found.items()}
    return {name: one_line(value, MAX_VARIABLE) for name, value in found.items()}


def find_commit(folder: Path, seconds: float = GIT_SECONDS) -> SourceCommit | None:
    """The commit of `folder`; None without git, repository or commit, or after `seconds`."""
    git = _start_git(folder)
    return None if git is None else _read_commit(git, seconds)


def _start_git(folder: Path) -> subprocess.Popen[bytes] | None:
    """git, which looks for changes below `folder`; None if it is not installed."""
    # Git hooks set GIT_DIR, which is ignored here. fsmonitor would start a program named by the repository.
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    words = ["git", "-c", "core.fsmonitor=false", "--no-optional-locks", "-C", str(folder)]
    words += ["status", "--porcelain=v2", "--branch", "--untracked-files=normal", "--ignore-submodules=none"]
    try:
        return subprocess.Popen(
            words,
            env={**variables, "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
    except OSError:
        return None


def _read_commit(git: subprocess.Popen[bytes], seconds: float = GIT_SECONDS) -> SourceCommit | None:
    with git:
        try:
            said, _ = git.communicate(timeout=seconds)
        except BaseException as error:
            git.kill()
            if isinstance(error, subprocess.TimeoutExpired):
                return None
            raise
    if git.returncode:
        return None
    lines = said.decode("utf-8", "replace").splitlines()
    commit = next((line.removeprefix("# branch.oid ") for line in lines if line.startswith("# branch.oid ")), "")
    if not _is_hex(commit):
        return None
    changes = [line for line in lines if not line.startswith("#")]
    untracked = [line for line in changes if line.startswith("?")]
    return SourceCommit(commit, modified=len(untracked) < len(changes), untracked=bool(untracked))


def parse_provenance(document: object) -> Provenance:
    """The provenance in a document from `to_dict`. Raises ValueError with the invalid field.

    Unknown fields, e.g. of a newer mlbench, are ignored.
    """
    fields = _fields(document, "provenance")
    return Provenance(
        mlbench=_text(fields, "mlbench"),
        python=_text(fields, "python"),
        command_line=_texts(fields, "command_line"),
        code=None if fields.get("code") is None else _parse_code(fields["code"]),
        command=None if fields.get("command") is None else _parse_command(fields["command"]),
        experiment=None if fields.get("experiment") is None else _text(fields, "experiment"),
        source=None if fields.get("source") is None else _parse_source(fields["source"]),
        packages=None if fields.get("packages") is None else _parse_texts_by_name(fields["packages"], "packages"),
        machine=None if fields.get("machine") is None else _parse_machine(fields["machine"]),
        session=None if fields.get("session") is None else _text(fields, "session"),
        loader=None if fields.get("loader") is None else _parse_texts_by_name(fields["loader"], "loader"),
    )


# --- collect ----------------------------------------------------------------------------------------------------------


def _task_code(task: str, method: str) -> TaskCode | None:
    with suppress(OSError):
        return TaskCode(task, *environment.digest_code(task, method, Path(isolation.ROOT)))
    return None


def _session() -> str:
    """A digest, to keep the host name private."""
    return hashlib.sha256(f"{os.uname().nodename} {boot_id()}".encode()).hexdigest()[:16]


def _machine() -> MachineRecord:
    uname, facts = platform.uname(), environment.machine_facts()
    return MachineRecord(
        platform=f"{uname.system} {uname.release}",
        architecture=uname.machine,
        cores=facts.get("cores") or 1,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        cpu=facts.get("cpu"),
        cpu_quota=facts.get("cpu_quota"),
        gpus=tuple(facts.get("gpus", ())),
        gpu_driver=facts.get("gpu_driver"),
    )


# --- parse ------------------------------------------------------------------------------------------------------------


def _parse_code(value: object) -> TaskCode:
    fields = _fields(value, "code")
    digest, added = _text(fields, "digest"), _text(fields, "method_digest") if "method_digest" in fields else ""
    if not all(len(one) == 64 and _is_hex(one) for one in (digest, added or digest)):
        raise ValueError('"digest" or "method_digest" is not a SHA-256 digest')
    return TaskCode(_text(fields, "task"), digest, added)


def _parse_command(value: object) -> CommandRecord:
    fields = _fields(value, "command")
    digest, interpreter = fields.get("digest"), fields.get("interpreter")
    return CommandRecord(
        None if digest is None else _text(fields, "digest"),
        _texts(fields, "files"),
        None if interpreter is None else _text(fields, "interpreter"),
    )


def _parse_source(value: object) -> SourceCommit:
    fields = _fields(value, "source")
    commit = _text(fields, "commit")
    if not _is_hex(commit):
        raise ValueError('"commit" is not a git object name')
    return SourceCommit(commit, _flag(fields, "modified"), _flag(fields, "untracked"))


def _parse_texts_by_name(value: object, name: str) -> dict[str, str]:
    fields = _fields(value, name)
    return {name: _text(fields, name) for name in fields}


def _parse_machine(value: object) -> MachineRecord:
    fields = _fields(value, "machine")
    quota = fields.get("cpu_quota")
    if quota is not None and (isinstance(quota, bool) or not isinstance(quota, int | float) or not quota > 0):
        raise ValueError('"cpu_quota" is not a number above 0')
    return MachineRecord(
        platform=_text(fields, "platform"),
        architecture=_text(fields, "architecture"),
        cores=_count(fields, "cores"),
        memory_bytes=_count(fields, "memory_bytes"),
        cpu=None if fields.get("cpu") is None else _text(fields, "cpu"),
        cpu_quota=quota,
        gpus=_texts(fields, "gpus"),
        gpu_driver=None if fields.get("gpu_driver") is None else _text(fields, "gpu_driver"),
    )


def _fields(value: object, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError(f'"{name}" is not an object')
    return value


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise ValueError(f'"{name[:80]}" is not a text')
    return value


def _texts(fields: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = fields.get(name)
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise ValueError(f'"{name}" is not a list of strings')
    return tuple(value)


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name)
    if not isinstance(value, bool):
        raise ValueError(f'"{name}" is neither true nor false')
    return value


def _count(fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f'"{name}" is not a whole number of at least 0')
    return value


def _is_hex(text: str) -> bool:
    return bool(text) and all(character in "0123456789abcdef" for character in text)
