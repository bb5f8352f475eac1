"""A run that is over, as its archive tells it: read from two documents in its folder, without engine or judge."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from mlbench_cli import run_folder
from mlbench_cli.errors import CapacityError
from mlbench_cli.model import Finding, Outcome, Run
from mlbench_cli.network import NOT_AS_ASKED
from mlbench_cli.run_folder import RunFolder

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
        """mlbench's exit code for those who waited; CapacityError's if the network was not to be had."""
        if self.outcome is Outcome.NEVER_STARTED and any(finding.code == NOT_AS_ASKED for finding in self.findings):
            return CapacityError.exit_code
        sealed = self.result is not None
        return self.outcome.exit_code(require_goal=require_goal, goal_reached=self.goal_reached, sealed=sealed)


def read_finished(run: Run) -> FinishedRun | None:
    """The run as its sealed archive tells it; None for a run that is not sealed, or whose documents are unreadable."""
    folder = RunFolder(run.folder)
    if not folder.is_sealed:
        return None
    result = folder.read_json(run_folder.RESULT)
    found = folder.read_json(run_folder.FINDINGS) or {}
    if result is None or result.get("outcome") not in [*Outcome]:
        return None
    outcome = Outcome(result["outcome"])
    findings = tuple(_finding(document) for document in found.get("findings") or ())
    summary = result.get("summary") or f"{run.name} {outcome.phrase}."
    return FinishedRun(run, outcome, summary, findings, cast("ResultDocument", result))


def _finding(document: Mapping[str, Any]) -> Finding:
    known = {key: document[key] for key in Finding.__dataclass_fields__ if key in document}
    return Finding(**known)
