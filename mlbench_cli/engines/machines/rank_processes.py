"""Processes of ranks as their supervisor, and the child that guards it, find them. Standard library only."""

from __future__ import annotations

import contextlib
import os
import signal
import time


def is_signalled(pid: int) -> bool:
    """Whether the child has ended by SIGTERM, of its own accord or not; it can still be waited for."""
    with contextlib.suppress(ChildProcessError, AttributeError):
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is not None:
            return ended.si_status in (signal.SIGTERM, 128 + signal.SIGTERM)
    return False


def kill_ranks(folder: str) -> None:
    """Kill every process that was given an output folder below `folder`, until three looks find none."""
    mark, empty = os.fsencode(f"MLBENCH_OUTPUT_DIR={folder}/output/"), 0
    while empty < 3:
        empty += 1
        for name in os.listdir("/proc"):
            if not name.isdigit() or int(name) == os.getpid():
                continue
            with contextlib.suppress(OSError):
                with open(f"/proc/{name}/environ", "rb") as file:
                    is_rank = any(item.startswith(mark) for item in file.read().split(b"\0"))
                if is_rank:
                    os.kill(int(name), signal.SIGKILL)
                    empty = 0
        time.sleep(0.05)
