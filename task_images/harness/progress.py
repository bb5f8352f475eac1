"""Progress of long preparations of data: the share done and the time left, every few seconds."""

import os
import time
from collections.abc import Callable

INTERVAL_SECONDS = float(os.environ.get("MLBENCH_PROGRESS_SECONDS", "10"))


class ProgressLines:
    """Progress lines for `total` bytes of work, e.g. "packing: 40% of 12.0 GB, 3 minutes left"."""

    def __init__(
        self, what: str, total: int, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._what, self._total, self._say, self._clock = what, total, say, clock
        self._done = self._kept = 0
        self._begin = self._shown = clock()

    def add(self, size: int, is_old: bool = False) -> None:
        """Count `size` more bytes as done; `is_old`: by an earlier attempt, so not used for the speed."""
        self._kept += size if is_old else 0
        self.reach(self._done + size)

    def reach(self, done: int) -> None:
        """Set the total of done bytes."""
        self._done = done
        now = self._clock()
        if now - self._shown < INTERVAL_SECONDS:
            return
        self._shown = now
        rate = (done - self._kept) / (now - self._begin)
        left = f", {_format_time(max(0.0, self._total - done) / rate)} left" if rate > 0 else ""
        share = min(1.0, done / self._total) if self._total else 1.0
        self._say(f"{self._what}: {share:.0%} of {_format_size(self._total)}{left}")


def _format_time(seconds: float) -> str:
    return f"{seconds:.0f} seconds" if seconds < 100 else f"{seconds / 60:.0f} minutes"


def _format_size(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"
