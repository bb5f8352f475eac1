"""The evidence of a certificate: the lines of the task certify in the logs of the ranks. They are untrusted, so a line
that does not decode is skipped."""

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, BinaryIO

import msgspec
from msgspec import Meta, Struct, field

from task_images.certify.rules import PREFIX, TESTS, Evidence, Sample, Suspect

MAX_LINE_BYTES = 1 << 20
_BEGIN = PREFIX.encode() + b"{"

Index = Annotated[int, Meta(ge=0, lt=1 << 53)]
Amount = Annotated[float, Meta(gt=1e-12, lt=1e15)]  # of seconds and rates: others are no measurements
Seconds = Annotated[float, Meta(ge=0, lt=1e15)]
Word = Annotated[str, Meta(max_length=80)]
Text = Annotated[str, Meta(max_length=500)]
Ranks = Annotated[tuple[Index, ...], Meta(min_length=2)]


class Inventory(Struct, tag="inventory", tag_field="kind"):
    """What a rank's node is, the serial number of its GPU, and why its device cannot be used, if it cannot."""

    keys: Annotated[dict[Word, Text], Meta(max_length=100)]
    serial: Text | None = None
    error: Text | None = None


class Rates(Struct, tag="rates", tag_field="kind"):
    """What a rank measured in a job: rates, and why others failed. `unit`: the two nodes of a pair."""

    at: Seconds
    values: dict[str, Amount] = {}
    errors: dict[str, Text] = {}
    error: Text | None = None  # of the whole job
    digest: Word | None = None
    counters: dict[Word, Index] = {}
    unit: tuple[Index, Index] | None = None
    round: Index | None = None
    case: Index | None = None
    moment: Index | None = None
    cycle: Index | None = None


class Collective(Struct, tag="collective", tag_field="kind"):
    """Calls of a collective among `ranks`, as the first of them saw it."""

    operation: Word
    ranks: Ranks
    bytes: Index
    times: Annotated[tuple[Amount, ...], Meta(min_length=1)]
    right: bool
    transport: Word | None = None
    cycle: Index | None = None  # of a soak


class Training(Struct, tag="training", tag_field="kind"):
    """A reference training among `ranks`; seconds of its steps, of the whole, and of a checkpoint."""

    ranks: Ranks
    steps: Annotated[tuple[Amount, ...], Meta(min_length=1)]
    batch: Index
    wall: Amount
    bytes: Index
    write: Amount
    read: Amount
    cycle: Index | None = None  # of a soak


class Failed(Struct, tag="failed", tag_field="kind"):
    """A collective, or the training if `operation` is None, among `ranks` that the first of them could not end."""

    ranks: Ranks
    error: Text
    operation: Word | None = None


class Scope(Struct, tag="scope", tag_field="kind"):
    """From rank 0, when all that will come are there: seconds by which clocks differ from its own."""

    turns: bool  # whether nodes share a machine
    clocks: dict[Index, float]


class Silent(Struct, tag="silent", tag_field="kind"):
    """From rank 0: who does not answer since when."""

    rank: Index
    stage: Word


class Screened(Struct, tag="screened", tag_field="kind"):
    """From rank 0: the end of the screen, and who is to be measured again."""

    at: Seconds
    cases: list[Suspect]


class End(Struct, tag="end", tag_field="kind"):
    """From rank 0, when all was measured that was asked for."""

    at: Seconds


Row = Inventory | Rates | Collective | Training | Failed | Scope | Silent | Screened | End
_DECODER = msgspec.json.Decoder(Row)


class Samples(Struct):
    """All evidence of a certificate. `rows` are those of ranks and of pairs, with rank and number of the line."""

    evidence: Evidence
    ranks: int
    inventories: dict[int, Inventory] = field(default_factory=dict)
    rows: list[tuple[int, int, Rates]] = field(default_factory=list)
    together: list[Collective | Training] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)
    silent: dict[int, str] = field(default_factory=dict)  # rank -> stage
    scope: Scope | None = None
    ended: float | None = None

    def node_of(self, rank: int) -> int:
        return rank // self.evidence.per_node

    def take(self, rank: int, line: int, row: Row) -> None:
        """Add a row of a rank's log."""
        if isinstance(row, Inventory):
            self.inventories[rank] = row
        elif isinstance(row, Rates):
            self._take_rates(rank, line, row)
        elif isinstance(row, Collective | Training):
            if max(row.ranks) < self.ranks:
                self.together.append(row)
        elif isinstance(row, Failed):
            self.failed.append(row)
        elif rank == 0:
            self._take_order(row)

    def _take_rates(self, rank: int, line: int, row: Rates) -> None:
        if row.unit is not None:
            first, second = row.unit
            if rank != first * self.evidence.per_node or not first < second <= self.node_of(self.ranks - 1):
                return
        self.rows.append((rank, line, row))
        for test, rate in row.values.items():
            if test in TESTS and (test == "network") == (row.unit is not None):
                place = row.at, row.round, row.case, row.moment, row.cycle
                self.evidence.add(Sample(test, row.unit or (rank,), rate, *place))

    def _take_order(self, row: Scope | Silent | Screened | End) -> None:
        if isinstance(row, Scope):
            self.scope = row
        elif isinstance(row, Silent):
            if row.rank < self.ranks:
                self.silent.setdefault(row.rank, row.stage)
        elif isinstance(row, Screened):
            self.evidence.screened = row.at
            self.evidence.cases = [case for case in row.cases if case.test in TESTS]
        else:
            self.ended = row.at


def read_samples(logs: Mapping[int, Callable[[], BinaryIO]], ranks: int, evidence: Evidence) -> Samples:
    """The samples in the logs of these ranks."""
    found = Samples(evidence, ranks)
    for rank in sorted(rank for rank in logs if rank < ranks):
        for line, row in _rows(logs[rank]):
            found.take(rank, line, row)
    return found


def _rows(open_log: Callable[[], BinaryIO]) -> Iterator[tuple[int, Row]]:
    number = 0
    with open_log() as log:
        while line := log.readline(MAX_LINE_BYTES):
            number += 1
            if line.startswith(_BEGIN):
                try:
                    yield number, _DECODER.decode(line[len(PREFIX) :])
                except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                    continue
