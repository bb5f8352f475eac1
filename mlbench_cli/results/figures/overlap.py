"""Overlap of computation and communication: the spans of a few updates of the training thread and of the communication
thread, from the timeline in a result's details (task_images/harness/timeline.py).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mlbench_cli.results.analysis.numbers import SECONDS, format_value
from mlbench_cli.results.archive.reader import Archive
from mlbench_cli.results.figures.look import PHASES
from mlbench_cli.results.figures.model import Axis, Figure, Kind, Line, Scale, Sheet
from mlbench_cli.util.text import shorten

MAX_PANELS = 6
MAX_MOMENT = 1e6  # seconds; longer than two updates take
LANES = ("training", "messages", "waiting behind other messages")

Span = tuple[float, float]


@dataclass(frozen=True)
class Overlap:
    """The timeline of one run. Seconds since the start of the first update.

    training   (category, begin, end); messages: (ready, begin, end)
    exposed    seconds in which the training waited for messages
    hidden     seconds in which messages were sent during computation
    queue      spans in which a message was ready but queued behind others
    """

    title: str
    training: tuple[tuple[str, float, float], ...]
    messages: tuple[tuple[float, float, float], ...]

    @property
    def exposed(self) -> float:
        return measure_common(self._busy, self._waiting)

    @property
    def hidden(self) -> float:
        return sum(end - begin for begin, end in self._busy) - self.exposed

    @property
    def queue(self) -> list[Span]:
        return merge_spans((ready, begin) for ready, begin, _ in self.messages if begin > ready)

    @property
    def _busy(self) -> list[Span]:
        return merge_spans((begin, end) for _, begin, end in self.messages)

    @property
    def _waiting(self) -> list[Span]:
        return merge_spans((begin, end) for category, begin, end in self.training if category == "communication")


def merge_spans(spans: Iterator[Span] | Sequence[Span]) -> list[Span]:
    """The union of the spans as ascending, disjoint spans."""
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return merged


def measure_common(first: Sequence[Span], second: Sequence[Span]) -> float:
    """Seconds in the intersection of two lists of disjoint spans."""
    return sum(max(0.0, min(one[1], other[1]) - max(one[0], other[0])) for one in first for other in second)


def read_overlap(archive: Archive) -> Overlap | None:
    """The timeline of a run; None if its result has no readable one."""
    result = archive.result
    timeline = (result.get("details") or {}).get("timeline")
    if not isinstance(timeline, Mapping):
        return None
    method = str((archive.run["spec"].get("method") or {}).get("name", "the task's own method"))
    try:
        training = tuple((str(name), float(begin), float(end)) for name, begin, end in timeline["training"])
        messages = tuple((float(span[2]), float(span[3]), float(span[4])) for span in timeline["communication"])
    except (KeyError, IndexError, TypeError, ValueError):
        return None
    moments = [moment for span in (*training, *messages) for moment in span[-2:]]
    if not messages or not training or not all(0 <= moment < MAX_MOMENT for moment in moments):
        return None
    return Overlap(f"{result['run']}: {method}", training, messages)


def draw_sheet(overlaps: Sequence[Overlap]) -> Sheet:
    """A sheet with a panel for each of the first MAX_PANELS runs."""
    figures = tuple(_figure(index, overlap) for index, overlap in enumerate(overlaps[:MAX_PANELS]))
    return Sheet("overlap", "Communication and training, rank 0", figures)


def _figure(index: int, overlap: Overlap) -> Figure:
    queued = sum(end - begin for begin, end in overlap.queue)
    found = {"hidden": overlap.hidden, "exposed": overlap.exposed, "queue": queued}
    words = ", ".join(f"{name} {format_value(seconds, SECONDS)}" for name, seconds in found.items())
    lines = []
    for phase, color, names in PHASES:
        own = [(begin, end) for name, begin, end in overlap.training if name in names]
        lines.append(Line.of_spans(phase, color, [(0, *span) for span in own]))
    messages = [(1, begin, end) for _, begin, end in overlap.messages]
    lines.append(Line.of_spans("message in flight", "step", messages))
    lines.append(Line.of_spans("message behind others", "servers", [(2, *span) for span in overlap.queue]))
    axis = Axis("lane", Scale.CATEGORIES, categories=LANES)
    title = f"{shorten(overlap.title, 80)}  ({words})"
    seconds = Axis("seconds", from_zero=True, unit=SECONDS)
    return Figure(f"overlap{index}", title, axis, seconds, tuple(line for line in lines if line.xs), kind=Kind.SPANS)
