"""Blocks of resource samples: 60 rows of one rank in one line of resources.jsonl, in a sixth of the space.

A row of kind "samples" has, for each field of the rows, its column, or the common value of a string field:

    {"kind":"samples","rank":3,"time":{"decimals":3,"steps":[1760000000000,1000,1001]},
     "cpu_seconds":{"decimals":2,"steps":[0,98,99]},"rss_bytes":{"steps":[4096,0,0]},"pod":"demo-2-3"}

`steps` are the first value and the differences after it, in units of 10^-decimals; without `decimals`, values are
integers. `values` are unencoded, for numbers with more than six decimals. The encoding is lossless, except that times
are rounded down to milliseconds.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from mlbench_cli.model.goals import is_finite_number
from mlbench_cli.util.times import MAX_SECONDS, parse_timestamp, timestamp

KIND = "samples"
BLOCK_ROWS = 60
_MAX_DECIMALS = 6
_MAX_EXACT = 2**53  # up to here, integers and their quotients by powers of ten are unique floats
_MAX_STEP = 2**63
_NO_COLUMNS = ("rank", "kind")
_INTEGERS = rb"%b(?:[1-9][0-9]{0,17}+|0|-[1-9][0-9]{0,17}+)"  # below _MAX_STEP
_STEPS = rb'\{(?:"decimals":[1-6],)?"steps":\[%b(?:%b)*+\]\}' % (_INTEGERS % b"", _INTEGERS % b",")
_TEXT = rb'"[ !#-\[\]-~]*+"'
_BLOCK = re.compile(rb'\{"kind":"samples","rank":(0|[1-9][0-9]{0,17})(?:,%b:(?:%b|%b))*+\}\n' % (_TEXT, _STEPS, _TEXT))
# Of a line that _BLOCK matches: name, and decimals and steps of a column.
_FIELD = re.compile(rb'(%b):(?:\{(?:"decimals":([1-6]),)?"steps":\[([^]]*)\]\}|%b|[0-9]+)' % (_TEXT, _TEXT))

# Of a column: its first step or value, and the others.
_MORE_VALUES = re.compile(rb'("(?:steps|values)":\[[^],]*),[^]]*')

Row = dict[str, Any]


def pack(rows: Iterable[Row]) -> Iterator[Row]:
    """Pack every 60 samples of a rank with the same fields into a block; all other rows stay unchanged.

    The order of a rank's rows is kept, and that of rows outside blocks.
    """
    waiting: dict[int, Row] = {}
    ranks: dict[int, list[int]] = {}  # indices of each rank's rows that are not yet in a block
    others: list[int] = []
    for number, row in enumerate(rows):
        waiting[number] = row
        if not _is_sample(row):
            others.append(number)
            continue
        own = ranks.setdefault(row["rank"], [])
        if own and not _is_alike(waiting[own[0]], row):
            yield from map(waiting.pop, own)
            own.clear()
        own.append(number)
        if len(own) == BLOCK_ROWS:
            yield from map(waiting.pop, others)
            others.clear()
            yield _make_block([waiting.pop(each) for each in own])
            own.clear()
    yield from waiting.values()


def expand(rows: Iterable[Row]) -> Iterator[Row]:
    """Expand blocks, which `check` must accept, into rows."""
    for row in rows:
        if row.get("kind") != KIND:
            yield row
            continue
        columns = read_columns(row)
        common = {name: value for name, value in row.items() if name not in columns and name != "kind"}
        times = columns.pop("time")
        for index, time in enumerate(times):
            values = {name: column[index] for name, column in columns.items()}
            yield {"time": timestamp(time), **common, **values}


def read_columns(
    row: Mapping[str, Any], names: Iterable[str] | None = None, every: int = 1
) -> dict[str, Sequence[float]]:
    """The columns of a block that `check` accepts, or those of `names` that it has, and of these every `every`-th
    value; `time` in seconds since 1970."""
    wanted = row if names is None else ["time", *names]
    return {name: _read_column(column, every) for name in wanted if isinstance(column := row.get(name), dict)}


def _read_column(column: Mapping[str, Any], every: int) -> Sequence[float]:
    if "values" in column:
        values: list[float] = column["values"]
        return values[::every]
    found = list(accumulate(column["steps"]))[::every]
    if "decimals" not in column:
        return found
    unit = 10 ** column["decimals"]
    return [value / unit for value in found]


def cut_to_first(line: bytes) -> bytes:
    """The line of a block with its first sample alone, which takes a tenth of the time to parse; any other line as it
    is."""
    return _MORE_VALUES.sub(rb"\1", line) if line.startswith(b'{"kind":"samples"') else line


def read_normal(line: bytes, last: Iterable[str] = ()) -> Row | None:
    """The row of a block that `check` accepts and that is in the form in which it is written, cut to what sums it up:
    its first and last time, and the last value of the columns in `last`. None for any other line.

    Takes a third of the time of parsing, checking and formatting the line.
    """
    block = _BLOCK.fullmatch(line)
    if block is None:
        return None
    found = _FIELD.findall(line)
    columns = {name: (decimals, steps) for name, decimals, steps in found}
    decimals, times = columns.get(b'"time"', (b"", b""))
    if len(columns) != len(found) or decimals != b"3":  # duplicate name
        return None
    moments = [*map(int, times.split(b","))]
    count, first, end = len(moments), moments[0], sum(moments)
    if b"-" in times:  # the clock was set back
        moments = [*accumulate(moments)]
        first, end = min(moments), max(moments)
    if any(steps and steps.count(b",") != count - 1 for _, _, steps in found):
        return None
    if first < 0 or end > 1000 * MAX_SECONDS:
        return None
    row: Row = {"kind": KIND, "rank": int(block[1]), "time": {"decimals": 3, "steps": [first, end - first]}}
    for name in last:
        decimals, steps = columns.get(b'"%b"' % name.encode(), (b"", b""))
        if steps:
            unit = {"decimals": int(decimals)} if decimals else {}
            row[name] = {**unit, "steps": [sum(map(int, steps.split(b",")))]}
    return row


def check(row: Mapping[str, Any]) -> None:
    """Raises ValueError for an invalid block: without rank or time, or with columns of different lengths."""
    if type(row.get("rank")) is not int:
        raise ValueError("a block of samples without a rank")
    counts = {len(_read_numbers(column)) for column in row.values() if isinstance(column, dict)}
    times = read_columns(row, ()).get("time", ())
    if not times or not (min(times) >= 0 and max(times) <= MAX_SECONDS):
        raise ValueError("a block of samples without times")
    if counts != {len(times)}:
        raise ValueError("a block of samples with columns of different lengths")


def _read_numbers(column: Mapping[str, Any]) -> Sequence[float]:
    """The encoded numbers of a column: its values or steps. Raises ValueError if it is not a column."""
    if "values" in column:
        values = column["values"]
        if type(values) is not list or not all(map(is_finite_number, values)):
            raise ValueError("a block of samples with values that are not numbers")
        return values
    steps = column.get("steps")
    if type(steps) is not list or {*map(type, steps)} != {int}:
        raise ValueError("a block of samples with steps that are not integers")
    if max(steps) >= _MAX_STEP or min(steps) <= -_MAX_STEP:
        raise ValueError("a block of samples with steps of more than 64 bits")
    decimals = column.get("decimals", 1)
    if type(decimals) is not int or not 0 < decimals <= _MAX_DECIMALS:
        raise ValueError(f"a block of samples with {decimals!r} decimals")
    return steps


def _is_sample(row: Row) -> bool:
    """Whether the row can be part of a block."""
    return (
        "kind" not in row
        and type(row.get("rank")) is int
        and not any(isinstance(value, dict | list) for value in row.values())
        and read_moment(row.get("time")) is not None
    )


def _is_alike(first: Row, row: Row) -> bool:
    """Whether two samples of a rank have the same fields, and the same values of non-numeric fields."""
    return first.keys() == row.keys() and all(
        is_finite_number(value) == is_finite_number(other) and (is_finite_number(value) or value == other)
        for (name, value), other in zip(first.items(), map(row.get, first), strict=True)
        if name != "time"
    )


def _make_block(rows: Sequence[Row]) -> Row:
    first = rows[0]
    block: dict[str, Any] = {"kind": KIND, "rank": first["rank"]}
    for name, value in first.items():
        if name == "time":
            moments = [read_moment(row["time"]) or 0.0 for row in rows]
            # Like `timestamp`: rounded to microseconds, then truncated to milliseconds.
            block[name] = {"decimals": 3, "steps": _steps([round(1e6 * moment) // 1000 for moment in moments])}
        elif name not in _NO_COLUMNS:
            block[name] = _make_column([row[name] for row in rows]) if is_finite_number(value) else value
    return block


def _make_column(values: Sequence[float]) -> dict[str, Any]:
    if all(type(value) is int and abs(value) < _MAX_STEP // 2 for value in values):
        return {"steps": _steps(values)}
    decimals = max(map(_count_decimals, values))
    if 0 < decimals <= _MAX_DECIMALS and max(map(abs, values)) * 10**decimals < _MAX_EXACT:
        return {"decimals": decimals, "steps": _steps([round(value * 10**decimals) for value in values])}
    return {"values": list(values)}


def _count_decimals(value: float) -> int:
    """Number of decimals in a number's shortest form, at least one; more than _MAX_DECIMALS if it has an exponent."""
    text = repr(value)
    return _MAX_DECIMALS + 1 if "e" in text else max(1, len(text.partition(".")[2]))


def _steps(values: Sequence[float]) -> list[float]:
    return [values[0], *(after - before for before, after in pairwise(values))]


def read_moment(value: object) -> float | None:
    """A row's time in seconds since 1970: RFC 3339 in an archive, a number while the run is running."""
    if not isinstance(value, str):
        return float(value) if is_finite_number(value) else None
    try:
        return parse_timestamp(value)
    except (ValueError, OverflowError):
        return None
