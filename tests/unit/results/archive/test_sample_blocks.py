"""Blocks of resource samples stand for exactly the rows they are made of, and damaged ones are refused."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlbench_cli.results.archive import layout
from mlbench_cli.results.archive.evidence import normalize_samples, read_last_samples, read_samples
from mlbench_cli.results.archive.log_times import read_log_sizes
from mlbench_cli.results.archive.plausibility import LAST_VALUES, SampleWatch
from mlbench_cli.results.archive.reader import Archive
from mlbench_cli.results.archive.sample_blocks import (
    BLOCK_ROWS,
    KIND,
    check,
    cut_to_first,
    expand,
    pack,
    read_normal,
)
from mlbench_cli.results.archive.verify import verify
from mlbench_cli.results.figures.curves import RunData, resource_figures
from mlbench_cli.util.json_text import format_row
from mlbench_cli.util.times import timestamp
from tests.unit.results.runs import sealed_run

START = 1_760_000_000.25

Row = dict[str, Any]


def rows_of(seconds: int, ranks: int = 2) -> list[Row]:
    found: list[Row] = []
    for second in range(seconds):
        found += [
            {
                "time": START + second + rank / 1e3,
                "rank": rank,
                "cpu_seconds": round(second * 0.97, 2),
                "rss_bytes": 10**9 + rank,
                "received_bytes": 123_456 * second,
                "log_bytes": 100 * second,
                "pod": "x",
            }
            for rank in range(ranks)
        ]
        found.append({"time": START + second, "kind": "machine", "elapsed_seconds": second + 0.001})
    return found


def normalized(row: Mapping[str, Any]) -> Row:
    return {**row, "time": timestamp(row["time"])}


def in_order(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: (row.get("rank", -1), row["time"]))


def test_blocks_stand_for_the_rows_they_are_made_of() -> None:
    rows = rows_of(150)
    packed = list(pack(rows))
    assert sum(row.get("kind") == KIND for row in packed) == 4, "two minutes of two ranks; the rest stays as rows"
    assert [row for row in packed if row.get("kind") == "machine"] == [row for row in rows if "kind" in row]
    found = [row if isinstance(row["time"], str) else normalized(row) for row in map(dict, expand(packed))]
    assert in_order(found) == in_order([normalized(row) for row in rows])


def test_short_runs_keep_their_rows_as_they_were() -> None:
    rows = rows_of(BLOCK_ROWS - 1)
    assert list(pack(rows)) == rows


def test_blocks_take_a_fifth_of_the_room() -> None:
    rows = [row for row in rows_of(600) if "kind" not in row]
    size = sum(len(json.dumps(row, separators=(",", ":"))) for row in pack(rows))
    assert size < sum(len(json.dumps(normalized(row), separators=(",", ":"))) for row in rows) / 5


NUMBERS = st.one_of(
    st.integers(-(2**62), 2**62),
    st.floats(allow_nan=False, allow_infinity=False),
    st.decimals(-(10**6), 10**6, places=3).map(float),
)


@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=BLOCK_ROWS, max_size=BLOCK_ROWS))
def test_every_number_survives(values: list[tuple[float, float]]) -> None:
    rows = [{"time": START + index, "rank": 0, "a": a, "b": b} for index, (a, b) in enumerate(values)]
    (block,) = pack(rows)
    block = json.loads(json.dumps(block))
    assert [(row["a"], row["b"]) for row in expand([block])] == values


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "other"},
        {"rss_bytes": None},
        {"pod": "y"},
        {"more": 1},
    ],
)
def test_rows_that_differ_are_in_no_block_together(change: Row) -> None:
    rows = [row for row in rows_of(BLOCK_ROWS, ranks=1) if "kind" not in row]
    rows[30] = {**rows[30], **change}
    assert all("steps" not in json.dumps(row) for row in pack(rows))


@pytest.mark.parametrize(
    "change",
    [
        {"rank": True},
        {"rank": None},
        {"time": None},
        {"time": {"decimals": 3, "steps": []}},
        {"time": {"decimals": 3, "steps": [-5] * BLOCK_ROWS}},
        {"time": {"decimals": 3, "steps": [10**30] * BLOCK_ROWS}},
        {"rss_bytes": {"steps": [1, 2]}},
        {"rss_bytes": {"steps": [1.5] * BLOCK_ROWS}},
        {"rss_bytes": {"steps": [10**400] * BLOCK_ROWS}},
        {"rss_bytes": {"decimals": 1, "steps": [10**400] * BLOCK_ROWS}},
        {"rss_bytes": {"decimals": True, "steps": [1] * BLOCK_ROWS}},
        {"rss_bytes": {"steps": "1"}},
        {"rss_bytes": {}},
        {"rss_bytes": {"values": ["x"] * BLOCK_ROWS}},
        {"rss_bytes": {"values": 5}},
        {"cpu_seconds": {"decimals": 400, "steps": [1] * BLOCK_ROWS}},
        {"cpu_seconds": {"decimals": 2, "steps": [10**400] * BLOCK_ROWS}},
    ],
)
def test_damaged_blocks_are_refused_and_sealing_drops_them(change: Row, tmp_path: Path) -> None:
    (block,) = pack([row for row in rows_of(BLOCK_ROWS, ranks=1) if "kind" not in row])
    damaged = {**block, **change}
    with pytest.raises(ValueError, match="a block of samples"):
        check(damaged)
    path = tmp_path / "resources.jsonl"
    path.write_text(json.dumps(damaged) + "\n" + json.dumps(block) + "\n")
    normalize_samples(path)
    assert json.loads(path.read_text()) == block
    assert read_normal(format_row(damaged)) is None


def test_a_line_is_normal_only_if_it_says_what_formatting_would_write() -> None:
    """A line that is taken for normal is neither parsed nor formatted: a reader could find another thing in it."""
    (block,) = pack([row for row in rows_of(BLOCK_ROWS, ranks=1) if "kind" not in row])
    line = format_row(block)
    assert read_normal(line) is not None
    changes = [
        *((b'"rss_bytes"', b'"cpu_seconds"'), (b'"rss_bytes"', b'"rank"'), (b'"rss_bytes"', b'"kind"')),
        *((b'"pod":"x"', b'"pod":"\\u0078"'), (b'"pod":"x"', b'"pod":1'), (b'"pod":"x"', b'"pod":"x","pod":"y"')),
        *((b'"pod":"x"', b'"pod":"\xc3\xa9"'), (b'"pod":"x"', b'"pod": "x"'), (b'"rank":0', b'"rank":00')),
        *(
            (b"[1000000000,0", b"[1000000000,-0"),
            (b"[1000000000,0", b"[1000000000,00"),
            (b"[1000000000,0", b"[1000000000"),
        ),
        *(
            (b"[1000000000,0", b"[1e9,0"),
            (b"[1000000000,0", b"[9999999999999999999,0"),
            (b'"decimals":2', b'"decimals":7'),
        ),
        *((b'"time":{"decimals":3,"steps":[1', b'"time":{"decimals":3,"steps":[-1'), (b"\n", b""), (b"\n", b" \n")),
        (b'"time":{"decimals":3,', b'"time":{"decimals":3,"decimals":3,'),
    ]
    for old, new in changes:
        assert old in line, old
        assert read_normal(line.replace(old, new, 1)) is None, new


@given(
    st.lists(st.tuples(st.integers(0, 10**12), st.integers(-(2**40), 2**40)), min_size=60, max_size=60), st.booleans()
)
def test_the_judge_finds_the_same_in_a_block_that_is_cut(values: list[tuple[int, int]], is_float: bool) -> None:
    rows = [
        {"time": moment / 1e3, "rank": 7, "log_bytes": size / 8 if is_float else size, "x": 1}
        for moment, size in values
    ]
    (block,) = pack(rows)
    cut = read_normal(format_row(block), LAST_VALUES)
    assert cut is not None
    assert len(json.dumps(cut)) < 150
    whole, found = SampleWatch(), SampleWatch()
    assert list(whole.watch([block])) == [block]
    assert list(found.watch([cut])) == [cut]
    assert vars(found) == vars(whole)


def test_sealing_again_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "resources.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows_of(200)))
    normalize_samples(path)
    once = path.read_bytes()
    normalize_samples(path)
    assert path.read_bytes() == once
    assert len(list(read_samples(path))) == len(rows_of(200))
    assert max(str(row["time"]) for row in read_last_samples(path)) == timestamp(START + 199.001)
    sizes = read_log_sizes(tmp_path / ".")[1]
    assert sizes.offsets[-1] == 19_900
    assert sizes.find_time(1_000) == pytest.approx(START + 10.001)


def test_an_archive_with_blocks_verifies_and_is_drawn(tmp_path: Path) -> None:
    path = sealed_run(tmp_path / "a", workers=20, seconds=100.0, samples=rows_of(100, ranks=20))
    assert f'"kind":"{KIND}"' in (path / "resources.jsonl").read_text()
    assert verify(path).problems == ()
    with Archive.open(path) as archive:
        assert sum(row.get("rank") == 3 for row in archive.resources()) == 100
        figures = {figure.key: figure for figure in resource_figures([RunData(archive)], "")}
    labels = [line.label.partition(", ")[2] for line in figures["cpu"].lines]
    assert labels == ["least of 20 ranks", "median of 20 ranks", "greatest of 20 ranks"]
    assert figures["cpu"].lines[1].ys[5] == pytest.approx(0.97, abs=0.05)


def test_a_block_can_be_cut_to_its_first_sample_before_it_is_parsed() -> None:
    rows = [{**row, "share": 1 / (3 + index)} for index, row in enumerate(rows_of(60, ranks=1)) if "kind" not in row]
    (block,) = pack(rows)
    assert "values" in block["share"], "such fractions have too many decimals for steps"
    cut = json.loads(cut_to_first(format_row(block)))
    check(cut)
    assert list(expand([cut])) == [normalized(rows[0])]
    other = format_row({"kind": "machine", "steps": [1, 2]})
    assert cut_to_first(other) == other


def test_many_ranks_over_an_hour_are_drawn_from_a_sample_a_minute(tmp_path: Path) -> None:
    path = sealed_run(tmp_path / "a", workers=20, seconds=3600.0, samples=rows_of(3600, ranks=20))
    with Archive.open(path) as archive:
        run = RunData(archive)
        assert {len(samples.times) for samples in run.resources.values()} == {60}
        figures = {figure.key: figure for figure in resource_figures([run], "")}
    assert figures["cpu"].lines[1].ys[30] == pytest.approx(0.97, abs=0.01)
    assert figures["memory"].lines[2].ys[30] == pytest.approx((10**9 + 19) / 2**30)


def test_a_damaged_block_is_a_problem_of_the_archive(tmp_path: Path) -> None:
    path = sealed_run(tmp_path / "a", workers=1, seconds=100.0, samples=rows_of(100, ranks=1))
    resources = path / "resources.jsonl"
    resources.write_text(resources.read_text().replace('"steps":[', '"steps":[0.5,', 1))
    (path / "SHA256SUMS").unlink()
    layout.write_sums(path)
    (problem,) = verify(path).problems
    assert (problem.code, problem.file) == ("schema", "resources.jsonl")
    assert "a block of samples with steps that are not integers" in problem.message
