"""Measuring one size after the other with a clock of the test: samples, budgets, percentiles, and what is refused."""

import csv
import json
import statistics
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from task_images.allreduce import measure as measuring
from task_images.allreduce import task
from task_images.allreduce.fit import Fit
from task_images.allreduce.measure import (
    COLUMNS,
    ISOLATED,
    MIN_SAMPLES,
    PIPELINED,
    Row,
    Series,
    check,
    check_sum,
    measure,
    time_rounds,
    time_samples,
)
from task_images.allreduce.operations import COLLECTIVES, IN_PLACE, OUT_OF_PLACE, Buffers, Call
from task_images.allreduce.settings import Settings
from task_images.harness.errors import TaskUsageError, WrongResultError
from tests.fakes.clock import Clock

SERIES = Series("all_reduce", "fp32", IN_PLACE)


class World:
    """Ranks of which the others always say the same."""

    backend, device, rank, is_first = "gloo", torch.device("cpu"), 0, True
    is_gloo_on_gpu = False

    def __init__(self, size: int = 4, others: float | None = None) -> None:
        self.size, self.others, self.barriers = size, others, 0

    def max(self, values: Sequence[float]) -> list[float]:
        return [value if self.others is None else max(value, self.others) for value in values]

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        return [list(values), *[[self.others or 0.0]] * (self.size - 1)]

    def agree(self, value: float) -> float:
        return value

    def barrier(self) -> None:
        self.barriers += 1

    def synchronize(self) -> None: ...

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.mul_(self.size)


class Tracker:
    wall = 0.0

    def section(self, name: str) -> Any:
        assert name in ("communication", "preprocessing")
        return nullcontext()

    def snapshot(self) -> Any:
        return SimpleNamespace(wall=self.wall)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(measuring, "time", made)
    return made


class Timed:
    """A call that takes given seconds, the last of them for ever; filling takes a second, off the clock."""

    def __init__(self, clock: Clock, seconds: Sequence[float], wrong: Sequence[int] = (0,)) -> None:
        self._clock, self._seconds, self._wrong = clock, list(seconds), list(wrong)
        self.calls = self.fills = self.looks = 0

    def make(self, **more: Any) -> Call:
        return Call(self._fill, self._call, self._look, **more)

    def _fill(self) -> None:
        self.fills += 1
        self._clock.now += 1.0

    def _call(self) -> None:
        self._clock.now += self._seconds[min(self.calls, len(self._seconds) - 1)]
        self.calls += 1

    def _look(self) -> int:
        self.looks += 1
        return self._wrong[min(self.looks, len(self._wrong)) - 1]


def run(
    monkeypatch: pytest.MonkeyPatch, timed: Timed, *limits: Any, world: World | None = None, mode: str = ISOLATED
) -> Row:
    buffers: Any = SimpleNamespace(element_size=4)
    monkeypatch.setattr(measuring, "make", lambda *_: timed.make())
    return measure(world or World(), Tracker(), buffers, SERIES, 1000, *limits, mode)  # type: ignore[arg-type, call-arg]


# --- one size -------------------------------------------------------------------------------------------------------


