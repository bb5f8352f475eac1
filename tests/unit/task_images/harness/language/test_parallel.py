"""Models over many ranks, seen from one of them, the others being fakes: what it draws, gathers and fetches early."""

import os
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from task_images.contract import Contract
from task_images.gpt_pretraining.model import Decoder, count_unused_rows
from task_images.gpt_pretraining.shapes import SHAPES, Shape
from task_images.gpt_pretraining.split import split_decoder
from task_images.harness.distributed import World
from task_images.harness.errors import EnvironmentUnfitError
from task_images.harness.language import parallel
from task_images.harness.language.layout import Layout, plan_layout
from task_images.harness.language.parallel import SpreadOptions, draw_rows, find_part, spread
from tests.sampling import sampled

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
    sampled(
        [("fsdp2", 8, 0), ("fsdp2", 3, 0), ("hsdp", 8, 0), ("hsdp", 4, 0), ("tp", 2, 2), ("tp+fsdp2", 8, 2)],
        keep=[("fsdp2", 3, 0), ("hsdp", 4, 0), ("tp", 2, 2)],
    ),
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


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts matrix products and activations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = {"mm": 0, "gelu": 0}

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        name = function.name().removeprefix("aten::")
        kind = {"addmm": "mm", "mm": "mm", "gelu": "gelu"}.get(name)
        if kind:
            self.counts[kind] += 1
        return function(*arguments, **(options or {}))


@pytest.mark.parametrize(
    ("checkpointing", "products", "activations"), [("none", 5, 1), ("selective", 5, 2), ("full", 6, 2)]
)
def test_checkpointing_changes_what_is_recomputed_and_no_value(
    checkpointing: str, products: int, activations: int
) -> None:
    """Two products forward and, without the gradient of the block's inputs, three backward: selective checkpointing
    recomputes only the activation, full checkpointing also the first product (torch stops once it has all inputs)."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 4))
    inputs = torch.randn(3, 6)
    expected = block(inputs)
    expected.square().sum().backward()
    gradients = [parameter.grad.clone() for parameter in block.parameters() if parameter.grad is not None]
    block.zero_grad()
    run = parallel.choose_runner(checkpointing)
    with Products() as counter:
        outputs = block(inputs) if run is None else run(block, inputs)
        outputs.square().sum().backward()
    assert torch.equal(outputs, expected)
    for parameter, gradient in zip(block.parameters(), gradients, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, gradient)
    assert counter.counts == {"mm": products, "gelu": activations}


def test_blocks_may_have_several_inputs_and_only_three_kinds_of_checkpointing_exist() -> None:
    block = nn.Bilinear(2, 3, 1)
    one, other = torch.ones(1, 2), torch.ones(1, 3)
    for run in (parallel.checkpoint_fully, parallel.checkpoint_selectively):
        assert torch.equal(run(block, one, other), block(one, other))
    with pytest.raises(KeyError):
        parallel.choose_runner("some")


@pytest.mark.parametrize(
    ("operation", "kept"),
    [
        (torch.ops.aten.mm.default, True),
        (torch.ops.aten.addmm.default, True),
        (torch.ops.aten.bmm.default, True),
        (torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default, True),
        (torch.ops.aten.gelu.default, False),
        (torch.ops.aten.native_layer_norm.default, False),
        (torch.ops.aten.add.Tensor, False),
    ],
)
def test_products_and_attention_are_stored_and_cheap_operations_recomputed(operation: Any, kept: bool) -> None:
    expected = CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
    assert parallel._keep_products(None, operation) == expected


# --- initial values -------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """A table that is also the output layer, a normalization, and a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(200, 40)
        self.norm = nn.LayerNorm(40)
        self.output = nn.Linear(40, 200)
        self.output.weight = self.table.weight


def test_memory_is_allocated_once_for_tied_parameters() -> None:
    with torch.device("meta"):
        model = Tied()
    parallel.allocate(model, torch.device("cpu"))
    assert model.output.weight is model.table.weight
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert torch.__future__.get_swap_module_params_on_conversion() is False


def test_scales_begin_with_1_biases_with_0_and_matrices_with_their_deviation() -> None:
    asked: list[str] = []

    def deviation(name: str) -> float | None:
        asked.append(name)
        return None

    model = Tied()
    parallel.fill_parameters(model, deviation, 1, {"table.weight": 50})
    assert asked == ["table.weight", "norm.weight", "norm.bias", "output.bias"]  # tied ones once
    assert bool((model.norm.weight == 1).all())
    assert not model.norm.bias.any()
    assert not model.output.bias.any()
    used, unused = model.table.weight[:150], model.table.weight[150:]
    assert not unused.any()
    assert used.std().item() == pytest.approx(0.02, rel=0.05)  # as in GPT-2, unless told otherwise
    whole = Tied()
    parallel.fill_parameters(whole, lambda name: 0.04, 1)
    torch.testing.assert_close(whole.table.weight[:128], 2 * model.table.weight[:128])


