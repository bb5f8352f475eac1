"""Provisioning times: when each resource was requested, what it waited for, and when it was ready or gone.

One entry of the record; times are seconds since the operation on the cluster began. A stopped operation that is
continued resumes at its last recorded time; the pause between is not counted.

    {"kind", "name", "adopted", "began", "accepted", "ready", "waits": [{"reason", "seconds"}]}     creation
    {"kind", "name", "began", "gone", "waits": [...]}                                               deletion

A time is null until it is known.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mlbench_cli.model.cluster_details import TimesRecord
from providers.base import Resource

MAX_WAITS = 20  # of one resource; later waits are added to the last one
# `mlbench_cli.model.cluster_details.TimesRecord`, as it is built up.
Entry = dict[str, Any]


class ResourceTimeline:
    """The times of one resource."""

    def __init__(self, resource: Resource, removing: bool, clock: "Timeline", earlier: Entry | None = None) -> None:
        begin: Entry = {"kind": resource.kind, "name": resource.name}
        begin |= {"began": None, "gone": None} if removing else {"adopted": False, "began": None, "accepted": None}
        begin |= {"waits": []} if removing else {"ready": None, "waits": []}
        self.entry: Entry = {**begin, **(earlier or {})}
        self._clock = clock
        self._continued = earlier is not None
        self._waiting: tuple[str, float] | None = None  # reason, and start time

    def record_time(self, what: str) -> None:
        """Record the present as the time of `what`, unless an earlier operation has recorded it."""
        if self.entry.get(what) is None:
            self.entry[what] = self._clock.now()

    def mark_adopted(self) -> None:
        """Mark as adopted: it existed before this operation, unless an earlier one of ours had begun with it."""
        self.entry["adopted"] = self.entry["adopted"] or not self._continued
        self.record_time("accepted")

    def reset(self) -> None:
        """Forget its times, because it has to be created again."""
        self.entry |= {"accepted": None, "ready": None}

    def start_wait(self, reason: str) -> bool:
        """Record what the resource waits for from now on. Returns whether the reason is new."""
        if self._waiting is not None and self._waiting[0] == reason:
            return False
        self.end_wait()
        self._waiting = (reason, self._clock.now())
        return True

    def end_wait(self) -> None:
        """End the current wait, with its seconds, if there is one."""
        self.entry["waits"] = self._waits()
        self._waiting = None

    def to_dict(self) -> Entry:
        """The entry of provisioning.json, with a wait that has not ended."""
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
    """The times of all resources in one operation, continuing those that an earlier operation recorded."""

    def __init__(
        self, resources: Sequence[Resource], earlier: Iterable[TimesRecord] = (), *, removing: bool = False
    ) -> None:
        self._known: dict[tuple[str, str], Entry] = {(item["kind"], item["name"]): {**item} for item in earlier}
        self._since = max((_last(entry) for entry in self._known.values()), default=0.0)
        self._start = time.monotonic()
        self._lines = {
            id(item): ResourceTimeline(item, removing, self, self._known.get((item.kind, item.name)))
            for item in resources
        }

    def now(self) -> float:
        """Seconds since the operation on the cluster began."""
        return round(self._since + time.monotonic() - self._start, 3)

    def of(self, resource: Resource) -> ResourceTimeline:
        """The times of a resource of this operation."""
        return self._lines[id(resource)]

    def to_list(self) -> list[Entry]:
        """The entries of all resources with a start time; first those that only an earlier operation knows."""
        lines = [line.to_dict() for line in self._lines.values()]
        here = {(entry["kind"], entry["name"]) for entry in lines}
        others = [entry for key, entry in self._known.items() if key not in here]
        return others + [entry for entry in lines if entry["began"] is not None]


def _last(entry: Mapping[str, Any]) -> float:
    moments = [float(entry.get(key) or 0.0) for key in ("began", "accepted", "ready", "gone")]
    return max(*moments, moments[0] + sum(float(item["seconds"]) for item in entry.get("waits", [])))
