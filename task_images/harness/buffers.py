"""Memory of batches, used again. The kernel clears fresh pages for every array that it has never given out, and takes
large ones back as soon as they are freed: for 256 images that is longer than the hundredth of a step."""

import weakref
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class BufferPool:
    """Tensors on the CPU, on arrays of one shape and type that `make` makes. Each returns to the pool when nobody has
    it, or a part of it, any more. Threads may share a pool."""

    def __init__(self, make: Callable[[], npt.NDArray[np.generic]]) -> None:
        self._make = make
        self._free: list[npt.NDArray[np.generic]] = []

    def take(self) -> Tensor:
        """A tensor with whatever it had before."""
        try:
            whole = self._free.pop()
        except IndexError:
            whole = self._make()
        # The storage of the tensor, which all its parts share, holds this view of the array and nothing else does.
        view = whole[:]
        weakref.finalize(view, self._free.append, whole).atexit = False
        return torch.from_numpy(view)


def pin(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` in pinned memory if `device` is a GPU and has not got it yet, so that the host need not wait for the
    transfer; torch uses such memory again only when its transfers are done."""
    return tensor.pin_memory() if device.type == "cuda" and not tensor.is_cuda else tensor
