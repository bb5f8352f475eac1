"""Reuse of memory for batches. The kernel zeroes the pages of each new array, and large arrays are unmapped as soon as
they are freed: for 256 images this takes more than 1 % of a step."""

import weakref
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class BufferPool:
    """CPU tensors backed by arrays of one shape and type, created by `make`. A tensor returns to the pool when nothing
    references it or a view of it. Threads may share a pool."""

    def __init__(self, make: Callable[[], npt.NDArray[np.generic]]) -> None:
        self._make = make
        self._free: list[npt.NDArray[np.generic]] = []

    def take(self) -> Tensor:
        """A tensor with arbitrary contents."""
        try:
            whole = self._free.pop()
        except IndexError:
            whole = self._make()
        # This view is referenced only by the tensor's storage, which all views of the tensor share.
        view = whole[:]
        weakref.finalize(view, self._free.append, whole).atexit = False
        return torch.from_numpy(view)


def pin(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` in pinned memory if `device` is a GPU and the tensor is not there yet, so that the transfer is
    asynchronous; torch reuses pinned memory only after its transfers."""
    return tensor.pin_memory() if device.type == "cuda" and not tensor.is_cuda else tensor
