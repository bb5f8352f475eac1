"""Steps of the wall clock while something is measured: NTP, suspension, a moved virtual machine. Standard library only.

Durations come from the monotonic clock, which cannot be set. The kernel slews both clocks alike, so on Linux their
difference changes only when somebody steps the wall clock, or when the machine sleeps.
"""

from __future__ import annotations

import time

STEP_SECONDS = 0.02  # a smaller difference is no step
SLEW = 0.0005  # seconds per second by which NTP slews at most; macOS slews only the wall clock
_TRIES = 5
_SHORT_SECONDS = 0.0001  # between two reads that nothing came between


class ClockWatch:
    """Sums up the steps of the wall clock since it was made, as far as `check` is called between them."""

    def __init__(self) -> None:
        self.stepped_seconds = 0.0
        self._moment, self._difference, self._error = read_clocks()

    def check(self) -> float:
        """Look at both clocks; returns the sum of the steps so far, each without its sign."""
        moment, difference, error = read_clocks()
        jump = abs(difference - self._difference)
        if jump > STEP_SECONDS + SLEW * (moment - self._moment) + error + self._error:
            self.stepped_seconds = round(self.stepped_seconds + jump, 3)
        self._moment, self._difference, self._error = moment, difference, error
        return self.stepped_seconds


def read_clocks() -> tuple[float, float, float]:
    """The monotonic clock, how far the wall clock is ahead of it, and by how much that may be wrong (seconds)."""
    best = None
    for _ in range(_TRIES):  # on a busy machine another process may run between the two reads
        before, wall, after = time.monotonic(), time.time(), time.monotonic()
        error = (after - before) / 2
        if best is None or error < best[2]:
            best = before + error, wall - before - error, error
        if error < _SHORT_SECONDS:
            break
    assert best is not None
    return best
