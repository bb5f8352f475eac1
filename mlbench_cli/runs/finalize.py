"""Complete the archive of a run that has ended, once, by one owner at a time; and read from it how the run ended.

A local run is finalized by its agent, a cluster run by the client that runs `run`, `wait`, `download` or `cancel`. All
of them call `finalize`, which locks the run's folder; later callers read the sealed archive.
"""

import errno
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from msgspec import Struct
from msgspec.structs import replace

from mlbench_cli.engines.base import LOSSES, Engine
from mlbench_cli.engines.local.engine import LocalEngine
from mlbench_cli.errors import CapacityError, DamagedArchive, MlbenchError, NotFoundError, UsageError
from mlbench_cli.model.network import NOT_AS_ASKED
from mlbench_cli.model.run import Finding, Observation, Outcome, Run, RunRow, RunState
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.results.archive.documents import ResultDocument
from mlbench_cli.results.archive.evidence import collect_evidence
from mlbench_cli.results.archive.files import read_documents
from mlbench_cli.results.archive.judge import judge
from mlbench_cli.results.archive.record import run_document
from mlbench_cli.results.archive.seal import seal
from mlbench_cli.storage.run_folder import FINDINGS, RESULT, RUN, RunFolder
from mlbench_cli.storage.store import Store
from mlbench_cli.util.text import clean_values

ARCHIVE_UNFINISHED = "archive_unfinished"
_OUTPUT_LOST = Finding(
    "output_lost",
    "Output files are gone from the cluster or were fetched by another client; the archive contains only the logs.",
    hint="Fetch results sooner (mlbench wait NAME), or keep them longer (--set run.keep=7d).",
)


class FinishedRun(Struct, frozen=True):
    """How a run ended. `result` is its result.json; None if the archive could not be completed (a full disk)."""

    run: Run
    outcome: Outcome
    summary: str
    findings: tuple[Finding, ...]
    result: ResultDocument | None

    @property
    def goal_reached(self) -> bool:
        """Whether the run had a goal and reached it."""
        goal = self.result["goal"] if self.result else None
        return goal is not None and goal["reached"]

    def exit_code(self, *, require_goal: bool = False) -> int:
        """mlbench's exit code for commands that waited; that of CapacityError if the requested network was not
        available."""
        if self.outcome is Outcome.NEVER_STARTED and any(finding.code == NOT_AS_ASKED for finding in self.findings):
            return CapacityError.exit_code
        sealed = self.result is not None
        return self.outcome.exit_code(require_goal=require_goal, goal_reached=self.goal_reached, sealed=sealed)


def finalize(
    run: Run,
    engine: Engine,
    store: Store,
    observation: Observation | None = None,
    *,
    notice: Callable[[str], None] | None = None,
) -> FinishedRun | None:
    """Fetch remaining results, judge and seal, and record the outcome; None for a run that has not ended.

    `observation` is the last known one; without it the engine is asked. `notice` gets a sentence if another command
    holds the lock. Raises NotFoundError if the run has been deleted, DeadlineError if the lock is not released in time.
    """
    _require_recorded(run, store)
    if (finished := read_finished(run)) is None:
        run.folder.mkdir(parents=True, exist_ok=True)
        with RunFolder(run.folder).lock(notice=notice):
            _require_recorded(run, store)
            finished = read_finished(run)
            finished = finished or _complete(run, engine, observation)
    if finished is not None and finished.result is not None:
        store.advance(run, RunState.FINISHED, finished.outcome)
    return finished


def finalize_folder(folder: Path) -> None:
    """Finalize the local run in `folder`; called by its agent, which knows only the folder."""
    document = RunFolder(folder).read_json(RUN)
    if document is None:
        return
    run = Run(document["id"], RunSpec.from_dict(document["spec"]), folder, document["created"])
    store = Store(folder.parents[1])
    try:
        finalize(run, LocalEngine(), store)
    except NotFoundError:
        return  # deleted: nothing to complete
    finally:
        store.close()


