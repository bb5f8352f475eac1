"""What a report says, independent of how it is rendered: sections with tables and figures."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from mlbench_cli.model import JsonObject


class Kind(StrEnum):
    """How a figure is drawn."""

    LINES = "lines"
    STEPS = "steps"  # lines without marks
    STACK = "stack"  # bars on top of each other, one bar per category of the x-axis


class Scale(StrEnum):
    """The scale of an axis."""

    LINEAR = "linear"
    LOG2 = "log2"
    LOG10 = "log10"
    CATEGORIES = "categories"  # x is the index of a category


@dataclass(frozen=True)
class Axis:
    """`ticks` are the places of labels, for numbers of workers; empty: chosen by the renderer. `categories` name the
    integers from 0 of a scale of categories."""

    label: str
    scale: Scale = Scale.LINEAR
    ticks: tuple[float, ...] = ()
    categories: tuple[str, ...] = ()
    from_zero: bool = False


@dataclass(frozen=True)
class Line:
    """A named series. `low` and `high` are the ends of 95 % intervals, as long as `ys`, or empty. None: no value.

    `reference` is for lines that nobody measured here: goals, ideals, published figures. `is_blank` is for the lowest
    part of stacked bars that do not begin at 0: it takes its place and is not drawn.
    """

    label: str
    xs: tuple[float, ...]
    ys: tuple[float | None, ...]
    low: tuple[float | None, ...] = ()
    high: tuple[float | None, ...] = ()
    reference: bool = False
    is_blank: bool = False

    def __post_init__(self) -> None:
        if len(self.xs) != len(self.ys) or any(len(ends) not in (0, len(self.ys)) for ends in (self.low, self.high)):
            raise ValueError(f"the line {self.label!r} has columns of different lengths")


@dataclass(frozen=True)
class Figure:
    """`key` is its name in file names and links; `alt` says in a sentence what it shows."""

    key: str
    title: str
    x: Axis
    y: Axis
    lines: tuple[Line, ...]
    caption: str = ""
    kind: Kind = Kind.LINES
    notes: tuple[str, ...] = ()

    @property
    def alt(self) -> str:
        """A sentence that says what the figure shows, for readers that do not see it."""
        names = ", ".join(line.label for line in self.lines[:8])
        more = f" and {len(self.lines) - 8} more" if len(self.lines) > 8 else ""
        return f"{self.title}: {self.y.label} over {self.x.label}, for {names}{more}."

    def rows(self) -> Iterator[tuple[str, str, float | None, float | None, float | None]]:
        """(line, x, y, low, high) of every point; x is the category's name on such a scale."""
        for line in self.lines:
            for index, (x, y) in enumerate(zip(line.xs, line.ys, strict=True)):
                name = self.x.categories[int(x)] if self.x.scale is Scale.CATEGORIES else f"{x:.9g}"
                low = line.low[index] if line.low else None
                high = line.high[index] if line.high else None
                yield line.label, name, y, low, high

    def to_dict(self) -> JsonObject:
        """What the page's script draws."""
        return {
            "key": self.key,
            "kind": str(self.kind),
            "title": self.title,
            "x": _axis(self.x),
            "y": _axis(self.y),
            "lines": [
                {
                    "label": line.label,
                    "xs": list(line.xs),
                    "ys": list(line.ys),
                    "low": list(line.low),
                    "high": list(line.high),
                    "reference": line.reference,
                    "blank": line.is_blank,
                }
                for line in self.lines
            ],
        }


@dataclass(frozen=True)
class ReportTable:
    """Cells are texts. `numeric` are the columns that are set flush right."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: tuple[int, ...] = ()


@dataclass(frozen=True)
class Section:
    """A part of the report below one heading: paragraphs, tables and figures, in this order."""

    heading: str
    paragraphs: tuple[str, ...] = ()
    tables: tuple[ReportTable, ...] = ()
    figures: tuple[Figure, ...] = ()
    is_open: bool = True  # closed sections are folded on the screen, never in print


@dataclass(frozen=True)
class Report:
    """`headline` is the result in a sentence; `warnings` say what its figures must not be taken for."""

    title: str
    headline: tuple[str, ...]
    warnings: tuple[str, ...]
    sections: tuple[Section, ...]
    runs: tuple[str, ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict)

    @property
    def figures(self) -> tuple[Figure, ...]:
        """The figures of all sections, in order."""
        return tuple(figure for section in self.sections for figure in section.figures)


def thin(xs: Sequence[float], ys: Sequence[float | None], limit: int = 600) -> tuple[list[float], list[float | None]]:
    """At most about `limit` points that keep the ends and the extremes: of each group its least and greatest."""
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


def _axis(axis: Axis) -> JsonObject:
    return {
        "label": axis.label,
        "scale": str(axis.scale),
        "ticks": list(axis.ticks),
        "categories": list(axis.categories),
        "fromZero": axis.from_zero,
    }
