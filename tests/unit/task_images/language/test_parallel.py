"""Models over many ranks, seen from one of them, the others being fakes: what it draws, gathers and fetches early."""

import os
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from task_images.contract import Contract
from task_images.gpt_pretraining.model import Decoder, count_unused_rows
from task_images.gpt_pretraining.shapes import SHAPES, Shape
from task_images.gpt_pretraining.split import split_decoder
from task_images.language import parallel
from task_images.language.layout import Layout, plan_layout
from task_images.language.parallel import SpreadOptions, draw_rows, find_part, spread
from task_images.world import World
from tests import NIGHTLY

SHAPE = Shape(**{**vars(SHAPES["tiny"]), "vocabulary": 260, "multiple": 64, "tied": False})


@contextmanager
def fake_ranks(rank: int, size: int) -> Iterator[World]:
    """Rank `rank` of a group whose collectives do nothing."""
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        world = object.__new__(World)
        world.__dict__.update(rank=rank, size=size, device=torch.device("cpu"), contract=Contract({}))
        yield world
    finally:
        dist.destroy_process_group()


def make(world: World, layout: Layout) -> Decoder:
    with torch.device("meta"):
        model = Decoder(SHAPE)
    spread(
        world,
        layout,
        SpreadOptions(),
        model,
        model.blocks,
        deviation=lambda name: 0.2,
        seed=1,
        apart=((model.embedding,), (model.output,)),
        plan_tensor=partial(split_decoder, model) if layout.tensor > 1 else None,
        unused_rows=count_unused_rows(SHAPE),
    )
    return model


@pytest.fixture
def unrequired(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "require_sharding", lambda world: None)


def test_ends_of_the_decoder_are_gathered_apart_and_each_group_while_the_one_before_it_computes(
    unrequired: None,
) -> None:
    with fake_ranks(0, 8) as world:
        model = make(world, plan_layout("fsdp2", 8))
        groups = [model.embedding, *model.blocks, model.output]
        assert all(isinstance(group, FSDPModule) for group in groups)
        states = [cast(Any, group)._get_fsdp_state() for group in (model, *groups)]
        sizes = [len(state._fsdp_param_group.fsdp_params) if state._fsdp_param_group else 0 for state in states]
        root, embedding, *_, output = sizes
        assert (root, embedding, output) == (0, 1, 2)  # tables of words, the last norm and the output layer
        assert [state._states_to_forward_prefetch for state in states[1:]] == [*([state] for state in states[2:]), []]
        assert [state._states_to_backward_prefetch for state in states[1:]] == [
            [],
            *([state] for state in states[1:-1]),
        ]


@pytest.mark.parametrize(
    ("name", "size", "tensor"),
    [("fsdp2", 8, 0), ("fsdp2", 3, 0), ("hsdp", 8, 0), ("hsdp", 4, 0), ("tp", 2, 2), ("tp+fsdp2", 8, 2)]
    if NIGHTLY
    else [("fsdp2", 3, 0), ("hsdp", 4, 0), ("tp", 2, 2)],
)
def test_each_rank_draws_its_part_of_the_same_values(
    unrequired: None, monkeypatch: pytest.MonkeyPatch, name: str, size: int, tensor: int
) -> None:
    monkeypatch.setattr(parallel, "DRAWN_ROWS", 4)  # the tensors are small
    alone = fill_alone()
    layout = plan_layout(name, size, tensor)
    # torch finds no groups of meshes again after a group was destroyed, so every rank is a process.
    assert [in_child(partial(check_rank, rank, layout, alone)) for rank in range(size)] == [0] * size


def check_rank(rank: int, layout: Layout, alone: Mapping[str, Tensor]) -> None:
    """That rank `rank` has its part of what one process has, and has drawn little else."""
    drawn: list[int] = []
    normal = Tensor.normal_

    def count(self: Tensor, *args: Any, **options: Any) -> Tensor:
        if not self.is_meta:  # constructors draw there
            drawn.append(self.numel())
        return normal(self, *args, **options)

    Tensor.normal_ = count  # type: ignore[method-assign, assignment]
    with fake_ranks(rank, layout.ranks) as world:
        model = make(world, layout)
        for key, parameter in model.named_parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            part = alone[key]
            for dim, (start, length) in enumerate(find_part(parameter)):
                part = part.narrow(dim, start, length)
            assert torch.equal(local, part), key
    # Tensor-parallel ranks draw all columns of the matrices that they split by columns. Parts begin within blocks.
    assert sum(drawn) <= 1.2 * sum(value.numel() for value in alone.values() if value.dim() > 1) / layout.shards


def in_child(function: Callable[[], None]) -> int:
    """The exit code of a process that does it."""
    child = os.fork()
    if not child:
        code = 1
        try:
            function()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def fill_alone() -> dict[str, Tensor]:
    model = Decoder(SHAPE)
    parallel.fill_parameters(model, lambda name: 0.2, 1, count_unused_rows(SHAPE))
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_rows_are_the_same_whatever_the_part() -> None:
    draw: Callable[[tuple[int, int]], list[tuple[int, Tensor]]] = lambda part: list(  # noqa: E731
        draw_rows("w", part, 150, (3,), 1.0, 7)
    )
    whole = torch.cat([rows for _, rows in draw((0, 200))])
    assert whole.shape == (150, 3)
    for part in ((0, 64), (10, 100), (63, 2), (149, 51), (150, 50)):
        pieces = draw(part)
        assert [first for first, _ in pieces] == sorted({first for first, _ in pieces})
        found = torch.cat([torch.empty(0, 3), *(rows for _, rows in pieces)])
        assert torch.equal(found, whole[part[0] : part[0] + part[1]])
    assert not isinstance(nn.Parameter(whole), DTensor)
    assert find_part(whole) == [(0, 150), (0, 3)]


# --- activation checkpointing ---------------------------------------------------------------------------------------


# --- initial values -------------------------------------------------------------------------------------------------


# --- gradients ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0.5, 1e6, float("inf")])
def test_gradients_are_clipped_as_by_torch(limit: float) -> None:
    def make() -> list[nn.Parameter]:
        made = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(1))]
        made[0].grad, made[1].grad = torch.tensor([1.0, -2.0, 2.0]), torch.full((2, 2), 2.0)
        return made

    ours, theirs = make(), make()
    norm = parallel.clip_gradients(ours, limit)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(theirs, limit))
    assert norm.item() == pytest.approx(5.0)
    for one, other in zip(ours[:2], theirs[:2], strict=True):
        assert one.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(one.grad, other.grad)
    assert ours[2].grad is None


# --- what does not fit ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "ranks"), [("ddp", 1), ("ddp", 4), ("fsdp2", 1)])
def test_replicas_and_single_ranks_need_no_mesh(name: str, ranks: int) -> None:
    nothing: Any = None
    assert parallel.make_mesh(nothing, plan_layout(name, ranks)) is None
