"""A task under torch's profiler for the updates of its last timed block: `python -m benchmarks._profiled FILE TASK`.

FILE gets the 20 kernels that took most time, how long the device was busy and idle between kernels, how many kernels
an update launched, and how often and how long the host launched and waited. On a CPU operations take the place of
kernels.
"""

import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.autograd.profiler_util import EventList
from torch.profiler import ProfilerActivity, profile

from task_images.clock import Throughput

# Calls of the CUDA and HIP runtimes, by what the host does in them.
HOST_CALLS = {
    "launches": ("LaunchKernel", "GraphLaunch"),
    "waits": ("StreamSynchronize", "DeviceSynchronize", "EventSynchronize"),
}


def main() -> None:
    target, task = Path(sys.argv[1]), sys.argv[2]
    has_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if has_gpu else [])]
    profiler: Any = profile(activities=activities)
    meet, end = Throughput._meet, Throughput._end_block

    def begin_block(self: Throughput) -> None:
        meet(self)
        if len(self._seconds) == self._protocol.blocks - 1:
            profiler.start()

    def end_block(self: Throughput) -> None:
        end(self)
        if self.is_over:
            profiler.stop()
            target.write_text(describe(profiler, self._protocol.updates, self._seconds[-1], has_gpu))

    Throughput._meet, Throughput._end_block = begin_block, end_block  # type: ignore[method-assign]
    sys.argv[1:] = [task]
    runpy.run_module("task_images.run", run_name="__main__", alter_sys=True)


def describe(profiler: Any, updates: int, seconds: float, has_gpu: bool) -> str:
    """The profile as text. `seconds`: of the whole block, on the host's clock."""
    averages: EventList = profiler.key_averages()
    order = "self_device_time_total" if has_gpu else "self_cpu_time_total"
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA or not has_gpu
    )
    busy, reached = 0.0, float("-inf")
    for first, last in spans:
        busy += max(0.0, last - max(first, reached))
        reached = max(reached, last)
    whole = 1e6 * seconds
    calls = {
        word: [event for event in profiler.events() if any(name in event.name for name in names)]
        for word, names in HOST_CALLS.items()
    }
    host = "; ".join(
        f"{word} {len(found) / updates:.1f} times, {sum(each.cpu_time_total for each in found) / updates / 1e3:.2f} ms"
        for word, found in calls.items()
    )
    what = "kernels" if has_gpu else "operations"
    return (
        f"{updates} updates in {seconds:.3f} s under the profiler: {1e3 * seconds / updates:.2f} ms each, "
        f"{len(spans) / updates:.0f} {what} an update; busy {busy / whole:.0%},"
        f" between {what} {1 - busy / whole:.0%}\nthe host, an update: {host}\n\n"
        + str(averages.table(sort_by=order, row_limit=20, max_name_column_width=60))  # type: ignore[no-untyped-call]
    )


if __name__ == "__main__":
    main()
