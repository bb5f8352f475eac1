"""How blocks of samples encode their columns, which rows go into one, and in which order rows are written."""

import json
from typing import Any

import pytest

from mlbench_cli.results.archive import sample_blocks
from mlbench_cli.results.archive.sample_blocks import (
    BLOCK_ROWS,
    check,
    expand,
    pack,
    read_columns,
    read_moment,
    read_normal,
)
from mlbench_cli.util.times import MAX_SECONDS, timestamp

Row = dict[str, Any]
START = 1_760_000_000


def row(second: float = 0.0, rank: int = 0, **fields: Any) -> Row:
    return {"time": START + second, "rank": rank, **fields}


def column_of(*values: Any) -> Any:
    """The encoded column of a block of which these are the first values, and the last one the others."""
    full = [*values, *values[-1:] * (BLOCK_ROWS - len(values))]
    (block,) = pack([row(index, x=value) for index, value in enumerate(full)])
    return block["x"]


def encode(*values: Any) -> Any:
    """As column_of, with only the given values."""
    column = column_of(*values)
    return {name: item[: len(values)] if isinstance(item, list) else item for name, item in column.items()}


# --- columns ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "column"),
    [
        ((4096, 4100, 4000), {"steps": [4096, 4, -100]}),
        ((0,), {"steps": [0]}),
        ((-5, 5), {"steps": [-5, 10]}),
        ((0.5, 1.25, 1.0), {"decimals": 2, "steps": [50, 75, -25]}),
        ((1.0, 2.0), {"decimals": 1, "steps": [10, 10]}),
        ((1, 2.5), {"decimals": 1, "steps": [10, 15]}),  # a whole number among fractions
        ((0.123456,), {"decimals": 6, "steps": [123456]}),
        ((0.1234567,), {"values": [0.1234567]}),  # more than six decimals
        ((1e-7,), {"values": [1e-7]}),  # written with an exponent
        ((1e22, 0.5), {"values": [1e22, 0.5]}),
        ((-0.25, 0.5), {"decimals": 2, "steps": [-25, 75]}),
    ],
)
def test_a_column_is_its_first_value_and_the_differences_after_it(values: tuple[Any, ...], column: Row) -> None:
    assert encode(*values) == column


@pytest.mark.parametrize(
    ("value", "is_exact"),
    [
        (900719925474099.1, True),  # 2**53 - 1, in tenths
        (900719925474099.2, False),  # 2**53: the next tenth would be the same float
        (-900719925474099.1, True),
        (-900719925474099.2, False),
        (2**62 - 1, True),
        (2**62, False),
        (1 - 2**62, True),
        (-(2**62), False),
    ],
)
def test_numbers_are_encoded_as_steps_only_while_they_are_exact(value: float, is_exact: bool) -> None:
    """Differences of two integers below 2**62 fit in 64 bits; floats are exact below 2**53."""
    column = column_of(value)
    assert ("steps" in column) is is_exact
    (block,) = pack([row(index, x=value) for index in range(BLOCK_ROWS)])
    assert {found["x"] for found in expand([json.loads(json.dumps(block))])} == {value}


@pytest.mark.parametrize(
    ("moment", "steps"),
    [
        (START, START * 1000),
        (START + 0.25, START * 1000 + 250),
        (0.0009, 0),  # down to the millisecond
        (0.0019989, 1),
        (0.0009996, 1),  # 1000 microseconds, as RFC 3339 times are rounded
        ("1970-01-01T00:00:02.500Z", 2500),
    ],
)
def test_times_are_milliseconds_as_in_the_timestamps_of_rows(moment: Any, steps: int) -> None:
    (block,) = pack([{"time": moment, "rank": 3} for _ in range(BLOCK_ROWS)])
    assert block == {"kind": "samples", "rank": 3, "time": {"decimals": 3, "steps": [steps, *[0] * 59]}}
    shown = moment if isinstance(moment, str) else timestamp(moment)
    assert list(expand([block])) == [{"time": shown, "rank": 3}] * BLOCK_ROWS


