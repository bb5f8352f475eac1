"""The content of a report, independent of its rendering: verdict, key numbers and sections."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from mlbench_cli.results.figures.chart import Chart
from mlbench_cli.results.figures.svg import Spent


class Tone(StrEnum):
    """The meaning of a badge or note, shown as its color."""

    PLAIN = ""
    GOOD = "good"
    WARN = "warn"
    BAD = "bad"


@dataclass(frozen=True)
class Badge:
    """A short statement about the whole page: "18 archives verified", "2 of 18 contended"."""

    text: str
    tone: Tone = Tone.PLAIN


@dataclass(frozen=True)
class Note:
    """A finding: the sentence `lead`, more `text`, and the `command` that helps."""

    lead: str
    text: str = ""
    command: str = ""
    tone: Tone = Tone.PLAIN


class RowPlot(NamedTuple):
    """The plot of a row: the parts of its bar, its interval and where it should end, from 0 to 1."""

    spent: tuple[Spent, ...]
    low: float | None
    high: float | None
    ideal: float | None


@dataclass(frozen=True)
class ReportTable:
    """A table of strings. `numeric` columns are right-aligned.

    `plots` stand behind the first cell of each row, and `key` names the colors of their parts; `tones` color the cells
    of the last column.
    """

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: tuple[int, ...] = ()
    plots: tuple[RowPlot, ...] = ()
    key: tuple[tuple[str, str], ...] = ()
    tones: tuple[Tone, ...] = ()


@dataclass(frozen=True)
class Section:
    """A part of the report below one heading: paragraphs, tables, figures and notes, in this order.

    `summary` is the one-line summary of a folded section. `commands` are command lines to copy.
    """

    heading: str
    paragraphs: tuple[str, ...] = ()
    tables: tuple[ReportTable, ...] = ()
    figures: tuple[Chart, ...] = ()
    is_folded: bool = False  # on screen only; open in print
    notes: tuple[Note, ...] = ()
    summary: str = ""
    commands: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to show."""
        return not (self.paragraphs or self.tables or self.figures or self.notes or self.commands)


@dataclass(frozen=True)
class Report:
    """`title` and `headline` state the result in two sentences; `warnings` limit what its figures show.
    `context` names experiment, task, place and date."""

    title: str
    headline: tuple[str, ...]
    warnings: tuple[str, ...]
    sections: tuple[Section, ...]
    runs: tuple[str, ...] = ()
    context: str = ""
    badges: tuple[Badge, ...] = ()
    csv: str = ""  # the numbers of all rows

    @property
    def figures(self) -> tuple[Chart, ...]:
        """The figures of all sections, in order."""
        return tuple(figure for section in self.sections for figure in section.figures)
