"""Ranks as threads of one process, for tests of bookkeeping: what a backend does is added up in the order of ranks.

`run_ranks(size, body)` calls `body(world)` on `size` threads, and returns what each gave.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from task_images.contract import Contract
from task_images.world import World

R = TypeVar("R")
SECONDS = 120.0


class Meeting:
    """A place where all ranks meet: each brings something, and gets what all have brought."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=SECONDS)
        self._brought: list[Any] = [None] * size

    def gather(self, rank: int, value: Any) -> list[Any]:
        self._brought[rank] = value
        self._barrier.wait()
        found = list(self._brought)
        self._barrier.wait()
        return found

    def abort(self) -> None:
        self._barrier.abort()


class Shared:
    """What the threads of one start have in common."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.meeting = Meeting(size)


class ThreadWorld(World):
    """One of several threads."""

    def __init__(self, rank: int, shared: Shared) -> None:
        contract = Contract({"RANK": str(rank), "WORLD_SIZE": str(shared.size), "MLBENCH_BACKEND": "gloo"})
        super().__init__(contract, torch.device("cpu"), 1, grouped=False)
        self._meeting = shared.meeting

    def all_reduce(self, tensor: Tensor, op: Any = None) -> Tensor:
        found = self._gather(tensor.clone())
        if op is None or op == torch.distributed.ReduceOp.SUM:
            return tensor.copy_(add_up(found))
        return tensor.copy_(torch.stack(found).amax(0))

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        return self._gather(list(values))

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        return tensor.copy_(self._gather(tensor.clone())[source])

    def barrier(self) -> None:
        self._gather(None)

    def _gather(self, value: Any) -> list[Any]:
        return self._meeting.gather(self.rank, value)


def add_up(tensors: Sequence[Tensor]) -> Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total


def run_ranks(size: int, body: Callable[[ThreadWorld], R]) -> list[R]:
    """`body` on `size` ranks. Raises what a rank raised first."""
    shared = Shared(size)
    results: dict[int, R] = {}
    failures: list[Exception] = []

    def run(rank: int) -> None:
        try:
            results[rank] = body(ThreadWorld(rank, shared))
        except Exception as error:
            failures.append(error)
            shared.meeting.abort()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise next((error for error in failures if not isinstance(error, threading.BrokenBarrierError)), failures[0])
    return [results[rank] for rank in range(size)]
