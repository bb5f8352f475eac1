"""What a report says, independent of how it is rendered: sections with tables and figures."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mlbench_cli.results.figures.model import Figure


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
    is_folded: bool = False  # on the screen, never in print


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
