"""Evidence that contradicts itself is no result: which finding each contradiction gives, and what it takes away."""

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec
import pytest

from mlbench_cli.model.run import LOCAL, Ending, NodeClock, Observation, Outcome, WorkerState
from mlbench_cli.model.spec import OPEN, RunSpec
from mlbench_cli.results.archive.evidence import MAX_LINE_BYTES, Evidence, LogCounts, read_events
from mlbench_cli.results.archive.judge import Judgement, judge
from mlbench_cli.runs.launch import resolve
from mlbench_cli.runs.request import Request
from mlbench_cli.tasks.catalog import find_rules
from task_images.contract import PREFIX, format_event
from tests.unit.results.runs import START, event, timings, training_log

DIGEST = "a" * 64
CODE = {"code": {"task": "digits_resnet", "digest": DIGEST}}


def honest_spec(**changes: Any) -> RunSpec:
    spec = resolve(Request(name="r", workers=(2,), task="digits_resnet"), LOCAL)[0]
    return msgspec.structs.replace(spec, price={"per_hour": 3600.0}, **changes)


@dataclass(frozen=True)
class Story:
    """The evidence of a run of two ranks on one machine, all of which fits together; tests change one part of it."""

    spec: RunSpec = field(default_factory=honest_spec)
    seconds: float = 103.0
    observation: Callable[[Observation], Observation] = lambda seen: seen
    logs: Callable[[dict[int, list[str]]], Mapping[int, Sequence[str]]] = lambda logs: logs
    samples: Sequence[Mapping[str, Any]] = (
        {"kind": "machine", "time": START + 0.5, "elapsed_seconds": 0.5, "cores": 4, "lock": "held"},
        {"time": START + 50, "rank": 0, "log_bytes": 1000},
        {"kind": "machine", "time": START + 103, "elapsed_seconds": 103.0},
    )
    provenance: Mapping[str, Any] = field(default_factory=lambda: CODE)
    result: Mapping[str, Any] = field(default_factory=dict)
    faults: Mapping[str, Any] | None = None

    def judge(self) -> Judgement:
        goal = {
            "metric": "Prec@1",
            "comparison": ">=",
            "threshold": self.spec.parameters.get("goal_full"),
            "kind": "full",
        }
        fields = {"goal": {**goal, "value": 99.0, "last": 99.0}, "data_identity": {"official": True}, **self.result}
        environment = {"code_digest": DIGEST}
        logs = {rank: training_log(rank, environment=environment, **fields) for rank in range(2)}
        workers = tuple(
            WorkerState(rank, "succeeded", None, "m", 0, START, START + self.seconds, seconds=self.seconds)
            for rank in range(2)
        )
        seen = Observation(
            START + 104, workers, ended=Ending.EXITED, seconds=self.seconds, clocks=(NodeClock("m", 0.0),)
        )
        bytes_of = {rank: "".join(f"{line}\n" for line in lines).encode() for rank, lines in self.logs(logs).items()}
        return judge(
            Evidence(
                id="id",
                name="r-2",
                created="2025-10-09T08:53:19.000Z",
                spec=self.spec,
                rules=find_rules(self.spec.task, self.spec.preset),
                observation=self.observation(seen),
                provenance=self.provenance,
                samples=lambda: list(self.samples),
                logs={rank: partial(io.BytesIO, data) for rank, data in bytes_of.items()},
                faults=self.faults,
            )
        )


def codes(judgement: Judgement) -> list[str]:
    return [finding.code for finding in judgement.findings]


def with_wall_times(seen: Observation, seconds: float) -> Observation:
    """The workers' wall times `seconds` apart, as after a step of the clock."""
    workers = tuple(msgspec.structs.replace(worker, finished=START + seconds) for worker in seen.workers)
    return msgspec.structs.replace(seen, workers=workers)


def test_honest_evidence_is_a_closed_result() -> None:
    found = Story().judge()
    assert codes(found) == []
    assert found.result["division"]["word"] == "closed"
    assert "reached in 100.000 seconds" in str(found.result["official_line"])
    assert found.result["wall_seconds"] == 103.0
    assert "doubts" not in found.result


