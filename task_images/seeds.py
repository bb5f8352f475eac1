"""Random numbers: shared by all ranks where they must agree, different per rank where they must not.

Initial parameters, partition and split use the run's seed; dropout and augmentation use per-rank streams.
"""

import hashlib
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # tasks of other frameworks use these streams, too
    import torch


def derive(seed: int, *path: str | int) -> int:
    """A 63-bit seed for the stream named by `path`: equal everywhere, and unrelated to those of other paths."""
    text = "/".join(str(part) for part in (seed, *path))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(seed: int, *path: str | int) -> "torch.Generator":
    """A torch generator (on the CPU) of the stream `path`."""
    import torch

    return torch.Generator().manual_seed(derive(seed, *path))


_lasting: "dict[str, torch.Generator]" = {}


def lasting_generator(seed: int, *path: str | int) -> "torch.Generator":
    """Like `generator`, for a stream that continues across updates: its state is saved in checkpoints for restarts."""
    made = _lasting["/".join(map(str, path))] = generator(seed, *path)
    return made


def read_lasting_states() -> "dict[str, torch.Tensor]":
    """The state of each lasting generator, by path."""
    return {path: stream.get_state() for path, stream in _lasting.items()}


def load_lasting_states(states: "Mapping[str, torch.Tensor]") -> None:
    """Restore lasting generators from `read_lasting_states`."""
    for path, state in states.items():
        if path in _lasting:
            _lasting[path].set_state(state)


def numpy_generator(seed: int, *path: str | int) -> np.random.Generator:
    """A numpy generator of the stream `path`."""
    return np.random.Generator(np.random.PCG64(derive(seed, *path)))


def seed_device(device: "torch.device", seed: int, *path: str | int) -> None:
    """Seed torch's generators of the CPU and of `device` with the stream `path`, for random numbers within a pass.

    torch.manual_seed seeds every kind of device, and stores a stack trace for unused ones: 0.8 ms, 2.5 % of a step of
    the tiny decoder.
    """
    import torch

    value = derive(seed, *path)
    torch.default_generator.manual_seed(value)
    if device.type == "cuda":
        torch.cuda.manual_seed(value)


def seed_all(seed: int, rank: int | None = None) -> None:
    """Seed Python, numpy and torch: without `rank` the same everywhere, with it a separate stream per rank."""
    import torch

    value = derive(seed, "all") if rank is None else derive(seed, "rank", rank)
    random.seed(value)
    np.random.seed(value % 2**32)
    torch.manual_seed(value)
