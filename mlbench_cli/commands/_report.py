"""Output about a run: progress while it runs, and results when it has ended."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from msgspec.structs import asdict

from mlbench_cli import console
from mlbench_cli.api import FinishedRun, RunHandle
from mlbench_cli.commands._repeats import show_repeats
from mlbench_cli.console import Format
from mlbench_cli.engines.follow import UNREACHABLE
from mlbench_cli.errors import DamagedArchive, MlbenchError
from mlbench_cli.model.network import network_phrase
from mlbench_cli.model.run import DAMAGED, Run
from mlbench_cli.model.spec import CUSTOM, RunSpec, common_name
from mlbench_cli.results.analysis.figures import listed_seconds
from mlbench_cli.results.analysis.numbers import SECONDS, format_goal, format_value
from mlbench_cli.runs.progress import ESTIMATING, Progress, format_eta
from mlbench_cli.runs.repeats import Repeats
from mlbench_cli.runs.snapshot import UNKNOWN
from mlbench_cli.storage.run_folder import METRICS
from mlbench_cli.tasks.command_code import FOLDER
from mlbench_cli.util.text import counted, list_some
from task_images import contract

LAST_LINES = 3  # of the log of a failed rank
FINISHED = "finished"  # the phase in which ranks write their results
BAR_COLUMNS = 20
LAST_LINE, LAST_LINE_COLUMNS, MIN_LAST_LINE = "; last line: ", 100, 20  # columns in a pipe, and on narrow terminals

# --- while it runs --------------------------------------------------------------------------------------------------


class Reporter:
    """Shows the progress of a run on stderr, and each finding once; with `shows_log`, also the log lines of rank 0.

    Of a user's command on this machine, which may report nothing, the progress has the last line of that log.
    """

    def __init__(self, run: RunHandle, *, shows_log: bool = False) -> None:
        self._run = run
        self._is_own = run.run.spec.task == CUSTOM
        self._log = run.open_log(0) if shows_log else None
        self._line = console.ProgressLine()
        self._shown: set[str] = set()

    def __enter__(self) -> "Reporter":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._show_log()
        self._line.close()

    def __call__(self, progress: Progress) -> None:
        self._show_log()
        if progress.observation.ended:  # the result says how
            return
        # Report that a cluster responds again; its next silence will be reported, too.
        codes = {finding.code for finding in progress.observation.findings}
        if UNREACHABLE in self._shown - codes:
            self._shown.discard(UNREACHABLE)
            self._line.print_above(f"{self._run.name}: the cluster is responding again.")
        for finding in progress.observation.findings:
            if finding.code not in self._shown:
                self._shown.add(finding.code)
                hint = f"\n  {finding.hint}" if finding.hint else ""
                self._line.print_above(f"{self._run.name}: {finding.summary}{hint}")
        last = progress.last_line if self._is_own and self._run.runs_here and self._log is None else ""
        reports = not self._is_own
        self._line.update(lambda width: describe(progress, self._run.name, width, reports=reports, last_line=last))

    def _show_log(self) -> None:
        """Print the lines of rank 0 that are new, without events, if they are wanted. A log that cannot be read now is
        read next time."""
        if self._log is None:
            return
        lines = []
        with suppress(MlbenchError):
            for line in self._log.read_new(0):
                if contract.parse_event(line) is None:
                    lines.append(line.decode("utf-8", "replace").rstrip("\n"))
        if lines:
            self._line.print_above("\n".join(lines))


def describe(
    progress: Progress, name: str = "", width: int | None = None, *, reports: bool = True, last_line: str = ""
) -> str:
    """One line of progress in `width` columns (None: a line of a pipe, of any length and without a bar):
    "x-2: training, epoch 3/10, Prec@1 91.2 of 97, loss 0.21, elapsed 65 s, about 40 s left [=====>   ]". If it is too
    long, a time left that is not known, the bar, step, loss, metric and elapsed time are dropped, in this order.
    `reports` is False for a program that may never report anything, and `last_line` what it wrote last, which is shown
    as far as there is room.
    """
    phase = _phase(progress, reports)
    parts = [(f"{name}: {phase}" if name else phase, 1)]
    if progress.phase == FINISHED:
        parts.append((f"elapsed {console.rough_duration(progress.elapsed)}", 3))
        return console.fit_parts(parts, width)
    parts.append((_position("epoch", progress.epoch, progress.epochs), 2))
    parts.append((_position("step", progress.step, progress.steps), 6))
    if progress.metric is not None and progress.threshold is not None:
        if progress.value is None:
            parts.append((f"goal {progress.metric} {progress.comparison} {progress.threshold:g}", 4))
        else:
            parts.append((f"{progress.metric} {console.significant(progress.value)} of {progress.threshold:g}", 4))
    if progress.loss is not None:
        parts.append((f"loss {console.significant(progress.loss)}", 5))
    parts.append((f"elapsed {console.rough_duration(progress.elapsed)}", 3))
    left = format_eta(progress.eta, progress.eta_high) or ""
    parts.append((left, 8 if left == ESTIMATING else 0))
    if width is not None:
        parts.append((_bar(progress), 7))
    line = console.fit_parts(parts, width)
    if not last_line or progress.loss is not None or progress.value is not None:
        return line
    room = LAST_LINE_COLUMNS if width is None else width - console.display_width(line) - len(LAST_LINE)
    return f"{line}{LAST_LINE}{console.cut(console.clean(last_line), room)}" if room >= MIN_LAST_LINE else line


def _bar(progress: Progress) -> str:
    """ "[=====>    ]": the elapsed share of the expected time; empty while the time left is not known well enough."""
    low, high = progress.eta, progress.eta_high
    if low is None or high is None or high >= 2 * low:
        return ""
    expected = progress.elapsed + (low + high) / 2
    done = int(BAR_COLUMNS * progress.elapsed / expected) if expected > 0 else 0
    return f"[{'=' * done}>{' ' * (BAR_COLUMNS - done)}]"


def _phase(progress: Progress, reports: bool) -> str:
    if any(finding.code == UNREACHABLE for finding in progress.observation.findings):
        return "cluster unreachable"
    if progress.phase == FINISHED:
        return "finishing"
    if progress.phase is not None:
        return progress.phase
    phases = [worker.phase for worker in progress.observation.workers]
    if reports and phases and set(phases) == {"running"}:
        return "starting, loading libraries"
    return ", ".join(f"{phases.count(phase)} {phase}" for phase in dict.fromkeys(phases))


def _position(what: str, number: float | None, count: float | None) -> str:
    if number is None:
        return ""
    return f"{what} {number:g}" + (f"/{count:g}" if count else "")


def in_words(spec: RunSpec) -> str:
    """What a spec runs, on what: "digits_resnet on local, 2 workers, gloo, cpu"."""
    return run_in_words({**asdict(spec), "world_size": spec.world_size})


def run_in_words(run: Mapping[str, Any]) -> str:
    """Like `in_words`, for a run as `status -o json` describes it."""
    what = (
        "a command"
        if run["task"] == CUSTOM
        else run["task"] + ("" if run["preset"] == "spec" else f" ({run['preset']})")
    )
    workers = counted(run["workers"], "worker")
    ranks = run["world_size"] // run["workers"]
    each = f" of {ranks} ranks" if ranks > 1 else ""
    return f"{what} on {run['cluster']}, {workers}{each}, {run['backend']}, {run['device']}"


# --- when it has ended ----------------------------------------------------------------------------------------------


class Ended(NamedTuple):
    """A run that has ended, with mlbench's exit code for it."""

    finished: FinishedRun
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


