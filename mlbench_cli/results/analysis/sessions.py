"""Measurement sessions: runs of one machine, since one boot, at most an hour apart.

Runs of one session share the state of their machine (clock speed, temperature, neighbors, caches), so they are not
independent of each other. Sessions are. What two sides can be compared by follows from the sessions that they have:

    paired    sessions that both sides were measured in, two at least: one difference of means for each
    within    one session that both sides were measured in: its effect is the same for both and cancels
    between   several sessions on each side, none of them common: one mean for each session
    unknown   a side has a single session, and the other side is not in it: a change cannot be told from a session
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from mlbench_cli.results.archive.reader import Archive
from mlbench_cli.util.times import parse_timestamp

GAP_SECONDS = 3600.0  # without a run, after which a new session begins


class Basis(StrEnum):
    """What two sides can be compared by."""

    PAIRED = "paired"
    WITHIN = "within"
    BETWEEN = "between"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Sessions:
    """The number of the session of each run of two sides. Equal numbers are the same session.

    `in_blocks`: in a session that both sides share, all repeats of one side came before the first of the other.
    """

    a: tuple[int, ...]
    b: tuple[int, ...]
    in_blocks: bool = False

    @property
    def shared(self) -> tuple[int, ...]:
        """The sessions that both sides were measured in."""
        return tuple(sorted(set(self.a) & set(self.b)))

    @property
    def basis(self) -> Basis:
        """What the two sides can be compared by."""
        if len(self.shared) > 1:
            return Basis.PAIRED
        if self.shared:
            return Basis.WITHIN
        return Basis.BETWEEN if min(len(set(self.a)), len(set(self.b))) > 1 else Basis.UNKNOWN

    @property
    def warning(self) -> str | None:
        """What a drift of the machine may have done to the comparison, and how to avoid it."""
        if not self.in_blocks:
            return None
        return (
            "All runs of one side came before those of the other, so a drift of the machine would look "
            "like a difference. Run both alternately: mlbench run --matrix, or mlbench run -f FILE."
        )

    @property
    def note(self) -> str:
        """What the interval says of sessions, in a phrase."""
        if self.basis is Basis.PAIRED:
            return f"{len(self.shared)} sessions with both sides: one difference for each"
        if self.basis is Basis.WITHIN:
            return "one session: the interval has no session spread"
        if self.basis is Basis.BETWEEN:
            return f"{len(set(self.a))} and {len(set(self.b))} sessions: one mean for each"
        return (
            "the sides were measured in different sessions, one side in a single session: a change cannot be "
            "distinguished from a difference between sessions"
        )


def find_sessions(a: Sequence[Archive], b: Sequence[Archive]) -> Sessions:
    """The sessions of the runs of two sides."""
    numbers: dict[str, int] = {}
    number, last_place, last_end = 0, "", 0.0
    every = {str(archive.run["id"]): (_place_of(archive), *_times_of(archive)) for archive in (*a, *b)}
    for run_id, (place, begin, end) in sorted(every.items(), key=lambda item: item[1]):
        if place != last_place or begin - last_end > GAP_SECONDS:
            number += 1
            last_end = end
        last_place, last_end = place, max(last_end, end)
        numbers[run_id] = number
    ids_a, ids_b = ([str(archive.run["id"]) for archive in side] for side in (a, b))
    session_a, session_b = (tuple(numbers[run_id] for run_id in ids) for ids in (ids_a, ids_b))
    starts_a, starts_b = ([every[run_id][1] for run_id in ids] for ids in (ids_a, ids_b))
    in_blocks = any(
        _is_in_blocks(
            [start for start, number in zip(starts_a, session_a, strict=True) if number == session],
            [start for start, number in zip(starts_b, session_b, strict=True) if number == session],
        )
        for session in set(session_a) & set(session_b)
    )
    return Sessions(session_a, session_b, in_blocks)


def _is_in_blocks(a: Sequence[float], b: Sequence[float]) -> bool:
    """Whether repeats began one side after the other. A single run on each side has no other order."""
    return min(len(a), len(b)) > 1 and (max(a) < min(b) or max(b) < min(a))


def mean_by_session(values: Sequence[float], sessions: Sequence[int]) -> dict[int, float]:
    """The mean of the values of each session."""
    found: dict[int, list[float]] = {}
    for value, session in zip(values, sessions, strict=True):
        found.setdefault(session, []).append(value)
    return {session: sum(each) / len(each) for session, each in found.items()}


def _place_of(archive: Archive) -> str:
    """Machine and boot of a local run; of other engines the cluster, whose machines may differ from run to run."""
    provenance = archive.run.get("provenance")
    session = provenance.get("session") if isinstance(provenance, dict) else None
    spec = archive.run["spec"]
    return str(session) if session and spec.get("engine") == "local" else f"{spec.get('engine')} {spec.get('cluster')}"


def _times_of(archive: Archive) -> tuple[float, float]:
    # A run may wait in a queue for hours after it was recorded.
    begin = parse_timestamp(archive.result.get("started") or archive.run["created"])
    return begin, begin + float(archive.result["wall_seconds"] or 0.0)
