"""From an image to its place in a batch: by threads of the rank, or by separate processes.

A thread needs the training's interpreter for a quarter of a millisecond an image, which a fast GPU's thousands of
images a second do not leave. Processes have their own, and write into memory that they share with the rank.
"""

import mmap
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context, parent_process

import numpy as np

from task_images.arrays import Bytes
from task_images.errors import EnvironmentUnfitError
from task_images.imagenet_resnet.folders import ImageFolders
from task_images.imagenet_resnet.jpeg import Choose, ImageFile, read_square, training_window, validation_window
from task_images.seeds import numpy_generator

Place = tuple[int, int]  # epoch from 1, or 0 for validation; number of the image
Load = Callable[[], ImageFolders]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Cut:
    """How images are cut, as `data.FileData` says. Equal arguments give equal bytes, in whatever process."""

    seed: int
    side: int
    shorter: int
    least_crop: float
    draft: bool

    def fill(self, target: Bytes, images: ImageFolders, places: Sequence[Place]) -> float:
        """Decode images into target [n, side, side, 3]; returns the seconds that it took."""
        begin = time.perf_counter()
        for row, place in zip(target, places, strict=True):
            row[:] = read_square(*self.choose(images, place), self.side, self.draft)
        return time.perf_counter() - begin

    def choose(self, images: ImageFolders, place: Place) -> tuple[ImageFile, Choose]:
        """The file of an image, and what of it is cut out."""
        epoch, index = place
        if not epoch:
            return images.validation.path(index), partial(validation_window, side=self.side, shorter=self.shorter)
        stream = numpy_generator(self.seed, "crop", epoch, index)
        choose = partial(training_window, side=self.side, least=self.least_crop, stream=stream)
        return images.training.path(index), choose


class DecodingProcesses:
    """`number` processes that decode the images that `load` finds. They end with this one."""

    def __init__(self, number: int, load: Load, cut: Cut) -> None:
        if not hasattr(os, "memfd_create"):
            raise EnvironmentUnfitError(
                "decoders=processes needs memory that Linux has (memfd_create)", "--set decoders=threads"
            )
        self._files: dict[int, int] = {}  # address of a buffer -> its file
        self.pool = ProcessPoolExecutor(number, get_context("spawn"), _start, (load, cut))
        weakref.finalize(self, _close, self._files)

    def make_buffer(self, shape: Shape) -> Bytes:
        """Bytes that the processes can write. Not in /dev/shm, which has 64 MB in a container."""
        size = int(np.prod(shape))
        file = os.memfd_create("mlbench-batch")
        os.ftruncate(file, size)
        buffer: Bytes = np.frombuffer(mmap.mmap(file, size), np.uint8).reshape(shape)
        self._files[buffer.ctypes.data] = file
        return buffer

    def make_call(self, address: int, shape: Shape, first: int, places: Sequence[Place]) -> Callable[[], float]:
        """What fills the rows from `first` on of the buffer at `address`."""
        return partial(_fill_shared, f"/proc/{os.getpid()}/fd/{self._files[address]}", shape, first, places)


@contextmanager
def name_killed_processes() -> Iterator[None]:
    """Turn the pool's own error into one that says what to do."""
    try:
        yield
    except BrokenProcessPool:
        raise EnvironmentUnfitError(
            "a process that decodes images was killed, or could not start",
            "The machine may have too little memory: reduce --set loaders, or use --set decoders=threads.",
        ) from None


def _close(files: dict[int, int]) -> None:
    for file in files.values():
        os.close(file)


# --- in a separate process ------------------------------------------------------------------------------------------

_images: ImageFolders
_cut: Cut
_buffers: dict[str, Bytes] = {}


def _start(load: Load, cut: Cut) -> None:
    global _images, _cut
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the rank, which ends its processes
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _images, _cut = load(), cut


def _end_with_parent() -> None:
    """The pool's queue would keep a process whose parent was killed."""
    parent = parent_process()
    if parent is not None:
        parent.join()
    os._exit(0)


def _fill_shared(path: str, shape: Shape, first: int, places: Sequence[Place]) -> float:
    buffer = _buffers.get(path)
    if buffer is None:
        with open(path, "r+b") as file:
            buffer = _buffers[path] = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8).reshape(shape)
    return _cut.fill(buffer[first : first + len(places)], _images, places)
