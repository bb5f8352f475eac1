"""The content of a figure, independent of its rendering: series with spread, axes, reference lines and categories.

All figures of mlbench are a `Figure`, rendered by `svg` on pages, by `png` in files, and by `Figure.rows` as a table.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from mlbench_cli.results.figures.look import look_of
from mlbench_cli.util.text import list_some

MAX_SERIES = 7  # in one plot; a figure with more becomes small multiples


class Kind(StrEnum):
    """How a figure is drawn. All but the first two have categories as x-axis, one horizontal row for each."""

    LINES = "lines"
    STEPS = "steps"  # lines without marks
    BARS = "bars"  # lines are stacked to bars
    SPANS = "spans"  # each point is a bar from low to high


class Scale(StrEnum):
    """The scale of an axis."""

    LINEAR = "linear"
    LOG2 = "log2"
    LOG10 = "log10"
    CATEGORIES = "categories"  # x is the index of a category

    @property
    def is_log(self) -> bool:
        """Whether the scale is logarithmic."""
        return self in (Scale.LOG2, Scale.LOG10)


class Spread(StrEnum):
    """The meaning of a line's `low` and `high`."""

    INTERVAL = "interval"  # of 95 %, a capped bar at each point
    BAND = "band"  # the area between low and high


@dataclass(frozen=True)
class Axis:
    """`unit` is one of results/analysis/numbers.py, for ticks, tables and tips; empty: plain numbers. `ticks` are the
    places of labels, for numbers of workers; empty: chosen by the renderer."""

    label: str
    scale: Scale = Scale.LINEAR
    ticks: tuple[float, ...] = ()
    categories: tuple[str, ...] = ()
    from_zero: bool = False
    unit: str = ""


@dataclass(frozen=True)
class Line:
    """A named series. `low` and `high` have the length of `ys` or are empty. None: no value.

    reference   not measured here: goals, ideals, published figures
    few         True for points with fewer than three runs, which have no interval; drawn with hollow marks
    notes       text beside points, such as "contended"
    color       a color of `look`; empty: chosen by the renderer
    shape       index of the mark
    group       lines of a group are drawn as one part of a bar
    is_joined   False: marks only
    is_named    False: belongs to the line before it, without marks and legend entry
    panel       title of its small multiple if the figure has too many series; empty: split by order
    short       name in a small multiple; empty: the label
    """

    label: str
    xs: tuple[float, ...]
    ys: tuple[float | None, ...]
    low: tuple[float | None, ...] = ()
    high: tuple[float | None, ...] = ()
    reference: bool = False
    few: tuple[bool, ...] = ()
    notes: tuple[str, ...] = ()
    color: str = ""
    shape: int = 0
    group: str = ""
    spread: Spread = Spread.INTERVAL
    is_joined: bool = True
    is_named: bool = True
    panel: str = ""
    short: str = ""

    def __post_init__(self) -> None:
        columns = (self.low, self.high, self.few, self.notes)
        if len(self.xs) != len(self.ys) or any(len(column) not in (0, len(self.ys)) for column in columns):
            raise ValueError(f"the line {self.label!r} has columns of different lengths")

    @classmethod
    def of_spans(
        cls, label: str, color: str, spans: Sequence[tuple[int, float, float]], notes: tuple[str, ...] = ()
    ) -> "Line":
        """The bars of a figure of the kind SPANS: (lane, begin, end) of each."""
        lanes, begins, ends = zip(*spans, strict=True) if spans else ((), (), ())
        lengths = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
        return cls(label, tuple(map(float, lanes)), lengths, tuple(begins), tuple(ends), notes=notes, color=color)

    def points(self) -> Iterator[tuple[float, float, float | None, float | None, bool, str]]:
        """(x, y, low, high, few, note) of every point with a value."""
        for index, (x, y) in enumerate(zip(self.xs, self.ys, strict=True)):
            if y is not None:
                ends = (self.low[index], self.high[index]) if self.low and self.high else (None, None)
                few, note = bool(self.few and self.few[index]), self.notes[index] if self.notes else ""
                yield x, y, *ends, few, note


@dataclass(frozen=True)
class Figure:
    """`key` is used in file names and links. `panel` is the title of a small multiple."""

    key: str
    title: str
    x: Axis
    y: Axis
    lines: tuple[Line, ...]
    caption: str = ""
    kind: Kind = Kind.LINES
    notes: tuple[str, ...] = ()
    panel: str = ""

    @property
    def alt(self) -> str:
        """A sentence that describes the figure for people who cannot see it."""
        names = list_some([line.label for line in self.lines], 8)
        title = f"{self.title}, {self.panel}" if self.panel else self.title
        return f"{title}: {self.y.label} over {self.x.label}, for {names}."

    @property
    def parts(self) -> tuple[Line, ...]:
        """The drawn lines: the sums of groups, in the order of the groups."""
        groups: dict[str, list[Line]] = {}
        for line in self.lines:
            groups.setdefault(line.group or line.label, []).append(line)
        return tuple(own[0] if len(own) == 1 and not own[0].group else _add(name, own) for name, own in groups.items())

    @property
    def needs_legend(self) -> bool:
        """Whether there are several series without other labels: a single one has the title, bars their rows."""
        labels = [line.label for line in self.parts]
        names_rows = self.kind is Kind.BARS and labels == list(self.x.categories)
        return self.kind is Kind.SPANS or (len(labels) > 1 and not names_rows)

    def name_x(self, x: float) -> str:
        """A position on the x-axis as text: the category or the number."""
        return self.x.categories[int(x)] if self.x.scale is Scale.CATEGORIES else f"{x:.9g}"

    def rows(self) -> Iterator[tuple[str, str, float | None, float | None, float | None]]:
        """(line, x, y, low, high) of every point; x is text."""
        for line in self.lines:
            for index, (x, y) in enumerate(zip(line.xs, line.ys, strict=True)):
                low = line.low[index] if line.low else None
                high = line.high[index] if line.high else None
                yield line.label, self.name_x(x), y, low, high


