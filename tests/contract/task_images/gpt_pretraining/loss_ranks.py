"""A program for test_split_loss.py: a decoder split over tensor-parallel ranks, against the same decoder whole."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

from task_images.contract import Contract
from task_images.gpt_pretraining.head import sum_over_ranks
from task_images.gpt_pretraining.model import Decoder, split_decoder
from task_images.gpt_pretraining.plan import SHAPES, Shape
from task_images.language.parallel import trains_tensor_parallel_wrongly
from task_images.language.tokens import IGNORED
from task_images.run import run
from task_images.world import open_world

SHAPED: tuple[Mapping[str, Any], ...] = ({}, {"tied": True}, {"softcap": 15.0, "vocabulary": 250, "multiple": 64})


def check_function(rank: int, size: int, words: int) -> None:
    """The loss and its gradient are those of torch's cross-entropy, also with fewer words than ranks."""
    generator = torch.Generator().manual_seed(words)
    logits = 30 * torch.randn(40, words, generator=generator)
    targets = torch.randint(words, (40,), generator=generator)
    targets[::7] = IGNORED
    whole = logits.clone().requires_grad_()
    expected = cross_entropy(whole, targets, ignore_index=IGNORED, reduction="sum")
    (3 * expected).backward()  # type: ignore[no-untyped-call]
    each = -(-words // size)
    own = logits[:, rank * each : (rank + 1) * each].clone().requires_grad_()
    found = sum_over_ranks(own, targets, rank * each, dist.group.WORLD)  # type: ignore[arg-type]
    (3 * found).backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(own.grad, whole.grad[:, rank * each : (rank + 1) * each])  # type: ignore[index]


def check_decoder(size: int, shape: Shape) -> list[int]:
    """Loss and gradients of the split decoder are those of the whole one. Returns the sizes of the loss' messages."""
    torch.manual_seed(5)
    whole, split = Decoder(shape), Decoder(shape)
    split.load_state_dict(whole.state_dict())
    split_decoder(split, init_device_mesh("cpu", (size,)))
    tokens, targets = (torch.randint(shape.vocabulary, (2, 16)) for _ in range(2))
    targets[0, :3] = IGNORED
    expected = whole(tokens, targets=targets)
    expected.backward()
    sent: list[int] = []

    all_reduce: Callable[..., Any] = dist.all_reduce

    def count(tensor: Tensor, *more: Any, **options: Any) -> Any:
        sent.append(tensor.numel())
        return all_reduce(tensor, *more, **options)

    with mock.patch.object(dist, "all_reduce", count):
        found = split(tokens, targets=targets)
    found.backward()
    torch.testing.assert_close(found, expected)
    gradients = {name: parameter.grad for name, parameter in whole.named_parameters()}
    for name, parameter in split.named_parameters():
        gradient = parameter.grad
        gathered = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        torch.testing.assert_close(gathered, gradients[name], rtol=1e-4, atol=1e-5)
    return sent


def main(contract: Contract) -> None:
    world = open_world(contract, rendezvous_seconds=60)
    for words in (3, 250, 256):
        check_function(world.rank, world.size, words)
    for changes in () if trains_tensor_parallel_wrongly() else SHAPED:
        print("SENT", check_decoder(world.size, replace(SHAPES["tiny"], kv_heads=4, **changes)))
    world.close()


if __name__ == "__main__":
    run(main)
