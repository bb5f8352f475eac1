"""The evidence of a run: when it began and ended, what its folder and its archive hold, and its samples."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.errors import DamagedArchive
from mlbench_cli.model.goals import Goal, GoalRule
from mlbench_cli.model.run import Ending, Finding, Observation, WorkerState
from mlbench_cli.results.archive.evidence import (
    MAX_ROW_BYTES,
    Evidence,
    collect_evidence,
    keep_observation,
    load_evidence,
    normalize_samples,
    read_last_samples,
    read_samples,
)
from mlbench_cli.results.archive.reader import Archive
from mlbench_cli.storage.run_folder import RunFolder
from mlbench_cli.tasks.catalog import TaskRules
from mlbench_cli.util.times import MAX_SECONDS, timestamp
from tests.unit.results.runs import START, new_run, observation_of, spec

RULES = TaskRules(
    "digits", "digits", ("python",), GoalRule("Prec@1", ">=", "{threshold}% Top 1 Validation Accuracy"), (), {}, {}
)


def evidence(
    times: Iterable[tuple[float | None, float | None]] = (),
    nodes: Iterable[str | None] = (),
    at: float = 50.0,
    created: float = 0.0,
    rules: TaskRules | None = None,
    **changes: Any,
) -> Evidence:
    """Evidence whose workers ran at `times` (start and end), or on `nodes`; seconds after START."""
    workers = [
        WorkerState(
            rank, started=None if begin is None else START + begin, finished=None if end is None else START + end
        )
        for rank, (begin, end) in enumerate(times)
    ] + [WorkerState(rank, node=node) for rank, node in enumerate(nodes)]
    seen = Observation(START + at, tuple(workers))
    return Evidence("id", "demo-2", timestamp(START + created), spec(**changes), rules, seen, {}, lambda: (), {})


@pytest.mark.parametrize(
    ("times", "span"),
    [
        ([(2.0, 9.0), (1.0, 8.0)], (1.0, 9.0)),
        ([(2.0, None), (1.0, 8.0)], (1.0, 8.0)),  # the last one that is known to have ended
        ([(2.0, None), (None, None)], (2.0, 50.0)),  # none has: until it was last observed
        ([(None, None)], (None, 50.0)),
        ([], (None, 50.0)),
        ([(9.0, 2.0)], (9.0, 9.0)),  # the clock was set back
    ],
)
def test_a_run_lasts_from_its_first_start_to_its_last_end(
    times: list[tuple[float | None, float | None]], span: tuple[float | None, float]
) -> None:
    started, finished = evidence(times).span
    assert (None if started is None else started - START, finished - START) == span


def test_a_run_that_never_started_ends_no_earlier_than_it_was_recorded() -> None:
    assert evidence(at=5.0, created=9.0).span == (None, START + 9)
    assert evidence(at=5.0, created=4.0).span == (None, START + 5)
    assert evidence([(1.0, 2.0)], created=9.0).span == (START + 1, START + 2)


@pytest.mark.parametrize(
    ("nodes", "functional", "is_alone"),
    [
        (["a", "b"], None, True),
        (["a", "a"], None, False),
        (["a", "b", "a"], None, False),
        ([None], None, True),
        ([None, None], None, False),
        (["a", "b"], "all nodes are one machine", False),
    ],
)
def test_workers_are_alone_on_their_nodes_if_no_two_share_one(
    nodes: list[str | None], functional: str | None, is_alone: bool
) -> None:
    assert evidence(nodes=nodes, functional_only=functional).is_alone is is_alone


@pytest.mark.parametrize(("kind", "threshold"), [("full", 80.0), ("light", 70.0)])
def test_the_goal_is_that_of_the_rules_and_of_the_kind_that_was_asked_for(kind: str, threshold: float) -> None:
    assert evidence(rules=RULES, goal=kind).goal == Goal("Prec@1", ">=", threshold)
    assert evidence(goal=kind).goal is None


# --- a folder and an archive ------------------------------------------------------------------------------------------


def test_the_evidence_of_a_folder_is_what_lies_in_it(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run", logs={0: ["a"], 10: ["c"], 2: ["b"]})
    seen = observation_of()
    provenance = {"mlbench": "4.0.0"}
    found = collect_evidence(run, {"task": RULES.to_dict(), "provenance": provenance}, seen)
    assert (found.id, found.name, found.created, found.spec) == (run.id, "demo-2", run.created, run.spec)
    assert (found.rules, found.observation, found.provenance) == (RULES, seen, provenance)
    assert list(found.logs) == [0, 2, 10]
    for _ in range(2):  # can be read again
        with found.logs[10]() as log:
            assert log.read() == b"c\n"
    assert (found.shaping, found.faults, list(found.samples())) == (None, None, [])
    (run.folder / "shaping.json").write_text('{"method": "packet"}')
    (run.folder / "faults.json").write_text('{"policy": "restart"}')
    (run.folder / "resources.jsonl").write_text('{"time": 0, "rank": 1}\n')
    found = collect_evidence(run, {"task": None, "provenance": None}, seen)
    assert (found.shaping, found.faults) == ({"method": "packet"}, {"policy": "restart"})
    assert (found.rules, found.provenance) == (None, {})
    assert list(found.samples()) == list(found.samples()) == [{"time": "1970-01-01T00:00:00.000Z", "rank": 1}]


def write_archive(folder: Path, **changes: Any) -> Archive:
    """A folder with the evidence of an archive; `changes` replace whole files, by their names without extension."""
    (folder / "logs").mkdir(parents=True)
    files: dict[str, Any] = {
        "run": {
            "id": "7f",
            "name": "demo-2",
            "created": timestamp(START),
            "spec": spec().to_dict(),
            "task": None,
            "provenance": None,
        },
        "observation": observation_of().to_dict(),
        **changes,
    }
    for name, document in files.items():
        if document is not None:
            (folder / f"{name}.json").write_text(json.dumps({"schema_version": 1, **document}))
    (folder / "logs" / "rank-0.log").write_text("hello\n")
    return Archive.open(folder)


def test_the_evidence_of_an_archive_is_what_lies_in_it(tmp_path: Path) -> None:
    found = load_evidence(write_archive(tmp_path / "a"))
    assert (found.id, found.name, found.created) == ("7f", "demo-2", timestamp(START))
    assert (found.spec, found.rules, found.provenance) == (spec(), None, {})
    assert found.observation == observation_of()
    assert (found.shaping, found.faults) == (None, None)
    with found.logs[0]() as log:
        assert log.read() == b"hello\n"
    recorded = run_document(provenance={"mlbench": "4"}, task=RULES.to_dict())
    shaping, faults = {"method": "packet"}, {"policy": "restart"}
    more = write_archive(tmp_path / "b", run=recorded, shaping=shaping, faults=faults)
    found = load_evidence(more)
    assert (found.provenance, found.rules) == ({"mlbench": "4"}, RULES)
    assert found.shaping is not None
    assert found.faults is not None
    assert (found.shaping["method"], found.faults["policy"]) == ("packet", "restart")


def run_document(**changes: Any) -> dict[str, Any]:
    document = {"id": "7f", "name": "demo-2", "created": timestamp(START), "spec": spec().to_dict(), "task": None}
    return {**document, **changes}


@pytest.mark.parametrize(
    ("changes", "file", "message"),
    [
        (
            {"run": run_document(spec={**spec().to_dict(), "workers": 0})},
            "run.json",
            "it cannot be judged: 0 workers: the number must be from 1 to 4096.",
        ),
        ({"run": run_document(task={"spec": 1})}, "run.json", "it cannot be judged: a preset is not an object"),
        ({"run": run_document(task={"spec": {}, "preset": {}, "more": 1})}, "run.json", "it cannot be judged: "),
        (
            {"observation": {**observation_of().to_dict(), "ended": "bored"}},
            "observation.json",
            "it is not an observation",
        ),
        ({"observation": {"workers": []}}, "observation.json", "it is not an observation: 'findings'"),
        (
            {"observation": {**observation_of().to_dict(), "workers": [5]}},
            "observation.json",
            "it is not an observation",
        ),
        ({"observation": None}, "observation.json", "it is missing"),
    ],
)
def test_evidence_that_cannot_be_judged_names_the_file(
    tmp_path: Path, changes: dict[str, Any], file: str, message: str
) -> None:
    with pytest.raises(DamagedArchive) as caught:
        load_evidence(write_archive(tmp_path / "a", **changes))
    assert caught.value.file == file
    assert message in caught.value.plain
    assert caught.value.problem == ("missing" if message == "it is missing" else "schema")


# --- the observation --------------------------------------------------------------------------------------------------


def test_sealing_keeps_the_findings_of_an_interrupted_attempt_once(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    first, second, third = (Finding(code, code) for code in ("a", "b", "c"))
    seen = observation_of(findings=(first,))
    assert keep_observation(run, seen, [second]).findings == (first, second)
    again = keep_observation(run, seen, [third])  # the files have their new names already
    assert again.findings == (first, second, third)
    assert keep_observation(run, again, [third]) == again
    assert RunFolder(run.folder).read_observation() == again
    assert (again.time, again.workers, again.ended) == (seen.time, seen.workers, Ending.EXITED)


# --- samples ----------------------------------------------------------------------------------------------------------


def write_rows(path: Path, *lines: str | Mapping[str, Any]) -> Path:
    texts = (line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
    path.write_text("".join(texts))
    return path


@pytest.mark.parametrize(
    ("moment", "written"),
    [
        (0, "1970-01-01T00:00:00.000Z"),
        (START + 0.5, "2025-10-09T08:53:20.500Z"),
        (MAX_SECONDS, "9999-12-31T23:59:59.000Z"),
        (MAX_SECONDS + 1, MAX_SECONDS + 1),  # no date
        (-1, -1),
        (True, True),
        ("2025-10-09T08:53:20.500Z", "2025-10-09T08:53:20.500Z"),
    ],
)
def test_times_of_samples_become_dates_if_they_are_some(tmp_path: Path, moment: Any, written: Any) -> None:
    path = write_rows(tmp_path / "x", {"time": moment, "rank": 0})
    normalize_samples(path)
    assert json.loads(path.read_text()) == {"time": written, "rank": 0}


def test_samples_are_one_strict_row_per_line(tmp_path: Path) -> None:
    path = write_rows(
        tmp_path / "x",
        '{"rank": 0,  "x": 1e999}\n',
        '{"rank": 9, "x": NaN}\n',
        "[1]\n",
        "not JSON\n",
        "\n",
        '{"rank": 1, "x": [-1e999, 1]}\n',
        '{"rank": 2, "x": 1',  # cut off when the run was killed
    )
    normalize_samples(path)
    assert path.read_text() == '{"rank":0,"x":"inf"}\n{"rank":1,"x":["-inf",1]}\n'


def test_without_samples_the_file_is_empty(tmp_path: Path) -> None:
    normalize_samples(tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == b""
    assert list(read_samples(tmp_path / "no")) == []


def test_a_line_of_a_mebibyte_is_a_row_and_a_longer_one_is_not(tmp_path: Path) -> None:
    empty = json.dumps({"x": ""})
    fits = json.dumps({"x": "a" * (MAX_ROW_BYTES - len(empty) - 1)}) + "\n"
    assert len(fits) == MAX_ROW_BYTES
    path = write_rows(tmp_path / "x", fits, fits.replace("a", "aaa", 1), {"y": 1})
    assert [sorted(row) for row in read_samples(path)] == [["x"], ["y"]]


def test_the_last_samples_begin_with_a_whole_row(tmp_path: Path) -> None:
    rows = [{"rank": 0, "x": number} for number in range(10, 20)]
    path = write_rows(tmp_path / "x", *rows)
    size = len(json.dumps(rows[0])) + 1
    total = path.stat().st_size
    assert [row["x"] for row in read_last_samples(path, total + 1)] == list(range(10, 20))
    assert [row["x"] for row in read_last_samples(path, 2 * size + 3)] == [18, 19]
    assert [row["x"] for row in read_last_samples(path, 2 * size + 1)] == [18, 19]
    assert [row["x"] for row in read_last_samples(path, 2 * size)] == [19]  # where a row begins is not known
    assert list(read_last_samples(path, size - 1)) == []
    assert list(read_last_samples(tmp_path / "no")) == []


def test_the_last_samples_take_bounded_time_of_a_long_run(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "x", *({"rank": 0, "x": number} for number in range(3000)))
    found = list(read_last_samples(path))
    assert path.stat().st_size > 65_536
    assert found[-1]["x"] == 2999
    assert 65_536 - 100 < sum(len(json.dumps(row)) + 1 for row in found) <= 65_536


def test_blocks_are_read_as_rows_and_damaged_ones_are_left_out(tmp_path: Path) -> None:
    block = {"kind": "samples", "rank": 0, "time": {"decimals": 3, "steps": [1000, 500]}, "x": {"steps": [1, 2]}}
    path = write_rows(tmp_path / "x", block, {**block, "rank": None}, {**block, "x": {"steps": [1]}})
    expected = [
        {"time": "1970-01-01T00:00:01.000Z", "rank": 0, "x": 1},
        {"time": "1970-01-01T00:00:01.500Z", "rank": 0, "x": 3},
    ]
    assert list(read_samples(path)) == expected
    assert list(read_last_samples(path)) == expected
    normalize_samples(path)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [block]
