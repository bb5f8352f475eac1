"""Restarts by the agent after a rank was lost: when ranks write checkpoints for them, and the clock of the whole run.

FOLDER/clock-N.json             when rank N first began training, by the machine's clock
FOLDER/training-A-N             exists once rank N trains in attempt A
FOLDER/UPDATE/                  a checkpoint (`checkpoint`)
"""

import json
import time
from collections.abc import Callable
from pathlib import Path

from task_images.clock import ClockLook
from task_images.contract import Contract


class Restarts:
    """The restarts of one rank in one attempt. `resume`: the checkpoint to resume from, if any."""

    def __init__(self, contract: Contract) -> None:
        assert contract.checkpoint_dir is not None
        self.folder = Path(contract.checkpoint_dir)
        self.resume = Path(contract.resume_from) if contract.resume_from else None
        self._rank, self._attempt = contract.rank, contract.attempt
        self._has_checkpoints = contract.checkpoint_every is not None
        text = contract.checkpoint_every or "60s"
        self._updates = int(text) if text.isdecimal() else 0
        self._seconds = 0.0 if self._updates else float(text[:-1]) * {"s": 1, "m": 60, "h": 3600}[text[-1]]
        self._look = ClockLook()
        self._due = time.monotonic() + self._seconds

    def is_due(self, update: int, agree: Callable[[float], float]) -> bool:
        """Whether to write a checkpoint after `update`; by rank 0's clock if `checkpoint_every` is a time.
        Collective."""
        if self._updates or not self._has_checkpoints:
            return self._has_checkpoints and update % self._updates == 0
        is_due = self._look.is_past(update, lambda: agree(self._due - time.monotonic()))
        if is_due:
            self._due = time.monotonic() + self._seconds
        return is_due

    def begin_training(self) -> float:
        """Record that this rank trains; returns the seconds since it first did in this run, by the machine's clock."""
        self.folder.mkdir(parents=True, exist_ok=True)
        clock, now = self.folder / f"clock-{self._rank}.json", time.monotonic()
        try:
            begun = float(json.loads(clock.read_bytes())["monotonic"])
        except (OSError, ValueError, KeyError):
            begun = now
            partial = clock.with_suffix(".partial")
            partial.write_text(json.dumps({"monotonic": now}))
            partial.replace(clock)
        (self.folder / f"training-{self._attempt}-{self._rank}").touch()
        self._due = now + self._seconds
        return now - begun