class Unanswered(NamedTuple):
    """A run whose end is unknown: its archive is damaged, or its cluster did not answer in time."""

    run: Run
    error: MlbenchError

    @property
    def word(self) -> str:
        """The text shown instead of an outcome."""
        return DAMAGED if isinstance(self.error, DamagedArchive) else UNKNOWN

    def to_dict(self) -> dict[str, Any]:
        """Like `Ended.to_dict`, with the reason as its summary, and no result."""
        return {
            "name": self.run.name,
            "outcome": self.word,
            "exit_code": self.error.exit_code,
            "summary": self.error.message,
            "findings": [],
            "folder": str(self.run.folder),
            "result": None,
        }


def report_ended(
    runs: Sequence[Ended],
    output: Format,
    repeats: Sequence[Repeats] = (),
    unanswered: Sequence[Unanswered] = (),
    *,
    names: Sequence[str] = (),
) -> None:
    """Print how runs ended; on stderr the reasons and the next commands. `names` stand for all of them.

    A quiet command prints the folders of their archives instead, and why runs failed.
    """
    if output == Format.json:
        together = {"repeats": [found.to_dict() for found in repeats]} if repeats else {}
        console.out_json(
            {"runs": [*(ended.to_dict() for ended in runs), *(run.to_dict() for run in unanswered)], **together}
        )
    elif not console.is_quiet():
        console.out_table(
            ["RUN", "WORKERS", "OUTCOME", "GOAL", "TIME", "TOTAL", "EXIT"],
            [*map(_row, runs), *map(_row_without_answer, unanswered)],
            droppable=["TOTAL", "EXIT", "GOAL"],
        )
        if repeats:
            show_repeats(repeats, all_metrics=False)
    for ended in runs:
        _explain(ended)
    _explain_together(runs)
    _explain_metrics(runs)
    for ended in runs:
        if not ended.finished.run.folder.exists():
            console.warn(f"{ended.name} has been deleted.")
    folders = [
        folder for ended in runs if ended.finished.result is not None and (folder := ended.finished.run.folder).exists()
    ]
    if console.is_quiet() and output == Format.text:
        for folder in folders:
            console.out(str(folder))
    if len(folders) == 1:
        console.note(f"Archive: {folders[0]}")
    elif folders:
        console.note(f"Archives of {len(folders)} runs: {folders[0].parent}")
    failed = [ended for ended in runs if ended.exit_code]
    if failed:
        hints = [finding.hint for ended in failed for finding in ended.finished.findings if finding.hint]
        console.next_step(*dict.fromkeys(hints or [f"mlbench logs {failed[0].name}"]), error=True)
    elif folders:
        sides = list(dict.fromkeys(common_name(ended.name) or ended.name for ended in runs))
        shown = names or sides
        console.next_step(f"mlbench report {shown[0]}.html {' '.join(shown)}")
        if len(sides) == 2:
            console.next_step(f"mlbench compare {' '.join(sides)}")