@dataclass(frozen=True)
class Sheet:
    """Figures side by side in one file `name`.png and .svg. `marks` are warnings beside the title, such as "SYNTHETIC
    DATA". A sheet without figures shows its `message`."""

    name: str
    title: str
    figures: tuple[Figure, ...]
    subtitle: str = ""
    footnote: str = ""
    marks: tuple[str, ...] = ()
    message: str = ""


class Panels(NamedTuple):
    """A figure's small multiples, which share its axes, and the lines of their legend; empty: each has its own."""

    figures: tuple[Figure, ...]
    legend: tuple[Line, ...]


def split_panels(figure: Figure) -> Panels:
    """The figure as small multiples of at most MAX_SERIES series, by the lines' `panel` and then by their order.

    A figure with fewer series, or whose lines are parts of bars, is its only panel. Series keep their colors and marks;
    goals and ideals are in every panel.
    """
    owners = _owners(figure)
    if figure.kind in (Kind.BARS, Kind.SPANS) or len(set(owners) - {""}) <= MAX_SERIES:
        return Panels((figure,), ())
    looks = {line.label: look_of(index) for index, line in reversed([*enumerate(figure.lines)])}
    panels: dict[str, dict[str, None]] = {}
    for line, owner in zip(figure.lines, owners, strict=True):
        if owner == line.label:
            panels.setdefault(line.panel, {})[owner] = None
    found = []
    for panel, members in panels.items():
        for title, labels in _split_evenly(panel, [*members]):
            lines = [
                replace(
                    line,
                    label=line.short or line.label,
                    color=line.color or (looks[owner][0] if owner else ""),
                    shape=line.shape if line.color or not owner else looks[owner][1],
                )
                for line, owner in zip(figure.lines, owners, strict=True)
                if owner in labels or not owner
            ]
            found.append(replace(figure, lines=tuple(lines), panel=title))
    everyone = [line for panel in found for line in panel.parts if line.is_named]
    named = {line.label: line for line in everyone}
    if any((line.color, line.shape) != (named[line.label].color, named[line.label].shape) for line in everyone):
        return Panels(tuple(found), ())  # one name, several looks: each panel explains its own
    own = sum(not line.reference or bool(line.color) for line in named.values())
    return Panels(tuple(found), tuple(named.values()) if own <= MAX_SERIES else ())


def choose_divider(names: Sequence[str], settings: Sequence[Mapping[str, str]]) -> str:
    """The setting whose values divide series into the fewest panels of at most MAX_SERIES; empty if each would leave
    less than two series for a panel.

    It is the method only if nothing else divides them, so that methods keep their colors in all panels.
    """
    counts = {name: Counter(each.get(name, "") for each in settings) for name in names}
    panels = {name: sum(-(-count // MAX_SERIES) for count in found.values()) for name, found in counts.items()}
    fit = [name for name in names if len(counts[name]) > 1 and 2 * panels[name] <= len(settings)]
    return min(fit, key=lambda name: (name == "method", panels[name]), default="")


def _owners(figure: Figure) -> list[str]:
    """The label of the series to which each line belongs; empty for a goal or ideal, which belongs to all."""
    owners: list[str] = []
    last = ""
    for line in figure.lines:
        if line.is_named:
            last = "" if line.reference and not line.color else line.label
            owners.append(last)
        else:
            owners.append(line.label if line.label in owners else last)
    return owners


def _split_evenly(panel: str, labels: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Parts of at most MAX_SERIES labels with their titles, such as "4 workers, 1–6 of 18"."""
    parts = -(-len(labels) // MAX_SERIES)
    for part in range(parts):
        begin, end = (len(labels) * each // parts for each in (part, part + 1))
        place = f"{begin + 1}–{end} of {len(labels)}" if parts > 1 else ""
        yield ", ".join(filter(None, (panel, place))), labels[begin:end]


def _add(name: str, lines: Sequence[Line]) -> Line:
    """The sum of lines with the same x values."""
    sums: dict[float, float] = {}
    for line in lines:
        for x, y in zip(line.xs, line.ys, strict=True):
            sums[x] = sums.get(x, 0.0) + (y or 0.0)
    first = lines[0]
    notes = first.notes if tuple(sums) == first.xs else ()
    return Line(name, tuple(sums), tuple(sums.values()), notes=notes, color=first.color, shape=first.shape)


def thin(xs: Sequence[float], ys: Sequence[float | None], limit: int = 600) -> tuple[list[float], list[float | None]]:
    """About `limit` points at most, including the ends and the minimum and maximum of each group."""
    if len(xs) <= limit:
        return list(xs), list(ys)
    size = -(-len(xs) // (limit // 2))
    kept: list[int] = []
    for start in range(0, len(xs), size):
        group = [index for index in range(start, min(start + size, len(xs))) if ys[index] is not None]
        if group:
            ends = {min(group, key=lambda index: ys[index] or 0.0), max(group, key=lambda index: ys[index] or 0.0)}
            kept += sorted(ends)
    kept = sorted({0, *kept, len(xs) - 1})
    return [xs[index] for index in kept], [ys[index] for index in kept]
