"""Updates of pretraining: made ahead in one thread, the same passes as without it, pinned for a GPU."""

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from task_images.language.pretraining import PretrainingBatches, Workload
from task_images.language.tokens import Batch, Part, Windows, batches_of_update, synthetic_tokens
from task_images.loop import Update

CPU = torch.device("cpu")
PASSES, STEPS = 3, 4


class Tokens(Workload[Batch]):
    """Two ranks' windows of random tokens; notes the threads that make them."""

    samples, tokens, updates_per_epoch = 12, 96, 1.0

    def __init__(self) -> None:
        self.threads: set[int] = set()
        self._windows = Windows(synthetic_tokens(50, 1000, seed=1).train, 8, seed=1)

    def training(self, update: int) -> Iterator[Batch]:
        for batch in batches_of_update(self._windows, update, self.samples, Part(2, 1, 2)):
            self.threads.add(threading.get_ident())
            yield batch


def make_batches(workload: Tokens, device: torch.device = CPU) -> PretrainingBatches[Batch]:
    return PretrainingBatches(workload, STEPS, PASSES, 1, device)


def take(update: Update[Batch]) -> list[list[int]]:
    return [batch.inputs.flatten().tolist() for batch in update.passes]


@pytest.mark.parametrize("begin", [0, 2])
def test_updates_made_ahead_have_the_same_passes(begin: int) -> None:
    workload = Tokens()
    found = []
    for update in make_batches(workload).updates(1, begin):
        assert (update.count, update.weight, update.total, update.samples, update.first) == (3, 1.0, 96.0, 12, 3)
        found.append(take(update))
    assert len(workload.threads) == 1
    assert threading.get_ident() not in workload.threads
    assert found == [
        [batch.inputs.flatten().tolist() for batch in workload.training(number)] for number in range(begin, STEPS)
    ]


def test_a_gpu_gets_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only from there is a transfer asynchronous. No GPU is at hand, so pinned tensors are marked."""
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor + 1000)
    pinned, plain = (next(make_batches(Tokens(), torch.device(kind)).updates(1)) for kind in ("cuda", "cpu"))
    assert take(pinned) == [[number + 1000 for number in one] for one in take(plain)]


def test_a_training_that_ends_early_leaves_no_thread() -> None:
    updates = make_batches(Tokens()).updates(1)
    take(next(updates))
    del updates
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("loader")]


def test_what_goes_wrong_in_the_thread_is_raised() -> None:
    class Broken(Tokens):
        def training(self, update: int) -> Iterator[Batch]:
            raise ValueError("a broken file")

    with pytest.raises(ValueError, match="a broken file"):
        next(make_batches(Broken()).updates(1))
