"""The evidence of a certificate: the lines of the task certify in the logs of the ranks. They are untrusted."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from task_images.certify.rules import PREFIX, TESTS

MAX_LINE_BYTES = 1 << 20
MAX_KEYS = 100  # of an inventory
_LEAST, _MOST = 1e-12, 1e15  # of seconds and of rates: others are no measurements
_BEGIN = PREFIX.encode() + b"{"


@dataclass(frozen=True)
class NodeSample:
    """One measurement of one rank alone. `round`: of the screen; `case` and `moment`: of a confirmation; `cycle`: of a
    soak."""

    rank: int
    at: float
    values: Mapping[str, float]
    line: int = 0
    round: int | None = None
    case: int | None = None
    moment: int | None = None
    cycle: int | None = None
    digest: str | None = None
    errors: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PairSample:
    """The seconds of an all-reduce of two nodes, the best of a few."""

    pair: tuple[int, int]
    seconds: float
    at: float
    case: int | None = None
    moment: int | None = None


@dataclass(frozen=True)
class Case:
    """Who is confirmed: a rank, a node for the test network, or the two nodes of a link."""

    number: int
    test: str
    suspect: tuple[int, ...]
    peers: tuple[int, ...]


@dataclass(frozen=True)
class Together:
    """A collective or a training among `ranks`, as the first of them saw it."""

    operation: str
    ranks: tuple[int, ...]
    set: int
    bytes: int = 0
    times: tuple[float, ...] = ()  # seconds of calls, or of steps
    is_right: bool = True
    transport: str | None = None
    facts: Mapping[str, float] = field(default_factory=dict)


@dataclass
class Samples:
    """All evidence of a certificate."""

    ranks: int
    per_node: int = 1
    inventories: dict[int, dict[str, str]] = field(default_factory=dict)
    problems: dict[int, str] = field(default_factory=dict)  # rank -> why its device cannot be used
    silent: dict[int, str] = field(default_factory=dict)  # rank -> stage
    offsets: dict[int, float] = field(default_factory=dict)
    counters: dict[int, list[dict[str, int]]] = field(default_factory=dict)
    nodes: list[NodeSample] = field(default_factory=list)
    pairs: list[PairSample] = field(default_factory=list)
    together: list[Together] = field(default_factory=list)
    cases: list[Case] = field(default_factory=list)
    screened: float | None = None
    ended: float | None = None
    has_scope: bool = False
    shares_machine: bool = False


def read_samples(logs: Mapping[int, Callable[[], BinaryIO]], ranks: int, per_node: int) -> Samples:
    """The samples in the logs. Lines that make no sense are skipped."""
    found = Samples(ranks, per_node)
    for rank in sorted(logs):
        if rank < ranks:
            for number, row in _rows(logs[rank]):
                try:
                    _take(found, rank, number, row)
                except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
                    continue
    return found


def _rows(open_log: Callable[[], BinaryIO]) -> Iterator[tuple[int, dict[str, Any]]]:
    number = 0
    with open_log() as log:
        while line := log.readline(MAX_LINE_BYTES):
            number += 1
            if line.startswith(_BEGIN):
                try:
                    row = json.loads(line[len(PREFIX) :])
                except (ValueError, RecursionError):
                    continue
                yield number, row


def _take(found: Samples, rank: int, line: int, row: dict[str, Any]) -> None:
    kind, at = row["kind"], row.get("at")
    if kind == "inventory":
        keys = list(row["keys"].items())[:MAX_KEYS]
        found.inventories[rank] = {str(key)[:80]: str(value)[:200] for key, value in keys}
        if row.get("error"):
            found.problems[rank] = str(row["error"])[:300]
    elif kind == "node":
        if row.get("error"):
            found.nodes.append(NodeSample(rank, _number(at), {}, line, errors={"": str(row["error"])[:300]}))
            return
        rates = {test: value for test, value in row["values"].items() if test in TESTS}
        values = {test: _number(value) for test, value in rates.items() if _LEAST < value < _MOST}
        errors = {str(test): str(text)[:300] for test, text in row.get("errors", {}).items()}
        found.nodes.append(
            NodeSample(rank, _number(at), values, line, **_marks(row), digest=row.get("digest"), errors=errors)
        )
    elif kind == "counters":
        counts = {str(key): _index(value) for key, value in row.items() if key != "kind"}
        found.counters.setdefault(rank, []).append(counts)
    elif kind == "together" and row.get("first") and row.get("times"):
        _take_group(found, rank, line, row)
    elif kind == "train" and row.get("first") and row.get("steps"):
        facts: dict[str, float] = {
            key: _number(row[key]) for key in ("batch", "bytes", "write", "read", "wall") if key in row
        }
        found.together.append(
            Together("training", _ranks(row["ranks"]), _index(row["set"]), times=_times(row["steps"]), facts=facts)
        )
    elif rank == 0:
        _take_order(found, kind, row)


def _marks(row: dict[str, Any], names: tuple[str, ...] = ("round", "case", "moment", "cycle")) -> dict[str, Any]:
    """What a measurement belongs to, as far as the row says."""
    return {key: _index(row[key]) for key in names if key in row}


def _take_group(found: Samples, rank: int, line: int, row: dict[str, Any]) -> None:
    times, at, size = _times(row["times"]), _number(row["at"]), _index(row["bytes"])
    if row["stage"] == "pair":
        first, second = sorted({*map(_index, row["pair"])})
        found.pairs.append(PairSample((first, second), min(times), at, **_marks(row, ("case", "moment"))))
    elif row["stage"] == "inside":
        found.nodes.append(NodeSample(rank, at, {"local_all_reduce": size / min(times) / 1e9}, line, **_marks(row)))
    elif row["stage"] == "all":
        transport = None if row.get("transport") is None else str(row["transport"])[:80]
        place = (str(row["operation"])[:40], _ranks(row["ranks"]), _index(row["set"]))
        found.together.append(Together(*place, size, times, row["right"] is True, transport))


def _take_order(found: Samples, kind: str, row: dict[str, Any]) -> None:
    """What only rank 0 says."""
    if kind == "scope":
        found.has_scope, found.shares_machine = True, row["turns"] is True
    elif kind == "silent":
        found.silent.setdefault(_index(row["rank"]), str(row["stage"])[:40])
    elif kind == "clock":
        found.offsets[_index(row["rank"])] = float(row["offset"])
    elif kind == "case" and row["test"] in TESTS:
        peers = tuple(map(_index, row["peers"]))
        found.cases.append(Case(_index(row["case"]), row["test"], tuple(map(_index, row["suspect"])), peers))
    elif kind == "screened":
        found.screened = _number(row["at"])
    elif kind == "end":
        found.ended = _number(row["at"])


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError(value)
    return float(value)


def _index(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 53:
        raise ValueError(value)
    return value


def _times(values: Any) -> tuple[float, ...]:
    times = tuple(map(_number, values))
    if not times or not _LEAST < min(times) <= max(times) < _MOST:
        raise ValueError(values)
    return times


def _ranks(values: Any) -> tuple[int, ...]:
    ranks = tuple(map(_index, values))
    if len(ranks) < 2:
        raise ValueError(values)
    return ranks