def test_each_tensor_and_each_seed_has_its_own_values() -> None:
    model, other = (nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)]) for _ in range(2))
    parallel.fill_parameters(model, lambda name: 1.0, 1)
    parallel.fill_parameters(other, lambda name: 1.0, 2)
    first, _, second, _ = model.parameters()
    assert not torch.equal(first, second)
    assert not torch.equal(first, next(other.parameters()))


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


def test_an_optimizer_must_have_exactly_the_models_parameters() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    model.bias.requires_grad = False
    parallel.check_optimizer(torch.optim.SGD([model.weight]), model)
    for held in ([model.weight, model.bias], [other.weight], [model.weight, other.weight]):
        with pytest.raises(RuntimeError, match="made before the model was sharded"):
            parallel.check_optimizer(torch.optim.SGD(held), model)
    model.bias.requires_grad = True
    with pytest.raises(RuntimeError, match="not the model's"):
        parallel.check_optimizer(torch.optim.SGD([model.weight]), model)
    twice = torch.optim.SGD(model.parameters())
    twice.param_groups.append({**twice.param_groups[0]})
    with pytest.raises(RuntimeError, match="not the model's"):
        parallel.check_optimizer(twice, model)


@pytest.mark.parametrize(("name", "ranks"), [("ddp", 1), ("ddp", 4), ("fsdp2", 1)])
def test_replicas_and_single_ranks_need_no_mesh(name: str, ranks: int) -> None:
    nothing: Any = None
    assert parallel.make_mesh(nothing, plan_layout(name, ranks)) is None


@pytest.mark.parametrize(
    ("version", "wrong"), [("2.10.1", False), ("2.11.0+cu130", True), ("2.12.0", False), ("2.1.1", False)]
)
def test_tensor_parallelism_is_rejected_with_the_torch_that_trains_it_wrongly(
    monkeypatch: pytest.MonkeyPatch, unrequired: None, version: str, wrong: bool
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(parallel, "init_device_mesh", lambda kind, sizes, mesh_dim_names: (kind, sizes))
    world: Any = SimpleNamespace(device=torch.device("cpu"))
    if wrong:
        with pytest.raises(EnvironmentUnfitError, match="gives other losses than one process") as error:
            parallel.make_mesh(world, plan_layout("tp", 2))
        assert "torch 2.12 or later" in str(error.value.hint)
    else:
        assert parallel.make_mesh(world, plan_layout("tp", 2)) == ("cpu", (1, 1, 2))
    # With FSDP its gradients are right.
    assert parallel.make_mesh(world, plan_layout("tp+fsdp2", 4)) == ("cpu", (1, 2, 2))


def test_a_model_that_cannot_be_split_is_rejected_before_it_gets_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "make_mesh", lambda world, layout: object())
    with torch.device("meta"):
        model = Tied()
    world: Any = SimpleNamespace(device=torch.device("cpu"))
    with pytest.raises(ValueError, match="does not support tensor parallelism"):
        spread(world, plan_layout("tp", 2), SpreadOptions(), model, [], deviation=lambda name: None, seed=1)
    assert model.table.weight.is_meta


@pytest.mark.parametrize(
    ("how", "compiled"),
    [
        ("no", []),
        ("blocks", [("Linear", None), ("LayerNorm", None)]),
        ("whole", [("Tied", None)]),
        ("graphs", [("Tied", "reduce-overhead")]),
    ],
)
def test_blocks_or_the_whole_model_are_compiled(
    monkeypatch: pytest.MonkeyPatch, how: str, compiled: list[tuple[str, str | None]]
) -> None:
    """With fullgraph, so that a graph break is an error and not a silent slowdown; CUDA graphs are torch's mode
    reduce-overhead."""
    found: list[tuple[str, str | None]] = []

    def compile_module(self: nn.Module, fullgraph: bool = False, mode: str | None = None) -> None:
        assert fullgraph
        found.append((type(self).__name__, mode))

    monkeypatch.setattr(nn.Module, "compile", compile_module)
    monkeypatch.setattr(parallel, "require_compiler", lambda kind: None)
    with torch.device("meta"):
        model = Tied()
    world: Any = SimpleNamespace(device=torch.device("cpu"))
    spread(
        world, plan_layout("ddp", 1), SpreadOptions(compile=how), model, [model.output],
        deviation=lambda name: None, seed=1, compiled=[model.norm],
    )  # fmt: skip
    assert found == compiled
    assert not model.table.weight.is_meta
