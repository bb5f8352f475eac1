"""Measurement sessions: runs of one machine, since one boot, at most an hour apart.

Runs of one session share the state of their machine (clock speed, temperature, neighbors, caches), so they are not
independent of each other. Sessions are. The sessions of two sides decide how they can be compared:

    paired    sessions that both sides were measured in, two at least: one difference of means for each
    within    one session that both sides were measured in: its effect is the same for both and cancels
    between   several sessions on each side, none of them common: one mean for each session
    unknown   a side has a single session, and the other side is not in it: a change cannot be told from a session
"""

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from statistics import fmean
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from mlbench_cli.results.analysis.stats import MIN_HISTORY, MIN_RUNS, Ratio, paired_ratio, relate_means
from mlbench_cli.results.archive.files import Archive
from mlbench_cli.util.text import counted
from mlbench_cli.util.times import parse_timestamp

GAP_SECONDS = 3600.0  # without a run, after which a new session begins


class Moment(NamedTuple):
    """Where and when a run was measured. `place`: machine and boot of a local run; of other engines the cluster, whose
    machines may differ from run to run."""

    run: str  # its id
    place: str
    begin: float
    end: float


def moment_of(archive: Archive) -> Moment:
    """Where and when an archive's run was measured."""
    provenance, spec = archive.run.get("provenance"), archive.run["spec"]
    session = provenance.get("session") if isinstance(provenance, dict) else None
    is_known = session and spec.get("engine") == "local"
    place = str(session) if is_known else f"{spec.get('engine')} {spec.get('cluster')}"
    # A run may wait in a queue for hours after it was recorded.
    begin = parse_timestamp(archive.result.get("started") or archive.run["created"])
    return Moment(str(archive.run["id"]), place, begin, begin + float(archive.result["wall_seconds"] or 0.0))


class Basis(StrEnum):
    """How two sides can be compared, by their sessions."""

    PAIRED = "paired"
    WITHIN = "within"
    BETWEEN = "between"
    UNKNOWN = "unknown"


class Sessions(Struct, frozen=True):
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
        """How the two sides can be compared."""
        if len(self.shared) > 1:
            return Basis.PAIRED
        if self.shared:
            return Basis.WITHIN
        return Basis.BETWEEN if min(len(set(self.a)), len(set(self.b))) > 1 else Basis.UNKNOWN

    @property
    def warning(self) -> str | None:
        """How a drift of the machine may have biased the comparison, and how to avoid it."""
        if not self.in_blocks:
            return None
        return (
            "All runs of one side came before those of the other, so a drift of the machine would look "
            "like a difference. Run both alternately: mlbench run --matrix, or mlbench run -f FILE."
        )

    @property
    def note(self) -> str:
        """What the interval says of sessions, in a phrase."""
        counts = [len(set(side)) for side in (self.a, self.b)]
        if self.basis is Basis.PAIRED:
            return f"{len(self.shared)} sessions with both sides: one difference for each"
        if self.basis is Basis.WITHIN:
            return "one session, so differences from day to day are not included"
        if self.basis is Basis.BETWEEN:
            return f"{counts[0]} and {counts[1]} sessions: one mean for each"
        if max(counts) >= MIN_HISTORY:
            return f"{counted(max(counts), 'session')} of one side: one mean for each"
        return "measured in different sessions, so a change cannot be distinguished from a difference between sessions"


def find_sessions(a: Sequence[Moment], b: Sequence[Moment]) -> Sessions:
    """The sessions of the runs of two sides."""
    numbers: dict[str, int] = {}
    number, last_place, last_end = 0, "", 0.0
    every = {moment.run: moment for moment in (*a, *b)}
    for moment in sorted(every.values(), key=lambda moment: moment[1:]):
        if moment.place != last_place or moment.begin - last_end > GAP_SECONDS:
            number += 1
            last_end = moment.end
        last_place, last_end = moment.place, max(last_end, moment.end)
        numbers[moment.run] = number
    session_a, session_b = (tuple(numbers[moment.run] for moment in side) for side in (a, b))
    in_blocks = any(
        _is_in_blocks(*([moment.begin for moment in side if numbers[moment.run] == session] for side in (a, b)))
        for session in set(session_a) & set(session_b)
    )
    return Sessions(session_a, session_b, in_blocks)


def _is_in_blocks(a: Sequence[float], b: Sequence[float]) -> bool:
    """Whether repeats began one side after the other. A single run on each side has no other order."""
    return min(len(a), len(b)) > 1 and (max(a) < min(b) or max(b) < min(a))


def relate(
    old: Sequence[float], new: Sequence[float], sessions: Sessions, *, takes_difference: bool = False
) -> Ratio | None:
    """New / old, each with a value for every run of `sessions`: the one place that decides what a repeat is.

    None if a side has no values. Values that are not all above 0 have new - old if `takes_difference`, else None.
    """
    if not old or not new:
        return None
    if min(*old, *new) > 0:
        return _relate([math.log(value) for value in old], [math.log(value) for value in new], sessions)
    if not takes_difference:
        return None
    scale = max(map(abs, (*old, *new))) or 1.0  # so that no square overflows or vanishes
    found = _relate([value / scale for value in old], [value / scale for value in new], sessions)
    error = None if found.error is None else found.error * scale
    return replace(found, shift=found.shift * scale, error=error, base=abs(fmean(old)))


def _relate(old: Sequence[float], new: Sequence[float], sessions: Sessions) -> Ratio:
    before, after = _means(old, sessions.a), _means(new, sessions.b)
    if sessions.basis is Basis.PAIRED:
        return paired_ratio([after[each] - before[each] for each in sessions.shared])
    if sessions.basis is Basis.BETWEEN:
        return relate_means(list(before.values()), list(after.values()))
    if sessions.basis is Basis.WITHIN:
        (session,) = sessions.shared
        inside = [
            [value for value, number in zip(values, numbers, strict=True) if number == session]
            for values, numbers in ((old, sessions.a), (new, sessions.b))
        ]
        earlier = [mean for number, mean in before.items() if number != session]
        if min(map(len, inside)) < MIN_RUNS and len(earlier) >= MIN_HISTORY:
            return relate_means(earlier, list(after.values()))
        return relate_means(*inside)
    if max(len(before), len(after)) >= MIN_HISTORY:
        return relate_means(list(before.values()), list(after.values()))
    return replace(relate_means(old, new), is_confounded=True)


def _means(values: Sequence[float], sessions: Sequence[int]) -> Mapping[int, float]:
    """The mean of each session."""
    found: dict[int, list[float]] = {}
    for value, session in zip(values, sessions, strict=True):
        found.setdefault(session, []).append(value)
    return {session: fmean(each) for session, each in found.items()}
