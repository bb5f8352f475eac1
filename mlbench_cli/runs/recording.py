"""Plan an experiment, and record it: run.json of every member and the rows of the store, all of it or nothing.

The runs' folders are written first, under ids that nobody knows yet; one transaction makes them known. A client that is
killed before leaves folders without rows and a list of them, which the next recording removes.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from msgspec.structs import replace

from mlbench_cli.agent.processes import try_lock
from mlbench_cli.errors import UsageError
from mlbench_cli.model.run import Experiment, JsonObject, Run
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.results.archive.record import write_run_document
from mlbench_cli.runs.experiment import Candidate, MemberRow, Plan, make_plan
from mlbench_cli.runs.finalize import read_outcome
from mlbench_cli.runs.launch import brings_files
from mlbench_cli.runs.own_command import find_interpreter
from mlbench_cli.runs.queue import FOLDER
from mlbench_cli.storage.run_folder import PODS_FILES, RunFolder
from mlbench_cli.storage.store import Store
from mlbench_cli.tasks.command_code import CommandCode, collect_code, copy_code, pack_code
from mlbench_cli.tasks.provenance import CommandRecord, collect_provenance
from mlbench_cli.util.text import list_some
from mlbench_cli.util.times import now

_INTENT = "recording-{}.json"  # in DATA/experiments, while a client records
_LOCK = "recording.lock"  # in DATA
_LOCK_SECONDS = 60.0  # in which another client removes what killed ones have left


def plan_experiment(
    experiment: Experiment, candidates: Sequence[Candidate], store: Store, *, retry_failed: bool = False
) -> Plan:
    """The plan that completes an experiment, whose members are in the store; new runs get an id and a folder. The
    caller is its queue: another one may have added members since `experiment` was read."""
    known = store.find_experiment(experiment.name)
    if known is not None and known.id == experiment.id:
        experiment = replace(experiment, members=known.members)
    rows = {row.run.id: row for row in store.members(experiment)}
    existing = []
    for member in experiment.members:
        if (row := rows.get(member.run_id)) is not None:
            existing.append(MemberRow(member, row.run, read_outcome(row)))

    def make_run(spec: RunSpec) -> Run:
        run_id = os.urandom(6).hex()
        return Run(run_id, spec, store.folder / "runs" / run_id, now())

    return make_plan(experiment, existing, candidates, make_run, retry_failed=retry_failed)


def document_writer(
    command_line: Sequence[str],
    experiment: Experiment,
    repeats: int | None = None,
    notify: Callable[[str], None] = lambda text: None,
) -> Callable[[Run], None]:
    """Writes run.json with the provenance of the run, collected once for each program and method, and the number of
    repeats that were asked for, and puts the files of a user's command beside it. `notify` gets which of them workers
    get."""
    known: dict[tuple[object, ...], tuple[JsonObject, CommandCode | None]] = {}
    told: set[str] = set()  # files

    def collect(spec: RunSpec) -> tuple[JsonObject, CommandCode | None]:
        code = command = None
        is_local = spec.engine == "local" and not spec.runs_task_program
        if is_local or brings_files(spec):
            code = collect_code(spec.argv, spec.include_files)
            program = find_interpreter(spec.argv) if is_local and not spec.anonymous else None
            if code is not None and brings_files(spec) and not told.issuperset(code.files):
                told.update(code.files)
                notify(f"Workers get {list_some(sorted(told), 3)} of this folder.")
            command = CommandRecord(code.digest if code else None, tuple(sorted(code.files)) if code else (), program)
        label = f"{experiment.name} {experiment.id[:6]}"
        return collect_provenance(spec, command_line, command=command, experiment=label).to_dict(), code

    def write(run: Run) -> None:
        key = (run.spec.task, run.spec.method.get("name"), run.spec.argv)
        if key not in known:
            known[key] = collect(run.spec)
        document, code = known[key]
        write_run_document(run, document, repeats)
        if code is not None and not run.spec.anonymous:
            copy_code(code, run.folder)
        if code is not None and brings_files(run.spec):
            (RunFolder(run.folder).state / PODS_FILES).write_bytes(pack_code(code))

    return write


def record(
    experiment: Experiment,
    runs: Sequence[Run],
    store: Store,
    write_document: Callable[[Run], None] = write_run_document,
) -> None:
    """Record `experiment` with its members, and `runs`, those of their runs that are new.

    Atomic: a kill at any moment leaves all of it or nothing. Raises UsageError for a name that is taken or a folder
    that cannot be written.
    """
    folder = store.folder / FOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (store.folder / "runs").mkdir(exist_ok=True)
        # Remove what clients that were killed while recording have left, unless another one is recording just now.
        with open(store.folder / _LOCK, "ab") as lock:
            for path in folder.glob(_INTENT.format("*")) if try_lock(lock.fileno()) else ():
                with suppress(ValueError):  # killed before all of it was written, and so before the first folder
                    _remove_unrecorded(map(str, json.loads(path.read_bytes())), store)
                path.unlink()
        with _intent(folder, experiment, runs):
            try:
                for run in runs:
                    write_document(run)
                store.record_experiment(experiment, runs)
            except BaseException:
                _remove_unrecorded([run.id for run in runs], store)
                raise
    except OSError as error:
        raise UsageError(
            f"The runs cannot be recorded in {store.folder}: {error.strerror or error}.",
            hint="Free up disk space or fix its permissions, or set MLBENCH_HOME to another folder.",
        ) from None


@contextmanager
def _intent(folder: Path, experiment: Experiment, runs: Sequence[Run]) -> Iterator[None]:
    """List the folders of `runs` while they are written. Every client that writes some has the lock."""
    path = folder / _INTENT.format(f"{experiment.id}-{os.getpid()}")
    with open(folder.parent / _LOCK, "ab") as lock:
        if not try_lock(lock.fileno(), shared=True, patience=_LOCK_SECONDS):
            raise TimeoutError(f"another client has locked {_LOCK} for {_LOCK_SECONDS:g} s")
        try:
            with open(path, "wb") as listed:
                listed.write(json.dumps([run.id for run in runs]).encode())
                listed.flush()
                os.fsync(listed.fileno())
            yield
        finally:
            path.unlink(missing_ok=True)


def _remove_unrecorded(ids: Iterable[str], store: Store) -> None:
    for run_id in ids:
        if run_id.replace("-", "").isalnum() and store.find_run(run_id) is None:
            shutil.rmtree(store.folder / "runs" / run_id, ignore_errors=True)
