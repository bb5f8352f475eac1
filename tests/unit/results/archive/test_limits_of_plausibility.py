"""How far parts of the evidence may be apart before they contradict each other, and what is said then."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from mlbench_cli.model.run import Ending, NodeClock, Observation, WorkerState
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.results.archive.events import LogCounts, LogFacts, ReportedFacts
from mlbench_cli.results.archive.evidence import Evidence
from mlbench_cli.results.archive.plausibility import (
    SampleWatch,
    find_contradictions,
    find_step,
)
from mlbench_cli.util.times import timestamp
from tests.unit.results.runs import START, spec

WORKER = WorkerState(0, "succeeded", None, "m", 0, START, START + 100, seconds=100.0)
SEEN = Observation(
    START + 101, (WORKER, replace(WORKER, rank=1)), ended=Ending.EXITED, seconds=100.0, clocks=(NodeClock("m", 0.0),)
)
RESULT: dict[str, Any] = {"wall_seconds": 90.0, "training_seconds": 80.0, "timings": {}, "outcome": "completed"}


def facts(result: Mapping[str, Any] | None = None, **changes: Any) -> ReportedFacts:
    logs = changes.pop("logs", {rank: log() for rank in range(2)})
    fields: dict[str, Any] = {"environments": {}, "metrics": {}, "phase": {}, "probes": [], "is_watched": False}
    return ReportedFacts(**{"result": {**RESULT, **(result or {})}, **fields, "logs": logs, **changes})


def log(first: float | None = 1.0, last: float | None = 99.0, size: int = 1000, **changes: Any) -> LogFacts:
    """Facts of a log whose first and last events are so many seconds after the start."""
    first, last = (None if at is None else START + at for at in (first, last))
    return LogFacts(LogCounts(bytes=size), first, last, **changes)


def watched(*rows: Mapping[str, Any]) -> SampleWatch:
    found = SampleWatch()
    for _ in found.watch([{"kind": "machine", "time": START, "elapsed_seconds": 0.0}, *rows]):
        pass
    return found


def find(
    reported: ReportedFacts | None = None,
    seen: Observation = SEEN,
    run: RunSpec | None = None,
    samples: SampleWatch | None = None,
    is_success: bool = True,
    is_stepped: bool = False,
    **changes: Any,
) -> dict[str, list[str]]:
    """The contradictions by their codes."""
    fields: dict[str, Any] = {
        "id": "id",
        "name": "demo-2",
        "created": timestamp(START - 1),
        "rules": None,
        "provenance": {},
    }
    evidence = Evidence(
        **{**fields, "spec": run or spec(), "observation": seen, "samples": list, "logs": {}, **changes}
    )
    found = find_contradictions(evidence, reported or facts(), samples or watched(), is_success, is_stepped)
    for finding in found:
        reasons = finding.evidence["contradictions"]
        assert finding.summary == f"The evidence contradicts itself: {'; '.join(reasons)}."
    return {finding.code.removeprefix("implausible_"): finding.evidence["contradictions"] for finding in found}


# --- clocks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wall", "seconds", "step"),
    [
        (10.0, 10.0, 0.0),
        (10.1, 10.0, 0.0),
        (10.2, 10.0, 0.2),
        (9.8, 10.0, 0.2),
        (1000.59, 1000.0, 0.0),  # 0.1 s, and 0.5 ms for each second that NTP may slew
        (1000.61, 1000.0, 0.61),
        (-5.0, -5.0, 0.0),
    ],
)
def test_a_step_is_more_than_the_error_and_the_slew_of_clocks(wall: float, seconds: float, step: float) -> None:
    assert find_step(wall, seconds) == pytest.approx(step)


def machine(at: float, elapsed: float, **more: Any) -> dict[str, Any]:
    return {"kind": "machine", "time": START + at, "elapsed_seconds": elapsed, **more}


@pytest.mark.parametrize(
    ("rows", "stepped"),
    [
        ([machine(10, 10), machine(20, 20)], 0.0),
        ([machine(15, 10), machine(25, 20)], 5.0),
        ([machine(15, 10), machine(20, 20)], 10.0),  # there and back
        ([machine(10, 10, worker=1), machine(27, 20, worker=1)], 7.0),
        ([machine(40, 0, worker=1), machine(80, 0, worker=2)], 0.0),  # each machine with itself
        ([{**machine(15, 10), "kind": "gpu"}, {**machine(15, 10), "time": None}], 0.0),
    ],
)
def test_steps_of_the_clock_between_samples_add_up(rows: list[dict[str, Any]], stepped: float) -> None:
    assert watched(*rows).stepped_seconds == pytest.approx(stepped)


# --- times ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("wall", "is_long"), [(100.0, False), (100.05, False), (100.06, True)])
def test_a_task_takes_no_longer_than_its_run(wall: float, is_long: bool) -> None:
    found = find(facts({"wall_seconds": wall, "training_seconds": 1.0}))
    reason = f"the task took {wall:.6g} s, longer than the run (100 s)"
    assert found == ({"task_time": [reason]} if is_long else {})


def spread(rank0: float, **changes: float) -> dict[str, float]:
    return {"min": rank0, "mean": rank0, "max": rank0, "rank0": rank0, **changes}


@pytest.mark.parametrize(
    ("timings", "reason"),
    [
        ({"forward": spread(90.9), "other": spread(0.0)}, None),
        ({"forward": spread(91.0), "other": spread(0.0)}, "add up to 91 s, more than the task (90 s)"),
        ({"forward": spread(80.0), "other": spread(9.1)}, None),
        ({"forward": spread(80.0), "other": spread(9.0)}, "add up to 89 s instead of 90 s"),
        ({"forward": spread(80.0)}, None),  # a program without a tracker may measure some parts only
    ],
)
def test_timings_add_up_to_the_task(timings: dict[str, dict[str, float]], reason: str | None) -> None:
    assert find(facts({"timings": timings})) == ({"timings": [f"rank 0's timings {reason}"]} if reason else {})


@pytest.mark.parametrize(
    ("change", "is_out"),
    [
        ({"min": 10.1}, False),  # 1 %
        ({"min": 10.2}, True),
        ({"max": 9.91}, False),
        ({"max": 9.89}, True),
        ({"min": 5.0, "mean": 4.9}, True),
        ({"max": 20.0, "mean": 20.3}, True),
        ({"max": 20.0, "mean": 20.1}, False),
    ],
)
def test_means_lie_between_the_least_and_the_most(change: dict[str, float], is_out: bool) -> None:
    found = find(facts({"timings": {"forward": spread(10.0, **change)}}))
    reason = "forward has a mean or a value of rank 0 outside its minimum and maximum"
    assert found.get("spread") == ([reason] if is_out else None)


@pytest.mark.parametrize(
    ("at", "reason"),
    [
        (-5.0, None),
        (-5.5, "resources were sampled before the run"),
        (160.0, None),
        (160.5, "resources were sampled after the run"),
    ],
)
def test_samples_are_taken_during_the_run_and_up_to_a_minute_after_it(at: float, reason: str | None) -> None:
    samples = watched({"time": START + at, "rank": 0})
    assert find(samples=samples) == ({"event_times": [reason]} if reason else {})
    ahead = replace(SEEN, clocks=(NodeClock("m", 0.0, start_ahead=-1.0, end_ahead=0.5),))
    assert find(samples=samples, seen=ahead) == {}  # clocks of machines that differ by a second
    kubernetes = spec(engine="kubernetes", cluster="c")
    assert find(samples=samples, run=kubernetes) == {}
    running = replace(SEEN, workers=(WORKER, replace(WORKER, rank=1, finished=None)))
    assert find(samples=samples, seen=running) == {}


@pytest.mark.parametrize(("finished", "reasons"), [(-1.0, []), (-1.5, ["worker 0 ended before it started"]), (0.0, [])])
def test_a_worker_ends_after_it_started(finished: float, reasons: list[str]) -> None:
    seen = replace(SEEN, workers=(replace(WORKER, finished=START + finished), replace(WORKER, rank=1)), seconds=100.0)
    logs = {0: log(None, None), 1: log()}
    assert find(facts(logs=logs), seen).get("worker_times", []) == reasons


# --- ranks, codes and logs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "is_success", "reason"),
    [
        ((0, 1), True, None),
        ((0, 0), True, "a rank appears twice"),
        ((0,), True, "the 1 observed workers are not those of the run"),
        ((0,), False, None),
        ((0, 2), False, "the 2 observed workers are not those of the run"),
        ((), True, None),
    ],
)
def test_the_observed_ranks_are_those_of_the_run(ranks: tuple[int, ...], is_success: bool, reason: str | None) -> None:
    seen = replace(SEEN, workers=tuple(replace(WORKER, rank=rank) for rank in ranks))
    assert find(seen=seen, is_success=is_success) == ({"ranks": [reason]} if reason else {})


@pytest.mark.parametrize(
    ("phase", "code", "reason"),
    [
        ("failed", 0, "worker 1 failed with exit code 0"),
        ("succeeded", 3, "worker 1 succeeded with exit code 3"),
        ("failed", 3, None),
        ("succeeded", None, None),
        ("lost", 0, None),
    ],
)
def test_exit_codes_fit_the_phase(phase: str, code: int | None, reason: str | None) -> None:
    seen = replace(SEEN, workers=(WORKER, WorkerState(1, phase, None, "m", code, START, START + 100, seconds=100.0)))
    assert find(seen=seen, is_success=False) == ({"exit_codes": [reason]} if reason else {})


@pytest.mark.parametrize(
    ("logs", "reasons"),
    [
        ({0: log()}, ["rank 1 has no log"]),
        ({0: log(), 1: log(), 2: log()}, ["there is a log of rank 2, but the run has no such rank"]),
        ({0: log(), 1: log(None, None, foreign=1)}, ["the log of rank 1 contains only events of other ranks"]),
        ({0: log(), 1: log(foreign=1)}, []),
        ({0: log(size=500), 1: log()}, []),
        ({0: log(size=499), 1: log()}, ["the log of rank 0 has 499 bytes, but had 500 during the run"]),
    ],
)
def test_logs_are_complete(logs: dict[int, LogFacts], reasons: list[str]) -> None:
    samples = watched({"time": START + 5, "rank": 0, "log_bytes": 500})
    assert find(facts(logs=logs), samples=samples) == ({"logs": reasons} if reasons else {})


# --- settings and figures -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"world_size": 2, "backend": "gloo", "seed": 0, "device": "cpu"}, None),
        ({"world_size": 3}, "rank 1 reported world_size 3, but the run has 2"),
        ({"backend": "mpi"}, "rank 1 reported backend mpi, but the run has gloo"),
        ({"device": "cuda:0"}, "rank 1 reported device cuda:0, but the run has cpu"),
        ({"device": "cpu:1"}, None),
        ({"device": 5}, None),
    ],
)
def test_ranks_report_the_settings_of_their_run(environment: dict[str, Any], reason: str | None) -> None:
    run = spec(seed=0)
    found = find(facts(environments={1: environment}), run=run)
    assert found == ({"settings": [reason]} if reason else {})


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"batch_size": 128, "other": 1}, None),
        ({"batch_size": 64}, "the task used batch_size 64, but the run has 128"),
        ({"precision": "bf16"}, None),
        ({"auto": 5}, None),
    ],
)
def test_the_task_uses_the_parameters_of_its_run(options: dict[str, Any], reason: str | None) -> None:
    run = spec(parameters={"batch_size": 128, "precision": "fp32", "auto": "auto"})
    found = find(facts({"details": {"options": options}}), run=run)
    assert found == ({"settings": [reason]} if reason else {})
