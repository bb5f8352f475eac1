"""Checkpoints from which an agent restarts ranks: written in the background, exact, with the clock of the whole run.

FOLDER/clock-N.json             when rank N first began training, by the machine's clock
FOLDER/training-A-N             exists once rank N trains in attempt A
FOLDER/UPDATE/main.pt           the common state, by rank 0
FOLDER/UPDATE/rank-N.pt         the state of rank N: unreported losses, buffers, random states

A checkpoint is complete when all of its files exist; each is written atomically. A thread writes files from a copy, so
a step waits only for the copy, and for the previous checkpoint if that is still being written.
"""

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from task_images.clock import ClockLook
from task_images.contract import Contract, TaskUsageError


@contextmanager
def replace_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, which replaces `path` once it is on disk; after an error, `path` is unchanged."""
    partial = path.with_name(f".{path.name}")
    with partial.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


KEPT = 3  # checkpoints: another rank may be one behind, and the last one may be incomplete
MAIN = "main.pt"


class ElasticCheckpoints:
    """The checkpoints of one rank in one attempt. `write(path, state)` may be called in a thread."""

    def __init__(self, contract: Contract, write: Callable[[Path, Mapping[str, Any]], None]) -> None:
        assert contract.checkpoint_dir is not None
        self.folder = Path(contract.checkpoint_dir)
        self._rank, self._attempt = contract.rank, contract.attempt
        self._write = write
        self.is_on = contract.checkpoint_every is not None
        text = contract.checkpoint_every or "60s"
        self._updates = int(text) if text.isdecimal() else 0
        self._seconds = 0.0 if self._updates else _seconds(text)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._written: list[int] = []
        self._look = ClockLook()
        self._due = time.monotonic() + self._seconds
        self.resume = Path(contract.resume_from) if contract.resume_from else None

    def is_due(self, total: int, agree: Callable[[float], float]) -> bool:
        """Whether to write a checkpoint after update `total`; by rank 0's clock if `checkpoint_every` is a time.
        Collective."""
        if self._updates:
            return total % self._updates == 0
        return self._look.is_past(total, lambda: agree(self._due - time.monotonic()))

    def keep(self, total: int, main: Mapping[str, Any] | None, own: Mapping[str, Any]) -> None:
        """Write the checkpoint of update `total` in a thread: `own`, and on rank 0 `main`. The caller must not change
        them.

        Raises OSError if writing the previous one failed.
        """
        self.wait()
        self._due = time.monotonic() + self._seconds
        self._thread = threading.Thread(target=self._keep, args=(total, main, own), name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until nothing is being written. Raises OSError if writing failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _keep(self, total: int, main: Mapping[str, Any] | None, own: Mapping[str, Any]) -> None:
        try:
            place = self.folder / str(total)
            place.mkdir(parents=True, exist_ok=True)
            self._write(place / f"rank-{self._rank}.pt", own)
            if main is not None:
                self._write(place / MAIN, main)
            self._written.append(total)
            self._drop_old()
        except BaseException as error:  # raised by the next `wait`
            self._error = error

    def _drop_old(self) -> None:
        while len(self._written) > KEPT:
            place = self.folder / str(self._written.pop(0))
            (place / f"rank-{self._rank}.pt").unlink(missing_ok=True)
            if self._rank == 0:
                (place / MAIN).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # another rank may still be writing to it
                place.rmdir()

    def begin_training(self) -> float:
        """Record that this rank trains; returns the seconds since it first did in this run, by the machine's clock."""
        self.folder.mkdir(parents=True, exist_ok=True)
        clock, now = self.folder / f"clock-{self._rank}.json", time.monotonic()
        try:
            begun = float(json.loads(clock.read_bytes())["monotonic"])
        except (OSError, ValueError, KeyError):
            begun = now
            with replace_file(clock) as file:
                file.write(json.dumps({"monotonic": now}).encode())
        (self.folder / f"training-{self._attempt}-{self._rank}").touch()
        self._due = now + self._seconds
        return now - begun


def _seconds(text: str) -> float:
    return float(text[:-1]) * {"s": 1, "m": 60, "h": 3600}[text[-1]]


def refuse_other_run(path: Path, state: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raises TaskUsageError unless entries of a checkpoint equal the `expected` ones: it cannot be resumed with another
    model size, vocabulary, seed or global batch."""
    for name, value in expected.items():
        if state.get(name) != value:
            raise TaskUsageError(
                f"{path} was made with {name} = {state.get(name)!r}, this run has {value!r}",
                "Resume with the parameters of the run that made it.",
            )