# --- order ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks have two rows."""
    monkeypatch.setattr(sample_blocks, "BLOCK_ROWS", 2)


def names(rows: Any) -> list[str]:
    """Per row what it is: the value of "x", or of a block its values."""
    found = []
    for each in rows:
        column = each.get("x")
        if isinstance(column, dict):
            column = [sum(column["steps"][: index + 1]) for index in range(len(column["steps"]))]
        found.append(str(column))
    return found


@pytest.mark.usefixtures("pairs")
@pytest.mark.parametrize(
    ("rows", "written"),
    [
        ([row(0, x=1), row(1, x=2)], ["[1, 2]"]),
        ([row(0, x=1), row(1, x=2), row(2, x=3)], ["[1, 2]", "3"]),
        ([row(0, x=1), row(0, 1, x=5), row(1, x=2), row(1, 1, x=6)], ["[1, 2]", "[5, 6]"]),
        # A row of another kind comes before the block that is completed after it, and keeps its place otherwise.
        ([row(0, x=1), row(0, x=9, kind="machine"), row(1, x=2)], ["9", "[1, 2]"]),
        ([row(0, x=1), row(1, x=2), row(2, x=9, kind="machine")], ["[1, 2]", "9"]),
        ([row(0, x=1), row(0, x=9, kind="machine"), row(0, 1, x=5), row(1, x=2)], ["9", "[1, 2]", "5"]),
        ([row(0, x=8, kind="m"), row(0, x=9, kind="m"), row(0, x=1), row(1, x=2)], ["8", "9", "[1, 2]"]),
        # Where the fields change, a block that is not full ends, and its rows come first.
        ([row(0, x=1), row(1, x=2, y=1), row(2, x=3, y=1)], ["1", "[2, 3]"]),
        ([row(0, x=1), row(0, 1, x=5), row(1, x=2, y=0), row(1, 1, x=6), row(2, x=3, y=0)], ["1", "[5, 6]", "[2, 3]"]),
    ],
)
def test_rows_keep_the_order_of_their_rank(rows: list[Row], written: list[str]) -> None:
    assert names(pack(rows)) == written


@pytest.mark.usefixtures("pairs")
@pytest.mark.parametrize(
    "change",
    [
        {"rank": True},
        {"rank": 1.0},
        {"rank": "1"},
        {"kind": "machine"},
        {"kind": None},
        {"time": "yesterday"},
        {"time": "2026-01-01T00:00:00"},  # no time zone
        {"time": None},
        {"time": float("nan")},
        {"more": {"a": 1}},
        {"more": []},
    ],
)
def test_what_is_not_a_plain_sample_of_a_rank_is_never_in_a_block(change: Row) -> None:
    rows = [{**row(index, 1, x=index), **change} for index in range(4)]
    assert list(pack(rows)) == rows
    without_rank = [{"time": START + index, "x": index} for index in range(4)]
    assert list(pack(without_rank)) == without_rank


@pytest.mark.usefixtures("pairs")
@pytest.mark.parametrize(
    ("first", "second", "together"),
    [
        ({"x": 1}, {"x": 2}, True),
        ({"x": 1}, {"x": 2.5}, True),
        ({"x": "a"}, {"x": "a"}, True),
        ({"x": None}, {"x": None}, True),
        ({"x": "a"}, {"x": "b"}, False),
        ({"x": 1}, {"x": "1"}, False),
        ({"x": 1}, {"x": None}, False),
        ({"x": True}, {"x": False}, False),
        ({"x": True}, {"x": True}, True),
        ({"x": 1}, {"y": 1}, False),
        ({"x": 1}, {}, False),
        ({"x": "inf"}, {"x": 1.0}, False),
    ],
)
def test_rows_are_in_a_block_together_if_only_their_numbers_differ(first: Row, second: Row, together: bool) -> None:
    found = list(pack([row(0, **first), row(1, **second)]))
    assert (len(found) == 1) is together


