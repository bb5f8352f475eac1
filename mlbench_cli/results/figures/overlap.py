"""What communication a training hides: the spans of a few updates on two lanes, those of the training thread and those
of the communication thread, from the timeline in a result's details (task_images/harness/timeline.py).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlbench_cli.results.archive.reader import Archive
from mlbench_cli.text import shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_PANELS = 6
MAX_MOMENT = 1e6  # seconds; two updates do not take so long
QUEUED = "#F0E442"  # ready, but behind others
TRAINING_LANE, COMMUNICATION_LANE, QUEUE_LANE = 1.0, 0.0, -0.42

Span = tuple[float, float]


@dataclass(frozen=True)
class Overlap:
    """The timeline of one run. Seconds from the beginning of the first update.

    training   (category, begin, end); messages: (ready, begin, end)
    exposed    seconds in which messages were under way and the training waited for them
    hidden     seconds in which messages were under way and the training went on
    queue      moments at which a message was ready and others were before it, as spans
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
    """The same moments by spans that do not overlap, ascending."""
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return merged


def measure_common(first: Sequence[Span], second: Sequence[Span]) -> float:
    """Seconds that lie in a span of both; neither's own spans overlap."""
    return sum(max(0.0, min(one[1], other[1]) - max(one[0], other[0])) for one in first for other in second)


def read_overlap(archive: Archive) -> Overlap | None:
    """The timeline of a run; None if its result has none, or one that cannot be read."""
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


def draw(overlaps: Sequence[Overlap], folder: Path) -> list[Path]:
    """`folder`/overlap.png and .svg, one panel for each of the first MAX_PANELS; the paths."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    from mlbench_cli.results.figures.style import PHASES, style, write

    shown = overlaps[:MAX_PANELS]
    with style():
        figure = Figure(figsize=(9, 1.1 + 1.5 * len(shown)), layout="constrained")
        figure.suptitle("Communication beside the training, rank 0", x=0.01, ha="left", fontweight="bold")
        longest = max(max(end for _, _, end in (*overlap.training, *overlap.messages)) for overlap in shown)
        panels = figure.subplots(len(shown), 1, squeeze=False)[:, 0]
        for overlap, axes in zip(shown, panels, strict=True):
            _draw_lanes(axes, overlap, PHASES)
            axes.set_xlim(0, 1e3 * longest)
        panels[-1].set_xlabel("milliseconds")
        used = {category for overlap in shown for category, _, _ in overlap.training}
        entries = [(name, color) for name, color in PHASES.items() if name in used]
        handles = [Patch(facecolor=color, label=name.replace("_", " ")) for name, color in entries]
        handles.append(Patch(facecolor=QUEUED, label="message that waits for others"))
        figure.legend(handles=handles, loc="outside lower left", ncols=5)
        return write(figure, folder / "overlap")


def _draw_lanes(axes: "Axes", overlap: Overlap, colors: Mapping[str, Any]) -> None:
    for category, begin, end in overlap.training:
        axes.barh(TRAINING_LANE, 1e3 * (end - begin), 0.72, 1e3 * begin, color=colors.get(category, "#bdbdbd"))
    for begin, end in overlap.queue:
        axes.barh(QUEUE_LANE, 1e3 * (end - begin), 0.14, 1e3 * begin, color=QUEUED)
    for _, begin, end in overlap.messages:
        width = 1e3 * (end - begin)
        axes.barh(
            COMMUNICATION_LANE, width, 0.6, 1e3 * begin, color=colors["communication"], edgecolor="white", linewidth=0.5
        )
    axes.set_yticks([COMMUNICATION_LANE, TRAINING_LANE], ["messages", "training"])
    axes.set_ylim(-0.6, 1.5)
    axes.grid(True, axis="x")
    axes.grid(False, axis="y")
    queued = sum(end - begin for begin, end in overlap.queue)
    found = {"hidden": overlap.hidden, "exposed": overlap.exposed, "queue": queued}
    figures = ", ".join(f"{name} {1e3 * seconds:.3g} ms" for name, seconds in found.items())
    axes.set_title(f"{shorten(overlap.title, 80)}  ({figures})")