def test_samples_are_those_after_the_warm_up_and_have_microseconds(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call is checked, two more warm up, five are timed, and the last is checked."""
    timed = Timed(clock, [9.0, 8.0, 7.0, 1.0, 5.0, 2.0, 4.0, 3.0])
    row = run(monkeypatch, timed, 5, 3, 0.0, world=World(4))
    assert (timed.calls, timed.fills, timed.looks) == (8, 8, 2)
    assert row == Row(
        "all_reduce",
        "fp32",
        IN_PLACE,
        bytes=4000,
        elements=1000,
        samples=5,
        min_us=1e6,
        mean_us=3e6,
        p50_us=3e6,
        p95_us=None,
        p99_us=None,
        max_us=5e6,
        algbw=4000 / 3 / 1e9,
        busbw=4000 / 3 / 1e9 * 1.5,  # 2 (k - 1) / k
        mode=ISOLATED,
        rank_p50_min_us=3e6,
        rank_p50_max_us=3e6,
    )


def test_a_sample_is_the_slowest_ranks_and_medians_of_ranks_show_how_far_they_are_apart(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "check", lambda *_: None)
    row = run(monkeypatch, Timed(clock, [2.0]), 3, 1, 0.0, world=World(4, others=6.0))
    assert (row.min_us, row.p50_us, row.max_us) == (6e6, 6e6, 6e6)
    assert (row.rank_p50_min_us, row.rank_p50_max_us) == (2e6, 6e6)


@pytest.mark.parametrize(
    ("warmup", "seconds", "samples", "calls"),
    [
        (1, 0.0, 50, 1 + 50),  # no limit
        (5, 0.0, 50, 5 + 50),
        # A call takes 1 second, and filling another one: 2 seconds per sample.
        (1, 20.0, 10, 1 + 10),
        (1, 19.9, 9, 1 + 9),
        (1, 2.0, 3, 1 + 3),  # three at least
        (1, 1000.0, 50, 1 + 50),  # as many as wanted at most
        (50, 40.0, 20, 1 + 5 + 20),  # a quarter of the time warms up
        (3, 40.0, 20, 3 + 20),
    ],
)
def test_a_time_limit_shortens_warm_up_and_samples(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, warmup: int, seconds: float, samples: int, calls: int
) -> None:
    timed = Timed(clock, [1.0])
    row = run(monkeypatch, timed, 50, warmup, seconds)
    assert (row.samples, timed.calls) == (samples, calls)


@pytest.mark.parametrize("wrong", [(3,), (0, 3)])
def test_a_wrong_result_before_or_after_the_samples_is_an_error(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, wrong: Sequence[int]
) -> None:
    with pytest.raises(WrongResultError, match="all_reduce, fp32, in place of 1000 numbers gave a wrong result") as e:
        run(monkeypatch, Timed(clock, [1.0], wrong), 3, 1, 0.0)
    assert "wrong elements: 3 on rank 0" in str(e.value)


def test_wrong_elements_are_counted_by_rank_for_eight_ranks_at_most() -> None:
    world: Any = World(12, others=2.0)
    call: Any = SimpleNamespace(wrong=lambda: 0)
    with pytest.raises(WrongResultError) as caught:
        check(world, SERIES, 10, call)
    assert str(caught.value).endswith(": " + ", ".join(f"2 on rank {rank}" for rank in range(1, 9)))


@pytest.mark.parametrize(
    ("samples", "p95", "p99"),
    [(19, None, None), (20, 19.0, None), (99, 95.0, None), (100, 95.0, 99.0), (101, 96.0, 100.0)],
)
def test_percentiles_are_by_nearest_rank_and_need_enough_samples(
    samples: int, p95: float | None, p99: float | None
) -> None:
    times = [1e-6 * (samples - number) for number in range(samples)]
    row = measuring._row(SERIES, 250, 4, times, 2)
    assert (row.p95_us, row.p99_us) == (
        None if p95 is None else pytest.approx(p95),
        None if p99 is None else pytest.approx(p99),
    )
    assert row.p50_us == pytest.approx(statistics.median(range(1, samples + 1)))
    assert row.algbw == pytest.approx(1000 / row.p50_us / 1e3)  # type: ignore[operator]
    assert row.busbw == pytest.approx(row.algbw)  # of two ranks


def test_a_round_trip_counts_half_and_a_rank_that_only_answers_not_at_all(clock: Clock) -> None:
    world: Any = World()
    tracker: Any = Tracker()
    timed = Timed(clock, [4.0])
    assert time_samples(world, tracker, timed.make(trips=2), 2) == [2.0, 2.0]
    assert world.barriers == 2
    assert time_samples(world, tracker, timed.make(counts=False), 2) == [0.0, 0.0]
    assert time_rounds(world, tracker, timed.make(trips=2), 3) == [2.0, 2.0, 2.0]
    assert time_rounds(world, tracker, timed.make(counts=False), 3) == [0.0] * 3


@pytest.mark.parametrize(
    ("samples", "rounds", "calls"), [(1, 3, 1), (3, 3, 1), (60, 3, 20), (79, 3, 26), (80, 4, 20), (200, 10, 20)]
)
def test_rounds_have_about_twenty_calls_and_are_three_at_least(
    clock: Clock, samples: int, rounds: int, calls: int
) -> None:
    world: Any = World()
    tracker: Any = Tracker()
    timed, buffer = Timed(clock, [0.5]), torch.ones(3)
    assert time_rounds(world, tracker, timed.make(buffers=(buffer,)), samples) == [0.5] * rounds
    assert (timed.calls, timed.fills, world.barriers) == (rounds * calls, 0, rounds)
    assert not buffer.any()


def test_pipelined_calls_are_followed_by_one_that_is_checked(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    timed = Timed(clock, [0.5])
    row = run(monkeypatch, timed, 60, 1, 0.0, mode=PIPELINED)
    assert (row.mode, row.samples, row.p50_us) == (PIPELINED, MIN_SAMPLES, 5e5)
    assert (timed.calls, timed.fills) == (1 + 60 + 1, 2)


@pytest.mark.parametrize(
    ("error", "is_memory"), [("DefaultCPUAllocator: can't allocate memory", True), ("shape", False)]
)
def test_only_a_lack_of_memory_ends_a_series(monkeypatch: pytest.MonkeyPatch, error: str, is_memory: bool) -> None:
    def fail(buffers: object, elements: int, place: str) -> Call:
        raise RuntimeError(error)

    monkeypatch.setitem(COLLECTIVES, "all_reduce", replace(COLLECTIVES["all_reduce"], make=fail))
    world: Any = World()
    with pytest.raises(MemoryError if is_memory else RuntimeError):
        measuring.make(world, None, SERIES, 10)  # type: ignore[arg-type]


def test_the_ranks_sum_of_ones_is_their_number() -> None:
    world: Any = World(3)
    check_sum(world)
    world.size = 4
    world.all_reduce = lambda tensor: tensor.mul_(3)
    with pytest.raises(WrongResultError, match="over 4 ranks gives 3"):
        check_sum(world)


def test_the_original_protocol_knows_the_mean_of_one_rank(clock: Clock) -> None:
    world: Any = World(4)

    def all_reduce(tensor: torch.Tensor) -> torch.Tensor:
        assert (tensor.dtype, tensor.numel()) == (torch.float16, 500)
        clock.now += 2e-3
        return tensor

    world.all_reduce = all_reduce
    tracker: Any = Tracker()
    row = measuring.measure_as_original(world, tracker, 500, "fp16", 3)
    assert (row.bytes, row.elements, row.samples) == (1000, 500, 3)
    assert row.mean_us == pytest.approx(2000)
    assert (row.min_us, row.p50_us, row.max_us) == (None, None, None)
    assert row.algbw == pytest.approx(1000 / 2e-3 / 1e9)
    assert row.busbw == pytest.approx(1.5 * 1000 / 2e-3 / 1e9)


# --- series ---------------------------------------------------------------------------------------------------------


def make_row(elements: int, p50: float | None = 100.0, busbw: float | None = 1.0, samples: int = 10) -> Row:
    return Row("all_reduce", "fp32", IN_PLACE, 4 * elements, elements, samples, 1.0, 2.0, p50, busbw=busbw)


def test_a_series_in_short_has_its_peak_and_what_is_left_out() -> None:
    rows = [make_row(1, busbw=1.0), make_row(10, busbw=3.0, samples=9), make_row(100, busbw=2.0)]
    one = task.Measured(SERIES, [1, 10, 100, 1000, 10_000], 4, rows, "the budget")
    assert one.to_dict(10) == {
        "collective": "all_reduce",
        "dtype": "fp32",
        "place": "in_place",
        "sizes": 3,
        "shortened": 1,
        "left_out": {"bytes": [4000, 40_000], "why": "the budget"},
        "peak_busbw": 3.0,
        "peak_bytes": 40,
        "fit": None,
    }
    whole = task.Measured(SERIES, [1], 4, [make_row(1)]).to_dict(10)
    assert (whole["left_out"], whole["shortened"]) == (None, 0)
    nothing = task.Measured(SERIES, [1], 4)
    assert (nothing.peak, nothing.to_dict(10)["peak_busbw"], nothing.to_dict(10)["peak_bytes"]) == (None, None, None)


def test_the_next_size_takes_as_much_longer_as_it_is_larger() -> None:
    """100 microseconds for 10 numbers: 400 for 40, twice that with filling, and four times for the least samples."""
    assert task.Measured(SERIES, [10, 40], 4, [make_row(10)]).next_seconds == pytest.approx(2 * 400e-6 * 4)
    assert task.Measured(SERIES, [10, 40], 4).next_seconds == 0.0
    assert task.Measured(SERIES, [10, 40], 4, [make_row(10, p50=None)]).next_seconds == 0.0


class Report:
    def __init__(self) -> None:
        self.metrics: list[Any] = []
        self.lines: list[str] = []

    def metric(self, *words: Any, **more: Any) -> None:
        self.metrics.append((*words, more))

    def say(self, line: str) -> None:
        self.lines.append(line)


@pytest.mark.parametrize(("budget", "is_measured"), [(0.0, True), (5.0032, True), (5.0031, False)])
def test_a_size_that_does_not_fit_into_the_budget_is_not_begun(
    monkeypatch: pytest.MonkeyPatch, budget: float, is_measured: bool
) -> None:
    monkeypatch.setattr(task, "measure", lambda *_: make_row(40, p50=200.0, busbw=2.5))
    report, tracker = Report(), Tracker()
    tracker.wall = 5.0
    settings = Settings(seconds_total=budget)
    one = task.Measured(SERIES, [10, 40], 4, [make_row(10)])
    task._next_size(World(), tracker, report, settings, one, None)  # type: ignore[arg-type]
    if is_measured:
        assert (len(one.rows), one.why) == (2, "")
        assert report.metrics == [
            ("all_reduce_fp32_p50", 200.0, {"step": 160, "unit": "us"}),
            ("all_reduce_fp32_busbw", 2.5, {"step": 160, "unit": "GB/s"}),
        ]
        assert "all_reduce, fp32, in place: 200.0 us, busbw 2.5 GB/s" in report.lines[0]
    else:
        assert (len(one.rows), one.why) == (1, f"the time budget of {budget:g} s is spent")
        assert not report.lines


def test_larger_buffers_than_the_memory_end_a_series(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Row:
        raise MemoryError

    monkeypatch.setattr(task, "measure", fail)
    one = task.Measured(SERIES, [10], 4)
    task._next_size(World(), Tracker(), Report(), Settings(), one, None)  # type: ignore[arg-type]
    assert (one.rows, one.why) == ([], "no memory for larger buffers")


def test_metrics_of_a_result_with_its_own_buffer_have_their_own_name() -> None:
    report = Report()
    series = Series("broadcast", "int32", OUT_OF_PLACE)
    row = replace(make_row(10), collective="broadcast", dtype="int32", place=OUT_OF_PLACE)
    task._report(report, series, row)  # type: ignore[arg-type]
    assert [name for name, *_ in report.metrics] == [
        "broadcast_int32_out_of_place_p50",
        "broadcast_int32_out_of_place_busbw",
    ]


@pytest.mark.parametrize(
    ("collective", "settings", "elements"),
    [
        ("all_reduce", Settings(sizes=[4, 8, 40]), [1, 2, 10]),
        ("all_gather", Settings(sizes=[4, 8, 40]), [3, 9]),  # whole parts of three ranks
        ("all_reduce", Settings(sizes=[], min_exponent=0, max_exponent=2, count=3), [1, 10, 100]),
    ],
)
def test_sizes_are_given_in_bytes_or_by_a_grid(collective: str, settings: Settings, elements: list[int]) -> None:
    buffers: Any = SimpleNamespace(element_size=4)
    assert task._elements(settings, Series(collective, "fp32", IN_PLACE), buffers, 3) == elements


def test_a_measurement_that_a_backend_cannot_do_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    tracker: Any = Tracker()
    alone: Any = World(1)
    assert task._refusal(alone, tracker, Series("ring", "fp32", OUT_OF_PLACE)) == "it takes 2 ranks"
    gpus: Any = World(2)
    gpus.is_gloo_on_gpu = True
    assert "gloo does not send GPU tensors" in task._refusal(gpus, tracker, Series("ring", "fp32", OUT_OF_PLACE))
    world: Any = World(2)
    world.gather = lambda values: [list(values), list(values)]

    def refuse(*_: object) -> Call:
        raise RuntimeError("not\n  implemented " + 300 * "x")

    monkeypatch.setattr(Buffers, "of", lambda *_: None)
    monkeypatch.setattr(task, "make", refuse)
    assert task._refusal(world, tracker, SERIES) == ("not implemented " + 300 * "x")[:200]
    monkeypatch.setattr(task, "make", lambda *_: Call(lambda: None, lambda: None, lambda: 0))
    world.gather = lambda values: [list(values), [1.0]]
    assert task._refusal(world, tracker, SERIES) == "rank 1 could not"
    world.gather = lambda values: [list(values), [0.0]]
    assert task._refusal(world, tracker, SERIES) == ""


@pytest.mark.parametrize(
    ("changes", "ranks", "words"),
    [
        ({}, 2, ""),
        ({"collectives": []}, 2, "no collective is given"),
        ({"dtypes": []}, 2, "no data type is given"),
        ({"places": []}, 2, "no place is given"),
        ({"sizes": [1]}, 2, ""),
        ({"sizes": [4, 0]}, 2, "whole numbers of bytes, above 0"),
        ({"sizes": [4.0]}, 2, "whole numbers of bytes, above 0"),
        ({"mode": PIPELINED}, 2, ""),
        ({"mode": PIPELINED, "protocol": "legacy"}, 2, "has no pipelined mode"),
        ({"protocol": "legacy", "collectives": ["all_reduce"], "places": [IN_PLACE]}, 2, ""),
        (
            {"protocol": "legacy", "collectives": ["broadcast"], "places": [IN_PLACE]},
            2,
            "only the all-reduce, in place",
        ),
        ({"protocol": "legacy", "collectives": ["all_reduce"], "places": [OUT_OF_PLACE]}, 2, "only the all-reduce"),
        ({"search_bytes": 8}, 2, ""),
        ({"search_bytes": 8}, 1, "needs at least two ranks"),
        ({"min_busbw_gbps": 1.0}, 2, ""),
        ({"min_busbw_gbps": 1.0}, 1, "a single rank sends nothing"),
        (
            {"min_busbw_gbps": 1.0, "protocol": "legacy", "collectives": ["all_reduce"], "places": [IN_PLACE]},
            2,
            "the protocol legacy measures no bandwidth",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(changes: dict[str, Any], ranks: int, words: str) -> None:
    settings = Settings(**changes)
    if not words:
        task._check(settings, ranks)
        return
    with pytest.raises(TaskUsageError, match=words):
        task._check(settings, ranks)


def test_a_bandwidth_below_the_required_one_is_told_with_its_best_size() -> None:
    slow = task.Measured(SERIES, [256], 4, [make_row(256, p50=123.0, busbw=1.5)])
    none = task.Measured(Series("broadcast", "fp16", IN_PLACE), [1], 2, [], "no memory")
    assert task._below([slow, none], 0.0) == []
    assert task._below([slow], 1.5) == []
    assert task._below([slow, none], 1.51) == [
        "all_reduce, fp32, in place: the bus bandwidth is 1.5 GB/s at best, at 1 KiB in 123 us; 1.51 GB/s are required",
        "broadcast, fp16, in place: no size was measured (no memory), 1.51 GB/s of bus bandwidth are required",
    ]


def test_formulas_are_those_of_what_was_measured() -> None:
    found = task._formulas({"ring"})
    assert set(found) == {"bandwidth", "fit", "ring"}
    assert found["ring"] == {
        "S": "the message to the right neighbor",
        "busbw": "algbw",
        "model": "pair: alpha = a, beta = b",
    }


def test_rows_are_written_as_a_table_and_with_everything_around_them(tmp_path: Path) -> None:
    rows = [make_row(1).to_dict(), make_row(10).to_dict()]
    task._write(tmp_path / "new" / "results", {"ranks": 2, "rows": rows})
    assert json.loads((tmp_path / "new" / "results" / "collectives.json").read_text()) == {"ranks": 2, "rows": rows}
    with open(tmp_path / "new" / "results" / "collectives.csv", newline="") as file:
        header, *lines = csv.reader(file)
    assert tuple(header) == COLUMNS
    assert [line[3:6] for line in lines] == [["4", "1", "10"], ["40", "10", "10"]]


def test_the_log_ends_with_what_is_not_in_the_tables() -> None:
    report = Report()
    one = task.Measured(SERIES, [1, 256], 4, [make_row(1)], "the budget", fit=None)
    refused = {Series("ring", "fp32", OUT_OF_PLACE): "it takes 2 ranks"}
    task._conclude(report, [one], refused, {"detours": ["bf16 as fp32"]}, 4, ISOLATED)  # type: ignore[arg-type]
    text = "\n".join(report.lines)
    assert "left out: 1 KiB: the budget" in text
    assert "not supported: ring, fp32, out of place: it takes 2 ranks" in text
    assert "done by the backend: bf16 as fp32" in text
    assert report.lines[-1].startswith("isolated: ")


def test_a_fit_is_a_part_of_the_series() -> None:
    values: dict[str, Any] = {item.name: 1 for item in fields(Fit)}
    found = task.Measured(SERIES, [1], 4, [make_row(1)], fit=Fit(**values)).to_dict(10)["fit"]
    assert found == Fit(**values).to_dict()