# --- reading ----------------------------------------------------------------------------------------------------------

BLOCK: Row = {
    "kind": "samples",
    "rank": 3,
    "time": {"decimals": 3, "steps": [1000, 500, 500, 500]},
    "log_bytes": {"steps": [10, 5, -3, 0]},
    "cpu_seconds": {"decimals": 2, "steps": [150, 25, 25, 50]},
    "share": {"values": [0.1, 0.2, 0.3, 0.4]},
    "pod": "demo-2-3",
}


@pytest.mark.parametrize(
    ("wanted", "every", "columns"),
    [
        (
            None,
            1,
            {
                "time": [1.0, 1.5, 2.0, 2.5],
                "log_bytes": [10, 15, 12, 12],
                "cpu_seconds": [1.5, 1.75, 2.0, 2.5],
                "share": [0.1, 0.2, 0.3, 0.4],
            },
        ),
        ((), 1, {"time": [1.0, 1.5, 2.0, 2.5]}),
        (("log_bytes", "unknown", "pod"), 1, {"time": [1.0, 1.5, 2.0, 2.5], "log_bytes": [10, 15, 12, 12]}),
        (("share", "cpu_seconds"), 2, {"time": [1.0, 2.0], "share": [0.1, 0.3], "cpu_seconds": [1.5, 2.0]}),
        (("log_bytes",), 3, {"time": [1.0, 2.5], "log_bytes": [10, 12]}),
    ],
)
def test_columns_are_read_by_name_and_as_densely_as_wanted(wanted: Any, every: int, columns: Row) -> None:
    assert read_columns(BLOCK, wanted, every) == columns


def line(text: str) -> bytes:
    return text.replace("'", '"').encode()


NORMAL = (
    "{'kind':'samples','rank':3,'time':{'decimals':3,'steps':[1000,500,500]},"
    "'log_bytes':{'steps':[10,5,-3]},'cpu_seconds':{'decimals':2,'steps':[150,25,25]},'pod':'x'}\n"
)
CUT = {"kind": "samples", "rank": 3, "time": {"decimals": 3, "steps": [1000, 1000]}}


@pytest.mark.parametrize(
    ("last", "more"),
    [
        ((), {}),
        (("log_bytes",), {"log_bytes": {"steps": [12]}}),
        (("cpu_seconds",), {"cpu_seconds": {"decimals": 2, "steps": [200]}}),
        (("unknown", "pod"), {}),
        (("cpu_seconds", "log_bytes"), {"cpu_seconds": {"decimals": 2, "steps": [200]}, "log_bytes": {"steps": [12]}}),
    ],
)
def test_a_line_in_normal_form_is_cut_to_its_ends(last: tuple[str, ...], more: Row) -> None:
    assert read_normal(line(NORMAL), last) == {**CUT, **more}


@pytest.mark.parametrize(
    ("steps", "ends"),
    [
        ("[5000]", [5000, 0]),
        ("[5000,-2000,500]", [3000, 2000]),  # the clock was set back: the earliest and the latest
        ("[5000,1000,-3000]", [3000, 3000]),
        ("[0,1]", [0, 1]),
        (f"[{1000 * MAX_SECONDS}]", [1000 * MAX_SECONDS, 0]),
        (f"[{1000 * MAX_SECONDS},-5]", [1000 * MAX_SECONDS - 5, 5]),
        (f"[{1000 * MAX_SECONDS + 1}]", None),
        (f"[{1000 * MAX_SECONDS},1]", None),
        ("[5,-6]", None),
        ("[-1,2]", None),
    ],
)
def test_the_ends_of_a_block_are_its_earliest_and_latest_time(steps: str, ends: list[int] | None) -> None:
    found = read_normal(line(f"{{'kind':'samples','rank':0,'time':{{'decimals':3,'steps':{steps}}}}}\n"))
    assert (None if found is None else found["time"]["steps"]) == ends


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("'decimals':3", "'decimals':2"),
        ("{'decimals':3,'steps':[1000,500,500]}", "{'steps':[1000,500,500]}"),
        ("'time'", "'tim'"),
        ("[10,5,-3]", "[10,5]"),
        ("[10,5,-3]", "[10,5,-3,0]"),
        ("[150,25,25]", "[150]"),
        ("'cpu_seconds'", "'log_bytes'"),
        ("'rank':3", "'rank':-3"),
        ("'samples'", "'sample'"),
        ("}\n", "}"),
    ],
)
def test_a_line_that_differs_from_normal_form_is_left_to_the_parser(old: str, new: str) -> None:
    assert old in NORMAL
    assert read_normal(line(NORMAL.replace(old, new))) is None