def _row(ended: Ended) -> list[object]:
    finished = ended.finished
    result = finished.result
    seconds = listed_seconds(result) if result else None
    return [
        ended.name,
        finished.run.spec.workers,
        str(finished.outcome),
        format_goal(result["goal"] if result else None, str(finished.outcome)),
        None if seconds is None else format_value(seconds, SECONDS),
        console.duration(result["wall_seconds"] if result else None),
        ended.exit_code,
    ]


def _labels(ended: Ended) -> list[str]:
    result = ended.finished.result
    conditions: Mapping[str, Any] = (result.get("conditions") if result else None) or {}
    return list(conditions.get("labels") or ())


def _row_without_answer(item: Unanswered) -> list[object]:
    return [item.run.name, item.run.spec.workers, item.word, None, None, None, item.error.exit_code]


def _explain_together(runs: Sequence[Ended]) -> None:
    """Facts that are printed once with their runs: conditions with reasons, divisions, networks."""
    found: dict[str, dict[str, str]] = {}  # label -> run -> reason
    for ended in runs:
        result = ended.finished.result
        if not result:
            continue
        reasons: Mapping[str, Any] = result["conditions"]
        for label in _labels(ended):
            found.setdefault(label.replace("_", "-"), {})[ended.name] = reasons[label]["reason"]
        if result["division"].get("word") == "open":
            found.setdefault("open division", {})[ended.name] = str(result["division"]["reason"])
        if result.get("network") and (phrase := network_phrase(result["network"])):
            found.setdefault("network between the workers", {})[ended.name] = phrase
    for label, by_run in sorted(found.items()):
        name, reason = next(iter(by_run.items()))
        if len(runs) == 1:
            console.note(f"{label}: {reason}")
        elif len(set(by_run.values())) == 1:
            console.note(f"{label}: {reason} ({list_some(list(by_run), 3)})")
        else:
            console.note(f"{label}: {len(by_run)} of {len(runs)} runs; {name}: {reason}")


def _explain_metrics(runs: Sequence[Ended]) -> None:
    """Say how a script reports metrics, if none of these scripts did."""
    scripts = [ended for ended in runs if ended.finished.run.spec.task == CUSTOM and not ended.exit_code]
    scripts = [each for each in scripts if any((each.finished.run.folder / FOLDER).rglob("*.py"))]
    if scripts and not any(map(_has_metrics, scripts)):
        console.note(
            "No metric was reported, so only times can be compared. A script reports one like this:\n"
            '  from mlbench import emit; emit("metric", name="accuracy", value=87.1)'
        )


def _has_metrics(ended: Ended) -> bool:
    with suppress(OSError):
        return (ended.finished.run.folder / METRICS).stat().st_size > 0
    return False


def _explain(ended: Ended) -> None:
    finished = ended.finished
    has_failed = ended.exit_code != 0
    if has_failed or finished.findings:
        console.note(finished.summary, error=has_failed)
    for finding in finished.findings:
        if finding.summary not in finished.summary:
            console.note(f"  {finding.summary}", error=has_failed)
        for line in finding.evidence.get("log", ())[-LAST_LINES:] if has_failed else ():
            console.note(f"  | {line}", error=True)
