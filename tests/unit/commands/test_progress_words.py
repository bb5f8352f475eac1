"""What a run that is followed shows: its line of progress, the time left, its log, and each finding once."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from mlbench_cli.commands._report import Reporter, describe, format_eta
from mlbench_cli.errors import NotFoundError
from mlbench_cli.model.run import Ending, Finding, Observation, WorkerState
from mlbench_cli.runs.progress import Progress
from task_images.contract import format_event

Captured = pytest.CaptureFixture[str]


def workers(*phases: str) -> Observation:
    return Observation(100.0, tuple(WorkerState(rank, phase) for rank, phase in enumerate(phases)))


def progress(**fields: Any) -> Progress:
    return Progress(**{"observation": workers("running"), "elapsed": 65.0, "phase": "training", **fields})


SILENT = Finding("unreachable", "The cluster does not answer.", hint="Wait.")
WHOLE = progress(
    epoch=3.0, epochs=10.0, step=7.0, steps=20.0, metric="Prec@1", comparison=">=", threshold=97.0, value=91.23,
    loss=0.2149, eta=36.0, eta_high=44.0,
)  # fmt: skip
# 65 s of 65 + 40 have passed: 12 of 20 columns.
BAR = f"[{'=' * 12}>{' ' * 8}]"


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (None, None, None),
        (None, 50.0, "estimating time left"),
        (40.0, None, "estimating time left"),
        (40.0, 80.0, "estimating time left"),
        (40.0, 79.0, "40 s to 1 min 19 s left"),
        (40.0, 50.1, "40 s to 50 s left"),
        (40.0, 50.0, "about 40 s left"),
        (0.4, 0.99, "almost done"),
        (1.0, 1.0, "about 1 s left"),
        (0.0, 1.0, "estimating time left"),
    ],
)
def test_the_time_left_is_as_precise_as_its_bounds(low: float | None, high: float | None, text: str | None) -> None:
    assert format_eta(low, high) == text


def test_a_whole_line_has_everything_in_order() -> None:
    parts = [
        *("x-2: training", "epoch 3/10", "step 7/20", "Prec@1 91.2 of 97", "loss 0.215", "elapsed 1 min 5 s"),
        "about 36 s left",
    ]
    assert describe(WHOLE, "x-2") == ", ".join(parts)
    assert describe(WHOLE, "x-2", 200) == ", ".join([*parts, BAR])
    assert describe(WHOLE) == ", ".join(["training", *parts[1:]])


def test_a_line_that_is_too_long_loses_its_parts_one_after_the_other() -> None:
    order = [BAR, "step 7/20", "loss 0.215", "Prec@1 91.2 of 97", "elapsed 1 min 5 s", "epoch 3/10", "x-2: training"]
    parts = describe(WHOLE, "x-2", 200).split(", ")
    for lost in order:
        width = len(", ".join(parts))
        assert describe(WHOLE, "x-2", width) == ", ".join(parts)
        parts.remove(lost)
        assert describe(WHOLE, "x-2", width - 1) == ", ".join(parts)
    assert parts == ["about 36 s left"]
    assert describe(WHOLE, "x-2", 10) == "about 36 …"


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"epoch": 3.0}, "epoch 3"),
        ({"epoch": 0.0, "epochs": 2.0}, "epoch 0/2"),
        ({"epoch": 2.5, "epochs": 10.0}, "epoch 2.5/10"),
        ({"step": 4.0}, "step 4"),
        ({"loss": 0.0}, "loss 0"),
        ({"metric": "Prec@1", "comparison": ">=", "threshold": 97.5}, "goal Prec@1 >= 97.5"),
        ({"metric": "loss", "comparison": "<=", "threshold": 0.25, "value": 1.5}, "loss 1.50 of 0.25"),
        ({"eta_high": 50.0}, "estimating time left"),
    ],
)
def test_a_line_has_what_the_task_reports(changes: dict[str, Any], part: str) -> None:
    assert part in describe(progress(**changes)).split(", ")


@pytest.mark.parametrize(
    "changes",
    [{}, {"epochs": 10.0}, {"metric": "Prec@1"}, {"threshold": 97.0}, {"steps": 3.0}, {"value": 3.0}],
)
def test_a_line_has_nothing_that_the_task_does_not_report(changes: dict[str, Any]) -> None:
    assert describe(progress(**changes)) == "training, elapsed 1 min 5 s"


@pytest.mark.parametrize(
    ("phases", "reports", "words"),
    [
        (("running", "running"), True, "starting, loading libraries"),
        (("running", "running"), False, "2 running"),
        (("running", "pending"), True, "1 running, 1 pending"),
        (("pending", "running", "pending"), True, "2 pending, 1 running"),
        (("pending",), True, "1 pending"),
    ],
)
def test_before_the_first_phase_the_workers_are_counted(phases: tuple[str, ...], reports: bool, words: str) -> None:
    seen = progress(phase=None, observation=workers(*phases))
    assert describe(seen, "x-2", reports=reports) == f"x-2: {words}, elapsed 1 min 5 s"
    assert not reports or describe(seen, "x-2") == describe(seen, "x-2", reports=True)


def test_a_run_that_writes_its_results_shows_no_goal_and_no_time_left() -> None:
    assert describe(replace(WHOLE, phase="finished"), "x-2", 200) == "x-2: finishing, elapsed 1 min 5 s"


def test_a_silent_cluster_is_shown_instead_of_the_phase() -> None:
    seen = replace(workers("running"), findings=(Finding("straggler", "Slow."), SILENT))
    assert describe(progress(observation=seen), "x-2") == "x-2: cluster unreachable, elapsed 1 min 5 s"


@pytest.mark.parametrize(
    ("elapsed", "low", "high", "bar"),
    [
        (0.0, 36.0, 44.0, f"[>{' ' * 20}]"),
        (40.0, 36.0, 44.0, f"[{'=' * 10}>{' ' * 10}]"),
        (65.0, 36.0, 44.0, BAR),
        (100.0, 0.0, 0.5, ""),
        (100.0, 40.0, 80.0, ""),
        (100.0, 40.0, 79.9, f"[{'=' * 12}>{' ' * 8}]"),
        (100.0, None, 50.0, ""),
        (100.0, 50.0, None, ""),
    ],
)
def test_the_bar_is_the_elapsed_share_of_the_expected_time(
    elapsed: float, low: float | None, high: float | None, bar: str
) -> None:
    shown = describe(progress(elapsed=elapsed, eta=low, eta_high=high), "", 200)
    assert shown[shown.index("[") :] == bar if bar else "[" not in shown


# --- following --------------------------------------------------------------------------------------------------------


class Log:
    """The log of rank 0: each read brings the next lines."""

    def __init__(self, *reads: list[bytes] | NotFoundError) -> None:
        self._reads = list(reads)

    def read_new(self, rank: int) -> list[bytes]:
        assert rank == 0
        lines = self._reads.pop(0) if self._reads else []
        if isinstance(lines, NotFoundError):
            raise lines
        return lines


def make_run(log: Log | None = None, task: str = "digits_resnet") -> Any:
    spec = SimpleNamespace(task=task)

    def open_log(rank: int) -> Log | None:
        assert rank == 0
        return log

    return SimpleNamespace(name="x-2", run=SimpleNamespace(spec=spec), open_log=open_log)


def seen_with(*findings: Finding, **fields: Any) -> Progress:
    return progress(observation=replace(workers("running"), findings=findings, **fields))


def test_a_finding_is_shown_once_with_its_hint_and_the_return_of_a_cluster_too(capsys: Captured) -> None:
    slow = Finding("straggler", "Rank 1 is slow.")
    with Reporter(make_run()) as report:
        report(seen_with(slow))
        report(seen_with(slow, SILENT))
        report(seen_with(SILENT))
        report(seen_with(slow))
        report(seen_with())
        report(seen_with(SILENT))
    lines = [line for line in capsys.readouterr().err.splitlines() if "elapsed" not in line]
    silence = ["x-2: The cluster does not answer.", "  Wait."]
    assert lines == ["x-2: Rank 1 is slow.", *silence, "x-2: the cluster is responding again.", *silence]


def test_nothing_is_shown_of_a_run_that_has_ended(capsys: Captured) -> None:
    with Reporter(make_run()) as report:
        report(seen_with(SILENT, ended=Ending.EXITED))
    assert capsys.readouterr().err == ""


def test_a_command_that_reports_nothing_is_not_said_to_load_libraries(capsys: Captured) -> None:
    for task, words in (("custom", "1 running"), ("digits_resnet", "starting, loading libraries")):
        with Reporter(make_run(task=task)) as report:
            report(progress(phase=None))
        assert capsys.readouterr().err == f"x-2: {words}, elapsed 1 min 5 s\n"


def test_the_log_is_shown_without_events_and_to_its_end(capsys: Captured) -> None:
    event = format_event({"v": 1, "event": "phase", "rank": 0, "time": 1.0, "phase": "training"}).encode()
    log = Log([b"hello\n", event + b"\n", b"caf\xe9"], NotFoundError("Not yet."), [b"last\n"])
    with Reporter(make_run(log), shows_log=True) as report:
        report(seen_with(ended=Ending.EXITED))
        report(seen_with(ended=Ending.EXITED))
    assert capsys.readouterr().err == "hello\ncaf\ufffd\nlast\n"


def test_the_log_is_not_read_after_an_error_nor_without_being_asked_for(capsys: Captured) -> None:
    log = Log([b"hello\n"])
    with pytest.raises(NotFoundError), Reporter(make_run(log), shows_log=True):
        raise NotFoundError("It is gone.")
    with Reporter(make_run(log)) as report:
        report(seen_with(ended=Ending.EXITED))
    assert capsys.readouterr().err == ""
