"""Load of this machine during a run: CPU time of the run and of everything else. Standard library only.

One row a second goes into resources.jsonl. Counters are cumulative since the run's start, so a lost row loses nothing:

    kind               "machine"
    elapsed_seconds    since the agent started
    busy_seconds       CPU time that anybody used on the CPUs that this run may use (user, nice, system, interrupts)
    own_seconds        CPU time of this run: its agent, its ranks and all their descendants
    steal_seconds      CPU time that the hypervisor gave to other virtual machines
    waiting_seconds    time in which at least one process of the machine waited for a CPU (pressure stall information)
    throttled_periods  how often the kernel paused the run's control groups because a CPU quota was used up
    throttled_seconds  for how long
    cpu_joules         energy of all CPU packages and their memory by RAPL's counters, other programs' included; only
                       where the kernel lets this user read them (since 2020 that is root alone)

The first row also has what does not change: `cores` (usable, quota included), `quota` (CPUs, or null), `lock`
("held", "shared" or "unavailable", see lock.py) and `lock_reason`.
Sources: proc_stat(5), Documentation/accounting/psi.rst, Documentation/power/powercap/powercap.rst,
task_images/harness/cores.py.
"""

from __future__ import annotations

import os
import time

from mlbench_cli.agent import machine
from mlbench_cli.agent.clock import read_clocks
from task_images.harness import cores

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` would cost the agent a tenth of its start
    from typing import Any


class LoadMeter:
    """Counters of this machine's CPUs since the meter was made. `root` holds proc/ and sys/."""

    def __init__(self, lock: str, lock_reason: str | None = None, root: str = "/") -> None:
        self._root = root
        self._facts: dict[str, object] = {
            "cores": cores.effective_cores(root),
            "quota": cores.cpu_quota(root),
            "lock": lock,
            "lock_reason": lock_reason,
        }
        self._begun = time.monotonic()
        self._zones = _find_zones(root)
        self._energy: dict[str, int] = {}  # zone -> its counter at the last look
        self._joules = 0.0
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
            **_pressure(self._root),
            "own_seconds": running_seconds + times.user + times.system + times.children_user + times.children_system,
            "throttled_periods": throttling.periods,
            "throttled_seconds": throttling.seconds,
            **self._count_energy(),
        }

    def _count_energy(self) -> dict[str, float]:
        """Joules of all zones since the first look; each counter begins again at 0 behind its largest value."""
        for zone, most in self._zones.items():
            now = _read_number(f"{zone}/energy_uj")
            if now is None:
                continue
            before = self._energy.get(zone, now)
            self._joules += (now - before if now >= before else now - before + most) / 1e6
            self._energy[zone] = now
        return {"cpu_joules": self._joules} if self._energy else {}


def _cpu_times(root: str) -> dict[str, float]:
    """Seconds since boot in which the CPUs that this process may use were busy, or stolen; empty without /proc."""
    usable = {f"cpu{number}" for number in os.sched_getaffinity(0)} if hasattr(os, "sched_getaffinity") else set()
    busy = steal = 0
    found = False
    for line in cores.read_lines(f"{root}/proc/stat"):
        name, *ticks = line.split()
        if name not in usable or len(ticks) < 8:
            continue
        found = True
        user, nice, system, _, _, interrupts, soft_interrupts, stolen = map(int, ticks[:8])  # guests are in user, nice
        busy += user + nice + system + interrupts + soft_interrupts
        steal += stolen
    if not found:
        return {}
    return {"busy_seconds": busy / machine.TICKS, "steal_seconds": steal / machine.TICKS}


def _pressure(root: str) -> dict[str, float]:
    """Seconds since boot in which some process waited for a CPU; empty on kernels without that count."""
    for line in cores.read_lines(f"{root}/proc/pressure/cpu"):
        kind, *pairs = line.split()
        total = dict(pair.partition("=")[::2] for pair in pairs).get("total", "")
        if kind == "some" and total.isdigit():
            return {"waiting_seconds": int(total) / 1e6}
    return {}


def _find_zones(root: str) -> dict[str, int]:
    """RAPL's zones that may be read, none of which contains another, with the largest value of each counter: packages,
    and memory, which is below a package in the tree but not in its counter. "psys" contains all of them."""
    folder = f"{root}/sys/class/powercap"
    try:
        names = sorted(name for name in os.listdir(folder) if name.startswith("intel-rapl:"))  # AMD's, too
    except OSError:
        return {}
    found = {}
    for name in names:
        zone = f"{folder}/{name}"
        what = "".join(cores.read_lines(f"{zone}/name")[:1])
        most = _read_number(f"{zone}/max_energy_range_uj")
        if what.startswith(("package", "dram")) and most is not None and _read_number(f"{zone}/energy_uj") is not None:
            found[zone] = most
    return found


def _read_number(path: str) -> int | None:
    text = "".join(cores.read_lines(path)[:1]).strip()
    return int(text) if text.isdigit() else None
