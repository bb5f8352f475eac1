"""Images in arrays, without any framework: loading ahead in threads, and generated images."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from task_images.harness.seeds import numpy_generator

Bytes = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]
Item = TypeVar("Item")


def ahead(threads: int, calls: Iterator[Callable[[], Item]], window: int = 0) -> Iterator[Item]:
    """The calls' results in order, up to `window` of them (at least 2 x `threads`) made beforehand in threads.

    Without threads each is made when it is asked for.
    """
    window = max(window, 2 * threads)
    if not threads:
        for call in calls:
            yield call()
        return
    waiting: deque[Future[Item]] = deque()
    with ThreadPoolExecutor(threads, "loader") as pool:
        try:
            for call in calls:
                waiting.append(pool.submit(call))
                if len(waiting) > window:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def synthetic_images(
    number: int, classes: int, side: int, seed: int, part: str, *, channels: int = 3, noise: float = 0.25
) -> tuple[Bytes, Labels]:
    """`number` images [n, channels, side, side] that a convolutional network can tell apart, and their labels.

    Every class has a smooth coloured pattern, symmetric from left to right; an image is its class's pattern, shifted by
    up to an eighth of its side, in changing brightness, plus noise of deviation `noise`. Equal `seed` and `part` give
    equal images on every rank, and all parts of a seed share the patterns.
    """
    patterns = _patterns(classes, side, channels, seed)
    stream = numpy_generator(seed, "images", part)
    labels = stream.permutation(np.arange(number) % classes)
    shifts = stream.integers(-(side // 8), side // 8 + 1, (2, number))
    brightness = stream.uniform(0.6, 1.0, (number, 1, 1, 1)).astype(np.float32)
    place = np.arange(side)
    down, across = (place + shift[:, None] for shift in shifts)
    moved = patterns[labels[:, None, None], :, down[:, :, None] % side, across[:, None, :] % side].transpose(0, 3, 1, 2)
    images = moved * brightness + noise * stream.standard_normal(moved.shape, np.float32)
    return np.clip(255 * images, 0, 255).astype(np.uint8), labels


def _patterns(classes: int, side: int, channels: int, seed: int) -> npt.NDArray[np.float32]:
    """[classes, channels, side, side] from 0 to 1: a few low frequencies each."""
    stream = numpy_generator(seed, "patterns")
    angles = np.arange(side) * (2 * np.pi / side)
    waves = np.stack([np.cos(frequency * angles + phase) for frequency in (1, 2, 3) for phase in (0, np.pi / 2)])
    weights = stream.standard_normal((classes, channels, len(waves), len(waves)))
    raw = np.einsum("kcab,ah,bw->kchw", weights, waves, waves)
    raw = raw + raw[..., ::-1]
    low, high = raw.min((2, 3), keepdims=True), raw.max((2, 3), keepdims=True)
    patterns: npt.NDArray[np.float32] = ((raw - low) / (high - low)).astype(np.float32)
    return patterns
