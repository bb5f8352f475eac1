"""The content of a report, independent of its rendering: verdict, key numbers and sections."""

from dataclasses import dataclass
from enum import StrEnum

from mlbench_cli.results.figures.look import Look
from mlbench_cli.results.figures.model import Figure


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
class KeyNumber:
    """One of at most four numbers below the title; `notes` are its interval and its subject."""

    name: str
    value: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Note:
    """A finding: the sentence `lead`, more `text`, and the `command` that helps."""

    lead: str
    text: str = ""
    command: str = ""
    tone: Tone = Tone.PLAIN


@dataclass(frozen=True)
class ReportTable:
    """A table of strings. `numeric` columns are right-aligned.

    `looks` are color and mark before the first cell of each row; `shares`, from 0 to 1, are the lengths of bars behind
    the cells of column `bar_column`; `tones` color the cells of the last column.
    """

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: tuple[int, ...] = ()
    looks: tuple[Look, ...] = ()
    shares: tuple[float, ...] = ()
    bar_column: int = -1
    tones: tuple[Tone, ...] = ()


@dataclass(frozen=True)
class Section:
    """A part of the report below one heading: paragraphs, tables, figures and notes, in this order.

    `summary` is the one-line summary of a folded section. `commands` are command lines to copy.
    """

    heading: str
    paragraphs: tuple[str, ...] = ()
    tables: tuple[ReportTable, ...] = ()
    figures: tuple[Figure, ...] = ()
    is_folded: bool = False  # on screen only; open in print
    notes: tuple[Note, ...] = ()
    summary: str = ""
    commands: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """The number of items, for the navigation; 0: not counted."""
        return len(self.notes) or len(self.figures) or sum(len(table.rows) for table in self.tables)

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
    numbers: tuple[KeyNumber, ...] = ()

    @property
    def figures(self) -> tuple[Figure, ...]:
        """The figures of all sections, in order."""
        return tuple(figure for section in self.sections for figure in section.figures)
