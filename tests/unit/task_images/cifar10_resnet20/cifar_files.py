"""Small files of CIFAR-10's very formats."""

import hashlib
import io
import pickle
import tarfile
from pathlib import Path

import numpy as np

from task_images.cifar10_resnet20.data import BINARY, PYTHON, TRAINING, VALIDATION
from task_images.fetch import Archive

PER_BATCH = 7


def batches(per_batch: int = PER_BATCH) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Name -> images [n, 3072] and labels [n]."""
    stream = np.random.default_rng(5)
    return {
        name: (stream.integers(0, 256, (per_batch, 3072), np.uint8), stream.integers(0, 10, per_batch))
        for name in (*TRAINING, *VALIDATION)
    }


def binary_files(per_batch: int = PER_BATCH) -> dict[str, bytes]:
    return {
        f"cifar-10-batches-bin/{name}.bin": np.concatenate([labels[:, None].astype(np.uint8), images], 1).tobytes()
        for name, (images, labels) in batches(per_batch).items()
    } | {"cifar-10-batches-bin/batches.meta.txt": b"airplane\n", "cifar-10-batches-bin/readme.html": b"<html>"}


def python_files(per_batch: int = PER_BATCH) -> dict[str, bytes]:
    """Pickles as Python 2 writes them: protocol 2, byte strings as keys."""
    return {
        f"cifar-10-batches-py/{name}": pickle.dumps(
            {b"batch_label": b"one", b"labels": labels.tolist(), b"data": images, b"filenames": [b"x.png"] * per_batch},
            2,
        )
        for name, (images, labels) in batches(per_batch).items()
    } | {"cifar-10-batches-py/batches.meta": pickle.dumps({b"label_names": [b"airplane"]}, 2)}


def pack(files: dict[str, bytes]) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return raw.getvalue()


def unpack(files: dict[str, bytes], folder: Path) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def archives(binary: bytes = b"", python: bytes = b"", url: str = "http://127.0.0.1:9/") -> tuple[Archive, Archive]:
    """The official archives' names with the sizes and digests of other contents."""
    return tuple(
        Archive(official.name, url, len(content), f"md5:{hashlib.md5(content).hexdigest()}")
        for official, content in ((BINARY, binary), (PYTHON, python))
    )  # type: ignore[return-value]
