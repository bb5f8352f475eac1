"""How a run ended, read from two documents in its sealed folder, without an engine or the judge."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from mlbench_cli.errors import CapacityError, DamagedArchive, UsageError
from mlbench_cli.model.network import NOT_AS_ASKED
from mlbench_cli.model.run import Finding, Outcome, Run, RunRow
from mlbench_cli.storage import run_folder
from mlbench_cli.storage.run_folder import RunFolder
from mlbench_cli.util.text import clean_values

if TYPE_CHECKING:
    from mlbench_cli.results.archive.documents import ResultDocument

ARCHIVE_UNFINISHED = "archive_unfinished"


@dataclass(frozen=True)
class FinishedRun:
    """How a run ended. `result` is its result.json; None if the archive could not be completed (a full disk)."""

    run: Run
    outcome: Outcome
    summary: str
    findings: tuple[Finding, ...]
    result: "ResultDocument | None"

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


def read_finished(run: Run) -> FinishedRun | None:
    """How the run ended, from its sealed archive; None for a run that is not sealed.

    Raises DamagedArchive if one of the two documents has changed since sealing, or is invalid.
    """
    from mlbench_cli.results.archive.files import read_documents

    folder = RunFolder(run.folder)
    if not folder.is_sealed:
        return None

    try:
        result, found = read_documents(run.folder, (run_folder.RESULT, run_folder.FINDINGS))
    except DamagedArchive:
        if RunFolder(run.folder).is_sealed:
            raise
        return None  # it has just been deleted
    outcome = Outcome(str(result["outcome"]))
    findings = tuple(_finding(document) for document in found["findings"])
    result, found = clean_values(result), clean_values(found)
    summary = str(result.get("summary") or f"{run.name} {outcome.phrase}.")
    return FinishedRun(run, outcome, summary, findings, cast("ResultDocument", result))


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
    known = {key: document[key] for key in Finding.__dataclass_fields__ if key in document}
    return Finding(**known)
