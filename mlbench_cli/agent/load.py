"""Load of this machine during a run: CPU time of the run and of everything else. Standard library only.

One row a second goes into resources.jsonl. Counters are cumulative since the run's start, so a lost row loses nothing:

    kind               "machine"
    elapsed_seconds    since the agent started
    busy_seconds       CPU time that anybody used on the CPUs that this run may use (user, nice, system, interrupts)
    own_seconds        CPU time of this run: its agent, its ranks and all their descendants
    throttled_periods  how often the kernel paused the run's control groups because a CPU quota was used up
    throttled_seconds  for how long

The first row also has what does not change: `cores` (usable, quota included), `quota` (CPUs, or null), `lock`
("held", "shared" or "unavailable", see lock.py), `lock_reason`, and `preloaded`, the variables that load libraries
into the ranks before all others, if there are any.
Sources: proc_stat(5), task_images/cores.py.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from mlbench_cli.agent import machine
from mlbench_cli.agent.clock import read_clocks
from task_images import cores
from task_images.contract import anonymize

PRELOAD = ("LD_AUDIT", "LD_PRELOAD")  # such a library may replace clocks, sockets and memory
MAX_VARIABLE = 2000


def find_preloaded(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of PRELOAD that ranks with this environment get; for an anonymous run, digests of them."""
    found = {name: environ[name] for name in PRELOAD if environ.get(name)}
    if environ.get("MLBENCH_ANONYMOUS"):
        return {name: anonymize(value) for name, value in found.items()}
    return {name: value[:MAX_VARIABLE] for name, value in found.items()}


class LoadMeter:
    """Counters of this machine's CPUs since the meter was made. `root` holds proc/ and sys/."""

    def __init__(
        self, lock: str, lock_reason: str | None = None, root: str = "/", preloaded: Mapping[str, str] | None = None
    ) -> None:
        self._root = root
        self._facts: dict[str, object] = {
            "cores": cores.effective_cores(root),
            "quota": cores.cpu_quota(root),
            "lock": lock,
            "lock_reason": lock_reason,
            **({"preloaded": dict(preloaded)} if preloaded else {}),
        }
        self._begun = time.monotonic()
        self._before = self._counters(0.0)
        self._own = 0.0

    def row(self, running_seconds: float) -> dict[str, Any]:
        """The counters now; `running_seconds` is the CPU time of the run's processes that have not been waited for."""
        counters = self._counters(running_seconds)
        grown = {name: round(max(0.0, value - self._before.get(name, 0.0)), 3) for name, value in counters.items()}
        # A process that ends between two reads is in neither of them; its time comes back with its parent's.
        self._own = grown["own_seconds"] = max(self._own, grown["own_seconds"])
        facts, self._facts = self._facts, {}
        moment, difference, _ = read_clocks()
        elapsed = round(moment - self._begun, 3)
        return {"time": round(moment + difference, 3), "kind": "machine", **facts, "elapsed_seconds": elapsed, **grown}

    def _counters(self, running_seconds: float) -> dict[str, float]:
        times = os.times()
        throttling = cores.read_throttling(self._root)
        return {
            **_cpu_times(self._root),
            "own_seconds": running_seconds + times.user + times.system + times.children_user + times.children_system,
            "throttled_periods": throttling.periods,
            "throttled_seconds": throttling.seconds,
        }


def _cpu_times(root: str) -> dict[str, float]:
    """Seconds since boot in which the CPUs that this process may use were busy; empty without /proc."""
    usable = {f"cpu{number}" for number in os.sched_getaffinity(0)} if hasattr(os, "sched_getaffinity") else set()
    busy = 0
    found = False
    for line in cores.read_lines(f"{root}/proc/stat"):
        name, *ticks = line.split()
        if name not in usable or len(ticks) < 7:
            continue
        found = True
        user, nice, system, _, _, interrupts, soft_interrupts = map(int, ticks[:7])  # guests are in user, nice
        busy += user + nice + system + interrupts + soft_interrupts
    if not found:
        return {}
    return {"busy_seconds": busy / machine.TICKS}