def _require_recorded(run: Run, store: Store) -> None:
    if store.find_run(run.id) is None:
        with suppress(OSError):
            run.folder.rmdir()  # locking it has made it again
        raise NotFoundError(f'The run "{run.name}" was deleted in the meantime.', hint="mlbench status")


def _complete(run: Run, engine: Engine, observation: Observation | None) -> FinishedRun | None:
    folder = RunFolder(run.folder)
    observation = folder.read_observation() or observation or engine.look(run)
    if observation.ended is None:
        return None
    if observation.is_absent and engine.look(run).ended is None:
        return None  # it was seen before it was submitted, which the lock excludes now
    try:
        folder.write_observation(observation)  # the cluster may lose this information before the archive is sealed
        observation = _fetch(run, engine, observation)
        judgement = seal(run, observation)
    except (OSError, MlbenchError) as error:
        if not _is_full(error):
            raise
        return _finish_without_archive(run, observation)
    return FinishedRun(run, judgement.outcome, judgement.result["summary"], judgement.findings, judgement.result)


def _fetch(run: Run, engine: Engine, observation: Observation) -> Observation:
    """Fetch the run's files. Returns the observation with the findings of the transfer.

    A loss is reported once, by the engine if it knows why.
    """
    fetched = engine.head(run).fetch()
    codes = {finding.code for finding in observation.findings}
    is_explained = any(finding.code in LOSSES for finding in fetched.findings)
    found = fetched.findings if fetched.complete or is_explained else (_OUTPUT_LOST, *fetched.findings)
    more = tuple(finding for finding in found if finding.code not in codes)
    return replace(observation, findings=(*observation.findings, *more))


def _finish_without_archive(run: Run, observation: Observation) -> FinishedRun:
    """How a run ended whose archive does not fit on the disk. The next command that waits for it tries again."""
    judgement = judge(collect_evidence(run, run_document(run), observation))
    finding = Finding(
        ARCHIVE_UNFINISHED,
        f"The disk is full: the archive of {run.name} in {run.folder} could not be completed.",
        hint=f"Free up disk space, then: mlbench wait {run.name}",
        retryable=True,
    )
    findings = (*judgement.findings, finding)
    return FinishedRun(run, judgement.outcome, judgement.result["summary"], findings, None)


def _is_full(error: BaseException) -> bool:
    cause = error if isinstance(error, OSError) else error.__context__
    return isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)


# --- how a run ended -------------------------------------------------------------------------------------------------


def read_finished(run: Run) -> FinishedRun | None:
    """How the run ended, from its sealed archive; None for a run that is not sealed.

    Raises DamagedArchive if one of the two documents has changed since sealing, or is invalid.
    """
    folder = RunFolder(run.folder)
    if not folder.is_sealed:
        return None
    try:
        result, found = read_documents(run.folder, (RESULT, FINDINGS))
    except DamagedArchive:
        if RunFolder(run.folder).is_sealed:
            raise
        return None  # it has just been deleted
    outcome = Outcome(str(result["outcome"]))
    findings = tuple(_finding(document) for document in found["findings"])
    result, found = clean_values(result), clean_values(found)
    summary = str(result.get("summary") or f"{run.name} {outcome.phrase}.")
    return FinishedRun(run, outcome, summary, findings, cast(ResultDocument, result))


def read_undamaged(run: Run) -> FinishedRun | None:
    """Like `read_finished`, but None for a damaged archive, for totals over many runs."""
    try:
        return read_finished(run)
    except UsageError:
        return None


def read_outcome(row: RunRow) -> Outcome | None:
    """How the run ended: from its archive or, if that is damaged, from the store. None: it has not ended.

    Raises DamagedArchive if neither has it.
    """
    try:
        finished = read_finished(row.run)
    except UsageError:
        if row.outcome is None:
            raise
        return row.outcome
    return row.outcome if finished is None else finished.outcome


def _finding(document: Mapping[str, Any]) -> Finding:
    known = {key: document[key] for key in Finding.__struct_fields__ if key in document}
    return Finding(**known)


# --- called by the agent ---------------------------------------------------------------------------------------------


def main(folder: str) -> None:
    """Entry point for the agent of a local run."""
    os.chdir("/")
    finalize_folder(Path(folder))
