"""Facts about exhausted memory for findings: how much was used, and the limit."""

import re

from mlbench_cli.util.text import size

GPU_MEMORY = re.compile(r"(CUDA|HIP) out of memory|torch\.(cuda\.)?OutOfMemoryError|(CU|HIP)BLAS_STATUS_ALLOC_FAILED")
_SIZE = r"([\d.]+ [KMG]iB)"
_CAPACITY = re.compile(rf"total capacity of {_SIZE}")
_IN_USE = re.compile(rf"has {_SIZE} memory in use")


def describe_peak(peak: int | None, limit: int | None) -> str:
    """Peak and limit, in bytes, as the end of a sentence; empty if neither is known."""
    parts = [f"its largest process used {size(peak)}"] if peak else []
    parts += [f"the limit is {size(limit)}"] if limit else []
    return f": {', '.join(parts)}" if parts else ""


def describe_gpu_peak(text: str) -> str:
    """Peak and limit of a GPU's memory from what torch says when it runs out; empty if it says neither."""
    used, capacity = _IN_USE.search(text), _CAPACITY.search(text)
    parts = [f"it used {used[1]}"] if used else []
    parts += [f"the GPU has {capacity[1]}"] if capacity else []
    return f": {', '.join(parts)}" if parts else ""
