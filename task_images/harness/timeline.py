"""Two lanes of a few updates: what the training thread did, and what the communication thread did beside it.

The tracker's categories say how much time went where, in sum. The timeline has the single spans of some early updates,
so that one can look at what communication the backward pass hides. It costs one comparison per border otherwise.
"""

from typing import NamedTuple, TypedDict

FIRST_UPDATE, LAST_UPDATE = 6, 7  # of this process, from 1: plans that are measured hold from the fourth on
MAX_SPANS = 2000  # of each lane


class MessageSpan(NamedTuple):
    """One message: its number in the plan, bytes of gradients, and three moments: its gradients are all there; the
    communication thread begins with it; it is summed."""

    number: int
    size: int
    ready: float
    begin: float
    end: float


class TimelineDocument(TypedDict):
    """`Timeline` in a result's details. Seconds from the beginning of the first update of `updates` (first, last).

    training        [category, begin, end]
    communication   [number of the message, bytes, ready, begin, end]
    """

    updates: list[int]
    training: list[list[str | float]]
    communication: list[list[float]]


class Timeline:
    """The spans of the updates from FIRST_UPDATE to LAST_UPDATE, in seconds of the tracker's clock.

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
        """An update begins: start or end the recording if it is time."""
        self._updates += 1
        if self._updates == FIRST_UPDATE:
            self._started, self.is_recording = now, True
        elif self._updates == LAST_UPDATE + 1:
            self._stopped, self.is_recording = now, False

    def add_section(self, category: str, begin: float, end: float) -> None:
        """The training thread was in `category`; sections that follow each other in the same one are one."""
        if self._sections and self._sections[-1][0] == category and self._sections[-1][2] == begin:
            self._sections[-1] = category, self._sections[-1][1], end
        elif end > begin and len(self._sections) < MAX_SPANS:
            self._sections.append((category, begin, end))

    def add_message(self, span: MessageSpan) -> None:
        """A message is summed; it counts if its gradients were there within the recording."""
        is_within = self._started is not None and self._started <= span.ready < self._stopped
        if is_within and len(self._messages) < MAX_SPANS:
            self._messages.append(span)

    def to_dict(self) -> TimelineDocument | None:
        """What was recorded; None if no message was."""
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
