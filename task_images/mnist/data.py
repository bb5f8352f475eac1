"""MNIST in its own format (idx, https://yann.lecun.com/exdb/mnist), plain or gzipped, from a folder."""

import gzip
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import TensorDataset

MEAN, DEVIATION = 0.1307, 0.3081
FILES = {
    "training": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "validation": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}


def load(folder: Path | str, part: str) -> TensorDataset:
    """Images [n, 1, rows, columns] (mean 0, deviation 1) and labels [n] of "training" or "validation".

    Raises FileNotFoundError, or ValueError naming the file that is damaged.
    """
    images, labels = (_read(Path(folder), name) for name in FILES[part])
    if len(images) != len(labels):
        raise ValueError(f"{folder}: {len(images)} images but {len(labels)} labels of {part}")
    values = (torch.from_numpy(images).float() / 255 - MEAN) / DEVIATION
    return TensorDataset(values.unsqueeze(1), torch.from_numpy(labels).long())


def _read(folder: Path, name: str) -> npt.NDArray[np.uint8]:
    """Big-endian: two zero bytes, 8 for bytes, the number of dimensions, each length in 4 bytes, the values."""
    zipped = folder / f"{name}.gz"
    try:
        raw = gzip.decompress(zipped.read_bytes()) if zipped.exists() else (folder / name).read_bytes()
    except (EOFError, gzip.BadGzipFile) as error:
        raise ValueError(f"{zipped} is damaged: {error}") from None
    dimensions = raw[3] if len(raw) > 3 else 0
    shape = np.frombuffer(raw, ">u4", dimensions, 4).tolist() if len(raw) >= 4 + 4 * dimensions else []
    if raw[:3] != b"\0\0\x08" or not shape or len(raw) != 4 + 4 * dimensions + int(np.prod(shape)):
        raise ValueError(f"{folder / name} is no whole idx file of bytes")
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * dimensions).reshape(shape).copy()
