"""How a run is told of: while it runs, and when it has ended."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlbench_cli import console
from mlbench_cli.commands._common import Format
from mlbench_cli.commands._repeats import Repeats, show_repeats
from mlbench_cli.model import Outcome, Run
from mlbench_cli.runs.finished import FinishedRun
from mlbench_cli.spec import CUSTOM, RunSpec

if TYPE_CHECKING:
    from mlbench_cli.results.archive.documents import GoalDocument
    from mlbench_cli.runs.progress import Progress

LAST_WORDS = 3  # lines of the log that failed

# --- while it runs --------------------------------------------------------------------------------------------------


class Reporter:
    """Tells on stderr how far a run is, and once each what is in its way."""

    def __init__(self, run: Run) -> None:
        self._name = run.name
        self._line = console.ProgressLine()
        self._told: set[str] = set()

    def __enter__(self) -> "Reporter":
        return self

    def __exit__(self, *_: object) -> None:
        self._line.close()

    def __call__(self, progress: "Progress") -> None:
        if progress.observation.ended:  # what has come of it is told by the result
            return
        for finding in progress.observation.findings:
            if finding.code not in self._told:
                self._told.add(finding.code)
                self._line.close()
                console.note(f"{self._name}: {finding.summary}")
                if finding.hint:
                    console.note(f"  {finding.hint}")
        self._line.update(f"{self._name}: {describe(progress)}")


def describe(progress: "Progress") -> str:
    """One line, the most telling first: "training 3/10, loss 0.21, Prec@1 91.2 of 97, 1 min 05 s, 40 s to go"."""
    parts = [_phase(progress)]
    if progress.loss is not None:
        parts.append(f"loss {progress.loss:.4g}")
    if progress.metric is not None and progress.threshold is not None:
        if progress.value is None:
            parts.append(f"goal {progress.metric} {progress.comparison} {progress.threshold:g}")
        else:
            parts.append(f"{progress.metric} {progress.value:.4g} of {progress.threshold:g}")
    parts.append(console.duration(progress.elapsed))
    if (left := to_go(progress.eta, progress.eta_high)) is not None:
        parts.append(left)
    return ", ".join(parts)


def to_go(low: float | None, high: float | None) -> str | None:
    """ "40 s to go", or "40 s to 3 min to go" where nothing better is known."""
    if low is None:
        return None
    if high is not None and high <= 1.25 * low + 1:
        return f"{console.duration(low)} to go"
    return f"{console.duration(low)} {'or more' if high is None else f'to {console.duration(high)}'} to go"


def _phase(progress: "Progress") -> str:
    if progress.phase is None:
        phases = [worker.phase for worker in progress.observation.workers]
        return ", ".join(f"{phases.count(phase)} {phase}" for phase in dict.fromkeys(phases))
    text = progress.phase
    if progress.epoch is not None:
        text += f" epoch {progress.epoch:g}" + (f"/{progress.epochs:g}" if progress.epochs else "")
    if progress.step is not None:
        text += f" step {progress.step:g}" + (f"/{progress.steps:g}" if progress.steps else "")
    return text


def in_words(spec: RunSpec) -> str:
    """What a spec runs, on what: "digits_resnet on local, 2 workers, gloo, cpu"."""
    what = "a command" if spec.task == CUSTOM else spec.task + ("" if spec.preset == "spec" else f" ({spec.preset})")
    workers = f"{spec.workers} worker{'s' if spec.workers > 1 else ''}"
    each = f" of {spec.processes_per_worker} ranks" if spec.processes_per_worker > 1 else ""
    return f"{what} on {spec.cluster}, {workers}{each}, {spec.backend}, {spec.device}"


# --- when it has ended ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """A run that has ended, with mlbench's exit code for it."""

    finished: FinishedRun
    exit_code: int

    @property
    def name(self) -> str:
        return self.finished.run.name

    def to_dict(self) -> dict[str, Any]:
        finished = self.finished
        return {
            "name": self.name,
            "outcome": str(finished.outcome),
            "exit_code": self.exit_code,
            "summary": finished.summary,
            "findings": [finding.to_dict() for finding in finished.findings],
            "folder": str(finished.run.folder),
            "result": finished.result,
        }


def report_ended(runs: Sequence[Ended], output: Format, repeats: Sequence[Repeats] = ()) -> None:
    """Print how runs have ended; on stderr why, and what can be done next."""
    if output == Format.json:
        together = {"repeats": [found.to_dict() for found in repeats]} if repeats else {}
        console.out_json({"runs": [ended.to_dict() for ended in runs], **together})
    else:
        console.out_table(
            ["RUN", "WORKERS", "OUTCOME", "GOAL", "SECONDS", "TOTAL", "EXIT"],
            [_row(ended) for ended in runs],
            droppable=["TOTAL", "EXIT", "GOAL"],
        )
        show_repeats(repeats)
    for ended in runs:
        _explain(ended)
    for ended in runs:
        if ended.finished.result is not None:
            console.note(f"Archive of {ended.name}: {ended.finished.run.folder}")
    failed = [ended for ended in runs if ended.exit_code]
    if not failed:
        console.note(f"Next: mlbench download {runs[0].name}, mlbench charts FOLDER")
        return
    hints = [finding.hint for ended in failed for finding in ended.finished.findings if finding.hint]
    for hint in dict.fromkeys(hints or [f"mlbench logs {failed[0].name}"]):
        console.note(f"Next: {hint}")


def _row(ended: Ended) -> list[object]:
    finished = ended.finished
    result = finished.result
    seconds = result["task_seconds"]["wall"] if result else None
    return [
        ended.name,
        finished.run.spec.workers,
        str(finished.outcome),
        _goal(result["goal"] if result else None, is_spent=finished.outcome is Outcome.BUDGET_SPENT),
        None if seconds is None else round(seconds, 2),
        console.duration(result["wall_seconds"] if result else None),
        ended.exit_code,
    ]


def _goal(goal: "GoalDocument | None", is_spent: bool) -> str | None:
    if goal is None:
        return None
    shown = goal["last"] if is_spent else goal["value"]
    value = "-" if shown is None else f"{shown:.4g}"
    return f"{goal['metric']} {value} ({goal['comparison']} {goal['threshold']:g})"


def _explain(ended: Ended) -> None:
    finished = ended.finished
    if ended.exit_code or finished.findings:
        console.note(finished.summary)
    division = finished.result["division"] if finished.result else {}
    if division.get("word") == "open":
        console.note(f"{ended.name} is in the open division: {division['reason']}.")
    conditions = finished.result.get("conditions") if finished.result else None
    if conditions and conditions["labels"]:
        console.note(f"{ended.name} did not have its machine to itself: {', '.join(conditions['labels'])}.")
    for finding in finished.findings:
        if finding.summary not in finished.summary:
            console.note(f"  {finding.summary}")
        for line in finding.evidence.get("log", ())[-LAST_WORDS:] if ended.exit_code else ():
            console.note(f"  | {line}")
