"""The communication backend "faulty": gloo with faults of its own, so that those who measure can be seen to notice.

FAULTS, a JSON object, says what is wrong with which collective, by the names of torch's process groups:

    "flip"     rank 1 gets one element that is wrong
    "lose"     nothing is moved
    "refuse"   the call raises, as backends do that lack a collective

Only tensors of FAULTY_TYPE (default float32) meet with them: bookkeeping is done in float64.
"""

import json
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

FAULTS: dict[str, str] = json.loads(os.environ.get("FAULTS", "{}"))
FAULTY_TYPE = getattr(torch, os.environ.get("FAULTY_TYPE", "float32"))
# What torch calls in a process group; the first argument receives.
METHODS = (
    *("allreduce", "broadcast", "reduce", "_allgather_base", "all_gather_single", "allgather", "alltoall_base"),
    *("_reduce_scatter_base", "reduce_scatter_single", "all_to_all_single", "send", "recv", "barrier"),
)
_OLDER = {
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
}


class Nothing(dist.Work):
    """What a collective that does nothing returns."""

    def wait(self, timeout: Any = None) -> bool:
        return True


class FaultyGroup(dist.ProcessGroup):
    def __init__(self, inner: Any, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.inner = inner

    def name(self) -> str:
        return "faulty"

    getBackendName = name

    def _set_group_name(self, name: Any) -> None:
        super()._set_group_name(name)
        self._group_name = name

    @property
    def group_name(self) -> Any:
        return self._group_name

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def shutdown(self) -> None:
        self.inner.shutdown()


def _method(name: str) -> Callable[..., Any]:
    def call(self: FaultyGroup, *arguments: Any, **options: Any) -> Any:
        tensor = _tensor(arguments[0]) if arguments else None
        fault = FAULTS.get(_OLDER.get(name, name)) if tensor is not None and tensor.dtype is FAULTY_TYPE else None
        if fault == "refuse":
            raise RuntimeError(f"ProcessGroupFaulty does not support {name}")
        if fault == "lose":
            return Nothing()
        own = getattr(self.inner, name, None) or getattr(self.inner, _OLDER[name])
        work = own(*arguments, **options)
        if fault == "flip" and self.rank() == 1 and tensor is not None:
            work.wait()
            tensor.view(-1)[-1] += 1
            return Nothing()  # gloo's own would fetch the right result once more
        return work

    return call


def _tensor(value: Any) -> torch.Tensor | None:
    if isinstance(value, torch.Tensor):
        return value
    return _tensor(value[0]) if isinstance(value, list | tuple) and value else None


for _name in METHODS:
    setattr(FaultyGroup, _name, _method(_name))


def _open(options: Any, _: Any) -> FaultyGroup:
    inner = dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, options.timeout)
    return FaultyGroup(inner, options.group_rank, options.group_size)


def register() -> None:
    if "FAULTY" not in dist.Backend._plugins:
        dist.Backend.register_backend("faulty", _open, extended_api=True, devices=["cpu"])