# --- checks -----------------------------------------------------------------------------------------------------------


def one(**changes: Any) -> Row:
    """A block of a single row."""
    return {"kind": "samples", "rank": 0, "time": {"decimals": 3, "steps": [1000]}, **changes}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"time": {"decimals": 3, "steps": [0]}},
        {"time": {"decimals": 3, "steps": [1000 * MAX_SECONDS]}},
        {"x": {"steps": [2**63 - 1]}},
        {"x": {"steps": [1 - 2**63]}},
        {"x": {"decimals": 1, "steps": [5]}},
        {"x": {"decimals": 6, "steps": [5]}},
        {"x": {"values": [0.1234567]}},
        {"x": "text", "y": None},
    ],
)
def test_blocks_at_the_limits_are_read(changes: Row) -> None:
    check(one(**changes))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"rank": True}, "without a rank"),
        ({"rank": "0"}, "without a rank"),
        ({"time": 5}, "without times"),
        ({"time": {"decimals": 3, "steps": [-1]}}, "without times"),
        ({"time": {"decimals": 3, "steps": [1000 * MAX_SECONDS + 1]}}, "without times"),
        ({"time": {"values": [float(MAX_SECONDS)]}, "x": {"steps": [1, 2]}}, "columns of different lengths"),
        ({"x": {"steps": []}}, "steps that are not integers"),
        ({"x": {"steps": [True]}}, "steps that are not integers"),
        ({"x": {"steps": (1,)}}, "steps that are not integers"),
        ({"x": {"steps": [2**63]}}, "steps of more than 64 bits"),
        ({"x": {"steps": [-(2**63)]}}, "steps of more than 64 bits"),
        ({"x": {"decimals": 0, "steps": [5]}}, "with 0 decimals"),
        ({"x": {"decimals": 7, "steps": [5]}}, "with 7 decimals"),
        ({"x": {"decimals": "2", "steps": [5]}}, "with '2' decimals"),
        ({"x": {"values": [float("nan")]}}, "values that are not numbers"),
        ({"x": {"values": [True]}}, "values that are not numbers"),
        ({"x": {"values": (1.0,)}}, "values that are not numbers"),
        ({"x": {"values": []}}, "columns of different lengths"),
    ],
)
def test_blocks_beyond_the_limits_are_refused_with_the_reason(changes: Row, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        check(one(**changes))


@pytest.mark.parametrize(
    ("value", "moment"),
    [
        (5, 5.0),
        (1.5, 1.5),
        ("1970-01-01T00:01:00Z", 60.0),
        ("1970-01-01T02:00:00.500+01:00", 3600.5),
        ("1970-01-01T00:01:00", None),
        ("noon", None),
        (True, None),
        (None, None),
        (float("inf"), None),
        ([5], None),
    ],
)
def test_a_time_is_a_number_or_a_timestamp_with_its_zone(value: object, moment: float | None) -> None:
    found = read_moment(value)
    assert (found, type(found)) == (moment, type(moment))