# --- time -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [3600, -3600, 5, -5, 0.25, -0.25])
def test_wall_times_that_differ_from_the_monotonic_clock_are_a_finding_and_no_duration(step: float) -> None:
    found = Story(observation=lambda seen: with_wall_times(seen, 103 + step)).judge()
    assert codes(found) == ["clock_stepped"]
    assert found.findings[0].evidence["stepped_seconds"] == pytest.approx(abs(step))
    assert found.result["wall_seconds"] == 103.0
    assert found.result["price"] is not None
    assert found.result["price"]["amount"] == 103.0
    # The catalog's program measures with the monotonic clock.
    assert "reached in 100.000 seconds" in str(found.result["official_line"])


@pytest.mark.parametrize("argv", [("python", "mine.py"), None])
def test_a_step_takes_the_line_from_programs_whose_clock_is_not_known(argv: tuple[str, ...] | None) -> None:
    spec = honest_spec(argv=argv) if argv else honest_spec(preset=OPEN)
    found = Story(spec, observation=lambda seen: msgspec.structs.replace(seen, clocks=(NodeClock("m", 5.0),))).judge()
    assert codes(found) == ["clock_stepped"]
    assert found.result["official_line"] is None
    assert found.result["doubts"] == ["clock_stepped"]
    assert "in doubt (clock_stepped" in found.official_text


def test_a_step_where_only_wall_times_are_known_leaves_no_duration_and_no_price() -> None:
    rows: list[dict[str, Any]] = [
        {"kind": "machine", "worker": 0, "time": START + at + (9 if at > 50 else 0), "elapsed_seconds": float(at)}
        for at in range(0, 100, 10)
    ]

    def forget(seen: Observation) -> Observation:
        workers = tuple(msgspec.structs.replace(worker, seconds=None) for worker in seen.workers)
        return msgspec.structs.replace(seen, workers=workers, seconds=None, clocks=())

    found = Story(observation=forget, samples=rows).judge()
    assert codes(found) == ["clock_stepped"]
    assert found.result["wall_seconds"] is None
    assert found.result["price"] == {"per_hour": 3600.0, "amount": None}
    honest = Story(
        observation=forget, samples=[{**row, "time": START + row["elapsed_seconds"]} for row in rows]
    ).judge()
    assert codes(honest) == []
    assert honest.result["wall_seconds"] == 103.0


# --- contradictions -------------------------------------------------------------------------------------------------


def edit(number: int, **changes: Any) -> Callable[[dict[int, list[str]]], Mapping[int, Sequence[str]]]:
    """Replace fields of the last event in the log of a rank."""

    def apply(logs: dict[int, list[str]]) -> dict[int, list[str]]:
        *lines, last = logs[number]
        event = {**json.loads(last.removeprefix(PREFIX)), **changes}
        return {**logs, number: [*lines, format_event(event)]}

    return apply


def add(number: int, *events: str) -> Callable[[dict[int, list[str]]], Mapping[int, Sequence[str]]]:
    """Append lines to the log of a rank."""
    return lambda logs: {**logs, number: [*logs.get(number, []), *events]}


def workers(**changes: Any) -> Callable[[Observation], Observation]:
    return lambda seen: msgspec.structs.replace(
        seen, workers=(seen.workers[0], msgspec.structs.replace(seen.workers[1], **changes))
    )


def slow_seconds(factor: float) -> Callable[[dict[int, list[str]]], Mapping[int, Sequence[str]]]:
    """The seconds of rank 0's metrics by a clock that is too slow, with a result that fits them."""

    def apply(logs: dict[int, list[str]]) -> dict[int, list[str]]:
        lines = []
        for line in logs[0]:
            found = json.loads(line.removeprefix(PREFIX)) if line.startswith(PREFIX) else {}
            for name in ("seconds", "wall_seconds", "training_seconds"):
                if name in found:
                    found[name] /= factor
            lines.append(format_event({**found, "timings": {}} if "timings" in found else found) if found else line)
        return {**logs, 0: lines}

    return apply


