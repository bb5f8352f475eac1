"""When each resource was asked for, what it waited for, and when it was ready or gone: provisioning time is a result.

A line of the record, times in seconds since the work on the cluster began (work that was stopped and taken up again
goes on where its last time was; what lies between is nobody's waiting):

    {"kind", "name", "adopted", "began", "accepted", "ready", "waits": [{"reason", "seconds"}]}     making
    {"kind", "name", "began", "gone", "waits": [...]}                                               removing

A time that has not come is null.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from providers.base import Resource

MAX_WAITS = 20  # of one resource; later ones are added to the last
Entry = dict[str, Any]


class ResourceTimeline:
    """The times of one resource."""

    def __init__(self, resource: Resource, removing: bool, clock: "Timeline", earlier: Entry | None = None) -> None:
        begin: Entry = {"kind": resource.kind, "name": resource.name}
        begin |= {"began": None, "gone": None} if removing else {"adopted": False, "began": None, "accepted": None}
        begin |= {"waits": []} if removing else {"ready": None, "waits": []}
        self.entry: Entry = {**begin, **(earlier or {})}
        self._clock = clock
        self._taken_up = earlier is not None
        self._waiting: tuple[str, float] | None = None  # for what, and since when

    def record_time(self, what: str) -> None:
        """Note that this is the moment of `what`, unless it is known from before."""
        if self.entry.get(what) is None:
            self.entry[what] = self._clock.now()

    def mark_adopted(self) -> None:
        """Note that it was there: somebody else's making, unless an earlier pass has begun with it."""
        self.entry["adopted"] = self.entry["adopted"] or not self._taken_up
        self.record_time("accepted")

    def reset(self) -> None:
        """Note that it has to be made again."""
        self.entry |= {"accepted": None, "ready": None}

    def start_wait(self, reason: str) -> bool:
        """Note what is waited for from now on; whether that is something new."""
        if self._waiting is not None and self._waiting[0] == reason:
            return False
        self.end_wait()
        self._waiting = (reason, self._clock.now())
        return True

    def end_wait(self) -> None:
        self.entry["waits"] = self._waits()
        self._waiting = None

    def to_dict(self) -> Entry:
        return {**self.entry, "waits": self._waits()}

    def _waits(self) -> list[Entry]:
        waits: list[Entry] = [dict(item) for item in self.entry["waits"]]
        if self._waiting is None:
            return waits
        reason, since = self._waiting
        seconds = round(self._clock.now() - since, 3)
        if waits and (waits[-1]["reason"] == reason or len(waits) >= MAX_WAITS):
            waits[-1]["seconds"] = round(waits[-1]["seconds"] + seconds, 3)
            return waits
        return [*waits, {"reason": reason, "seconds": seconds}]


class Timeline:
    """The lines of one pass over a cluster's resources, going on from what an earlier pass has noted."""

    def __init__(self, resources: Sequence[Resource], earlier: Iterable[Entry] = (), *, removing: bool = False) -> None:
        self._known = {(entry["kind"], entry["name"]): entry for entry in earlier}
        self._since = max((_last(entry) for entry in self._known.values()), default=0.0)
        self._start = time.monotonic()
        self._lines = {
            id(item): ResourceTimeline(item, removing, self, self._known.get((item.kind, item.name)))
            for item in resources
        }

    def now(self) -> float:
        """Seconds since the work on the cluster began."""
        return round(self._since + time.monotonic() - self._start, 3)

    def of(self, resource: Resource) -> ResourceTimeline:
        return self._lines[id(resource)]

    def to_list(self) -> list[Entry]:
        """The lines of all on which work has begun; first those of resources that this pass does not know."""
        lines = [line.to_dict() for line in self._lines.values()]
        here = {(entry["kind"], entry["name"]) for entry in lines}
        others = [entry for key, entry in self._known.items() if key not in here]
        return others + [entry for entry in lines if entry["began"] is not None]


def _last(entry: Mapping[str, Any]) -> float:
    moments = [float(entry.get(key) or 0.0) for key in ("began", "accepted", "ready", "gone")]
    return max(*moments, moments[0] + sum(float(item["seconds"]) for item in entry.get("waits", [])))
