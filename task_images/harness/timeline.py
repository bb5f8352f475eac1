"""A timeline of a few updates with two lanes: the training thread and the communication thread.

The tracker's categories give total times. The timeline has the single spans of a few early updates, which show how much
communication the backward pass hides. In other updates it costs one comparison per span.
"""

from typing import NamedTuple, TypedDict

FIRST_UPDATE, LAST_UPDATE = 6, 7  # of this process, from 1
MAX_SPANS = 2000  # per lane


class MessageSpan(NamedTuple):
    """One message: its number in the plan, bytes of gradients, and three times: all gradients ready, the communication
    thread starts it, it is summed."""

    number: int
    size: int
    ready: float
    begin: float
    end: float


class TimelineDocument(TypedDict):
    """`Timeline` in a result's details. Seconds since the start of the first update of `updates` (first, last).

    training        [category, begin, end]
    communication   [number of the message, bytes, ready, begin, end]
    """

    updates: list[int]
    training: list[list[str | float]]
    communication: list[list[float]]


class Timeline:
    """Records the spans of the updates from FIRST_UPDATE to LAST_UPDATE, in seconds of the tracker's clock.

    The training thread calls `begin_update` and `add_section`, the communication thread `add_message`.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget everything, and count updates from 0."""
        self.is_recording = False
        self._updates = 0
        self._started: float | None = None
        self._stopped = float("inf")
        self._sections: list[tuple[str, float, float]] = []
        self._messages: list[MessageSpan] = []

    def begin_update(self, now: float) -> None:
        """Call at the start of an update; starts or ends the recording."""
        self._updates += 1
        if self._updates == FIRST_UPDATE:
            self._started, self.is_recording = now, True
        elif self._updates == LAST_UPDATE + 1:
            self._stopped, self.is_recording = now, False

    def add_section(self, category: str, begin: float, end: float) -> None:
        """Record that the training thread was in `category`; consecutive sections of a category are merged."""
        if self._sections and self._sections[-1][0] == category and self._sections[-1][2] == begin:
            self._sections[-1] = category, self._sections[-1][1], end
        elif end > begin and len(self._sections) < MAX_SPANS:
            self._sections.append((category, begin, end))

    def add_message(self, span: MessageSpan) -> None:
        """Record a summed message, if its gradients were ready within the recording."""
        is_within = self._started is not None and self._started <= span.ready < self._stopped
        if is_within and len(self._messages) < MAX_SPANS:
            self._messages.append(span)

    def to_dict(self) -> TimelineDocument | None:
        """The recording; None if it has no message."""
        if self._started is None or not self._messages:
            return None
        zero = self._started
        return {
            "updates": [FIRST_UPDATE, min(self._updates, LAST_UPDATE)],
            "training": [
                [category, round(begin - zero, 6), round(end - zero, 6)] for category, begin, end in self._sections
            ],
            "communication": [
                [span.number, span.size, *(round(moment - zero, 6) for moment in span[2:])] for span in self._messages
            ],
        }