MACHINE = {**CODE, "machine": {"cpu": "A", "architecture": "x86_64"}}
LATE = START + 1e6
POWERSGD = honest_spec(method={"name": "powersgd"})


@pytest.mark.parametrize(
    ("code", "story"),
    [
        ("task_time", Story(logs=edit(0, wall_seconds=9999.0, training_seconds=1.0, timings={}))),
        ("task_time", Story(observation=lambda seen: msgspec.structs.replace(seen, seconds=101.0))),  # ranks: 103 s
        ("clocks", Story(logs=slow_seconds(10.0))),
        ("clocks", Story(logs=slow_seconds(1.03))),
        ("event_times", Story(logs=add(1, event("metric", 1, 200.0, name="x", value=1.0)))),
        ("event_times", Story(logs=add(1, event("metric", 1, -86400.0, name="x", value=1.0)))),
        ("event_times", Story(logs=add(1, event("metric", 1, 90.0, name="x", value=1.0)))),
        ("event_times", Story(samples=[*Story().samples, {"time": LATE, "rank": 0}])),
        ("worker_times", Story(observation=workers(started=START + 50, finished=START + 40, seconds=None))),
        ("ranks", Story(observation=workers(rank=0))),
        ("ranks", Story(observation=workers(rank=7))),
        ("ranks", Story(observation=workers(node="other"))),
        ("logs", Story(logs=lambda logs: {0: logs[0]})),
        ("logs", Story(logs=lambda logs: {**logs, 7: logs[1]})),
        ("logs", Story(logs=lambda logs: {**logs, 1: []}, samples=[*Story().samples, {"rank": 1, "log_bytes": 9}])),
        ("logs", Story(samples=())),
        ("logs", Story(samples=[*Story().samples, {"time": START + 60, "rank": 0, "log_bytes": 1 << 20}])),
        ("logs", Story(logs=lambda logs: {**logs, 1: logs[0]})),
        ("settings", Story(logs=edit(0, details={"options": {"depth": 2}}))),
        ("settings", Story(honest_spec(cluster="gke"))),
        ("settings", Story(honest_spec(cluster_kind="gke"))),
        ("settings", Story(honest_spec(share_machine=True))),
        ("settings", Story(samples=[{**Story().samples[0], "lock": "shared"}, *Story().samples[1:]])),
        ("settings", Story(logs=add(1, event("environment", 1, 101.0, world_size=4)))),
        ("settings", Story(logs=add(1, event("environment", 1, 101.0, seed=7)))),
        ("settings", Story(logs=add(1, event("environment", 1, 101.0, backend="nccl")))),
        ("settings", Story(honest_spec(cpus=2.0), logs=add(1, event("environment", 1, 101.0, threads=64)))),
        ("settings", Story(logs=add(1, event("environment", 1, 101.0, device="cuda")))),
        ("settings", Story(logs=add(1, event("environment", 1, 101.0, method={"name": "powersgd"})))),
        ("settings", Story(POWERSGD, logs=add(1, event("environment", 1, 101.0, method={})))),
        ("settings", Story(honest_spec(network="1gbit,5ms"))),
        ("settings", Story(honest_spec(image="evil/image:1"))),
        ("settings", Story(msgspec.structs.replace(honest_spec(), price={"per_hour": -5.0}))),
        ("figures", Story(logs=edit(0, epochs=6, details={"goals": {"full": {"epoch": 3}}}))),
        ("figures", Story(logs=edit(0, samples=5, details={"goals": {"full": {"samples": 51200}}}))),
        ("provenance", Story(provenance=MACHINE, logs=add(1, event("environment", 1, 101.0, device_name="H100")))),
        ("provenance", Story(provenance=MACHINE, logs=add(1, event("environment", 1, 101.0, cpu="B")))),
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_in_no_division_and_has_no_official_line(code: str, story: Story) -> None:
    found = story.judge()
    assert f"implausible_{code}" in codes(found)
    assert found.result["division"]["word"] is None
    assert f"implausible_{code}" in str(found.result["division"]["reason"])
    assert found.result["official_line"] is None
    assert f"implausible_{code}" in found.result["doubts"]
    assert "contradicts itself" in found.result["summary"]


def test_a_resumed_run_has_the_clock_of_the_earlier_one() -> None:
    spec = honest_spec()
    resumed = msgspec.structs.replace(spec, parameters={**spec.parameters, "resume": "/x/last.pt"})
    longer = {"wall_seconds": 400.0, "training_seconds": 300.0, "timings": timings(400.0)}
    assert codes(Story(resumed, logs=edit(0, **longer)).judge()) == []
    assert codes(Story(spec, logs=edit(0, **longer)).judge()) == ["implausible_task_time"]


def test_a_run_that_trains_past_its_goal_contradicts_nothing() -> None:
    """Its clock stops at the goal, and its metrics go on."""
    stopped = edit(0, wall_seconds=50.0, training_seconds=45.0, timings=timings(50.0))
    assert codes(Story(logs=stopped).judge()) == []


def test_a_light_goal_is_held_against_its_own_moment() -> None:
    moments = {"full": {"samples": 999}, "light": {"samples": 51200}}
    asked = honest_spec(goal="light")
    goal = {"metric": "Prec@1", "comparison": ">=", "threshold": asked.parameters["goal_light"], "kind": "light"}
    told = {"goal": {**goal, "value": 99.0, "last": 99.0}, "details": {"goals": moments}}
    assert codes(Story(asked, result=told).judge()) == []


def test_a_rank_speaks_in_its_own_log_only() -> None:
    forged = event("environment", 0, 101.0, device_name="NVIDIA H100", code_digest="b" * 64)
    found = Story(logs=add(1, forged, event("metric", 0, 101.0, name="val_Prec@1", value=99.9))).judge()
    assert "device_name" not in found.environment["ranks"]["0"]
    assert codes(found) == []
    assert 99.9 not in found.result["metrics"].values()


def test_a_goal_is_proved_by_rank_0_alone() -> None:
    def move(logs: dict[int, list[str]]) -> dict[int, list[str]]:
        kept = [line for line in logs[0] if '"val_Prec@1"' not in line]
        return {0: kept, 1: [*logs[1], event("metric", 1, 101.0, name="val_Prec@1", value=99.0)]}

    found = Story(logs=move).judge()
    assert found.outcome is Outcome.GOAL_MISSED
    assert "goal_not_proved" in codes(found)


@pytest.mark.parametrize("task", ["digits_resnet", "allreduce"])
def test_a_task_that_reports_no_result_has_failed(task: str) -> None:
    (spec,) = resolve(Request(name="r", workers=(2,), task=task), LOCAL)
    found = replace(Story(), spec=spec, logs=lambda logs: {0: [], 1: []}, samples=Story().samples[::2]).judge()
    assert found.outcome is Outcome.FAILED
    assert codes(found) == ["no_result"]
    assert "reported no result" in found.result["summary"]


def test_code_of_which_no_digest_is_known_is_not_closed() -> None:
    found = Story(provenance={}).judge()
    assert found.result["division"] == {"word": "open", "reason": "code not known to be the task's"}


# --- events ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2 * MAX_LINE_BYTES - 20, MAX_LINE_BYTES, 3 * MAX_LINE_BYTES - 1, 3_000_000])
def test_an_event_behind_an_unfinished_line_is_never_lost(size: int) -> None:
    log = b"\r" * size + event("metric", name="x", value=1.0).encode() + b"\n"
    counts = LogCounts()
    assert [found["name"] for found in read_events(io.BytesIO(log), counts)] == ["x"]
    assert (counts.bytes, counts.too_long) == (len(log), 0)


def test_an_event_that_is_too_long_is_a_finding_and_hides_no_other() -> None:
    long = event("metric", 0, 99.0, name="x", value=1.0, text="y" * (2 * MAX_LINE_BYTES + 5))
    found = Story(logs=lambda logs: {**logs, 0: [*logs[0][:-1], long, logs[0][-1]]}).judge()
    assert codes(found) == ["event_too_long"]
    assert found.outcome is Outcome.GOAL_REACHED
