"""Detect ranks that wait for each other forever: since when none has used a CPU, and where their threads are.

Ranks of a user's command import beside/sitecustomize.py, which registers faulthandler for STACKS_SIGNAL; for others
py-spy is asked if it is installed. Both write into the rank's log. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Mapping

from mlbench_cli.agent import processes

BESIDE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "beside")
IDLE_SECONDS = 30.0  # without CPU time of any rank, after which a run may hang
IDLE_SHARE = 0.02  # of a core that a rank may use while it only waits
CLOCK_SECONDS = 0.05  # how far CPU times of the kernel may be off
STACKS_SIGNAL = getattr(signal, "SIGRTMAX", 0) - 3 if hasattr(signal, "SIGRTMAX") else 0
PRINT_SECONDS = 5.0  # at most, for ranks to take the signal
WRITE_SECONDS = 0.2  # for them to write what they print
SPY_SECONDS = 10.0  # for each process
SPIES_SECONDS = 30.0  # for all of them
TITLE = b"\n--- mlbench: stacks of rank %d, process %d ---\n"


class IdleWatch:
    """Since when no rank has used a CPU, from the samples of the agent."""

    def __init__(self) -> None:
        self._cpu: dict[int, float] = {}  # of each rank when the idle time began
        self._began: float | None = None  # the first sample of running ranks
        self.since: float | None = None  # by the wall clock
        self._was_long = False

    def look(self, lines: Iterable[Mapping[str, object]]) -> bool:
        """Take a sample of all running ranks; whether they have just begun or ceased to be idle for IDLE_SECONDS."""
        now, found = time.monotonic(), {int(str(line["rank"])): float(str(line["cpu_seconds"])) for line in lines}
        if not found:  # all have ended, perhaps because they hung
            return False
        if self._began is None:
            self._cpu, self._began = found, now
        grown = [seconds - self._cpu.get(rank, 0.0) for rank, seconds in found.items()]
        if max(grown) > IDLE_SHARE * (now - self._began) + CLOCK_SECONDS:
            self._cpu, self._began, self.since = found, now, None
        elif self.since is None:
            self.since = time.time() - (now - self._began)
        was_long, self._was_long = self._was_long, self.is_long
        return self._was_long != was_long

    @property
    def is_long(self) -> bool:
        """Whether all ranks have been idle for long enough to say so."""
        return self.since is not None and time.time() - self.since >= IDLE_SECONDS


def print_stacks(ranks: Mapping[int, int], folder: str) -> bool:
    """Have all Python processes of the ranks (number -> process) print their stacks; whether any could."""
    import shutil  # both only for py-spy; at the top they would delay all local ranks by 3 ms
    import subprocess

    children = processes.process_tree()
    spy, spy_until = shutil.which("py-spy"), time.monotonic() + SPIES_SECONDS
    is_done, asked = False, list[int]()
    for rank, root in ranks.items():
        for pid in (root, *processes.descendants(root, children)):
            with open(f"{folder}/logs/rank-{rank}.log", "ab") as log:
                if STACKS_SIGNAL and _catches(pid, STACKS_SIGNAL):
                    log.write(TITLE % (rank, pid))
                    log.flush()
                    with contextlib.suppress(OSError):
                        os.kill(pid, STACKS_SIGNAL)
                        asked.append(pid)
                        is_done = True
                elif spy is not None and time.monotonic() < spy_until and _is_python(pid):
                    log.write(TITLE % (rank, pid))
                    log.flush()
                    with contextlib.suppress(OSError, subprocess.SubprocessError):
                        subprocess.run([spy, "dump", "--pid", str(pid)], stdout=log, stderr=log, timeout=SPY_SECONDS)
                        is_done = True
    end = time.monotonic() + PRINT_SECONDS
    while time.monotonic() < end and any(_will_take(pid, STACKS_SIGNAL) for pid in asked):
        time.sleep(0.05)  # SIGTERM would overtake it
    if asked:
        time.sleep(WRITE_SECONDS)
    return is_done


def _catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal: without one it would end."""
    return _has_signal(pid, number, "SigCgt")


def _will_take(pid: int, number: int) -> bool:
    """Whether a signal waits for a process that runs; one that is stopped takes it only when it is continued."""
    state = processes.stat_fields(pid)
    return state is not None and state[0] not in "tT" and _has_signal(pid, number, "ShdPnd")


def _has_signal(pid: int, number: int, field: str) -> bool:
    """Whether a signal is in a set of a process: caught (SigCgt) or waiting to be handled (ShdPnd); see proc(5)."""
    with (
        contextlib.suppress(OSError, ValueError),
        open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file,
    ):
        for line in file:
            if line.startswith(f"{field}:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _is_python(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return os.path.basename(os.readlink(f"/proc/{pid}/exe")).startswith("python")
    return False
