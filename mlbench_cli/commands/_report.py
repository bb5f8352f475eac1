"""What is printed of a run: while it runs, and when it has ended."""

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from mlbench_cli import console
from mlbench_cli.commands._common import Format
from mlbench_cli.commands._repeats import show_repeats
from mlbench_cli.errors import MlbenchError
from mlbench_cli.model import Outcome
from mlbench_cli.network import network_phrase
from mlbench_cli.runs.repeats import Repeats
from mlbench_cli.spec import CUSTOM, RunSpec
from task_images import contract

if TYPE_CHECKING:
    from mlbench_cli.api import FinishedRun, RunHandle
    from mlbench_cli.results.archive.documents import GoalDocument
    from mlbench_cli.runs.progress import Progress

LAST_WORDS = 3  # lines of the log that failed

# --- while it runs --------------------------------------------------------------------------------------------------


class Reporter:
    """Shows on stderr how far a run is, and each finding once; with `shows_log` also the log lines of rank 0."""

    def __init__(self, run: "RunHandle", *, shows_log: bool = False) -> None:
        self._run = run
        self._log = run.open_log(0) if shows_log else None
        self._line = console.ProgressLine()
        self._shown: set[str] = set()

    def __enter__(self) -> "Reporter":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._show_log()
        self._line.close()

    def __call__(self, progress: "Progress") -> None:
        self._show_log()
        if progress.observation.ended:  # the result says how
            return
        for finding in progress.observation.findings:
            if finding.code not in self._shown:
                self._shown.add(finding.code)
                hint = f"\n  {finding.hint}" if finding.hint else ""
                self._line.print_above(f"{self._run.name}: {finding.summary}{hint}")
        task = self._run.run.spec.task
        self._line.update(lambda width: describe(progress, self._run.name, width, reports=task != CUSTOM))

    def _show_log(self) -> None:
        """Print the lines of rank 0 that are new, without events. A log that cannot be read now is read next time."""
        if self._log is None:
            return
        lines = []
        with suppress(MlbenchError):
            for line in self._log.read_new(0):
                if contract.parse_event(line) is None:
                    lines.append(line.decode("utf-8", "replace").rstrip("\n"))
        if lines:
            self._line.print_above("\n".join(lines))


def describe(progress: "Progress", name: str = "", width: int | None = None, *, reports: bool = True) -> str:
    """How far a run is, in `width` columns: "x-2: training epoch 3/10, Prec@1 91.2 of 97, loss 0.21, elapsed 65 s,
    about 40 s left". If it is too long, step, loss, metric and elapsed time are left out, in this order. `reports` is
    False for a program that may never report anything.
    """
    parts = [(f"{name}: {_phase(progress, reports)}" if name else _phase(progress, reports), 1)]
    parts.append((_position("epoch", progress.epoch, progress.epochs), 2))
    parts.append((_position("step", progress.step, progress.steps), 6))
    if progress.metric is not None and progress.threshold is not None:
        if progress.value is None:
            parts.append((f"goal {progress.metric} {progress.comparison} {progress.threshold:g}", 4))
        else:
            parts.append((f"{progress.metric} {progress.value:.4g} of {progress.threshold:g}", 4))
    if progress.loss is not None:
        parts.append((f"loss {progress.loss:.4g}", 5))
    parts.append((f"elapsed {console.rough_duration(progress.elapsed)}", 3))
    parts.append((format_eta(progress.eta, progress.eta_high) or "", 0))
    return console.fit_parts(parts, width)


def format_eta(low: float | None, high: float | None) -> str | None:
    """ "about 40 s left", "between 40 s and 3 min left", "at least 40 s left"; None if nothing is known."""
    if low is None:
        return None
    if high is None:
        return f"at least {console.rough_duration(low)} left"
    if high < 0.5:
        return "almost done"
    if high <= 1.25 * low + 1:
        return f"about {console.rough_duration(low)} left"
    if low < 0.5:
        return f"up to {console.rough_duration(high)} left"
    return f"between {console.rough_duration(low)} and {console.rough_duration(high)} left"


def _phase(progress: "Progress", reports: bool) -> str:
    if progress.phase is not None:
        return progress.phase
    phases = [worker.phase for worker in progress.observation.workers]
    if reports and phases and set(phases) == {"running"}:
        return "starting: ranks load their libraries"
    return ", ".join(f"{phases.count(phase)} {phase}" for phase in dict.fromkeys(phases))


def _position(what: str, number: float | None, count: float | None) -> str:
    if number is None:
        return ""
    return f"{what} {number:g}" + (f"/{count:g}" if count else "")


def in_words(spec: RunSpec) -> str:
    """What a spec runs, on what: "digits_resnet on local, 2 workers, gloo, cpu"."""
    what = "a command" if spec.task == CUSTOM else spec.task + ("" if spec.preset == "spec" else f" ({spec.preset})")
    workers = f"{spec.workers} worker{'s' if spec.workers > 1 else ''}"
    each = f" of {spec.processes_per_worker} ranks" if spec.processes_per_worker > 1 else ""
    return f"{what} on {spec.cluster}, {workers}{each}, {spec.backend}, {spec.device}"


# --- when it has ended ----------------------------------------------------------------------------------------------


class Ended(NamedTuple):
    """A run that has ended, with mlbench's exit code for it."""

    finished: "FinishedRun"
    exit_code: int

    @property
    def name(self) -> str:
        """The run's name."""
        return self.finished.run.name

    def to_dict(self) -> dict[str, Any]:
        """The run's end as `-o json` prints it."""
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
    network = finished.result.get("network") if finished.result else None
    if network and (phrase := network_phrase(network)):
        console.note(f"Network between the ranks of {ended.name}: {phrase}.")
    for finding in finished.findings:
        if finding.summary not in finished.summary:
            console.note(f"  {finding.summary}")
        for line in finding.evidence.get("log", ())[-LAST_WORDS:] if ended.exit_code else ():
            console.note(f"  | {line}")
