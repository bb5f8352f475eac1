"""One update: exact means of sums, clipping after them, loss scale and overflow, checkpoints."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from task_images.comm.allreduce import GradientAllReduce
from task_images.comm.base import Placement
from task_images.contract import Contract
from task_images.harness.accumulation import GradientUpdate
from task_images.harness.checkpoint import load_checkpoint, save_checkpoint
from task_images.harness.distributed import World, open_world
from task_images.harness.errors import DivergedError, EnvironmentUnfitError, TaskUsageError
from task_images.harness.precision import LossScale, Precision
from task_images.harness.tracker import Tracker

CPU = torch.device("cpu")
# The formats of a GPU without its autocast: scaling and skipping are the same everywhere.
SCALED = torch.device("cuda")


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    threads = torch.get_num_threads()
    yield open_world(Contract({"OMP_NUM_THREADS": "1"}))
    torch.set_num_threads(threads)


def make(world: World, precision: Precision, clip: float | None = None) -> tuple[nn.Linear, GradientUpdate]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1, bias=False)
    strategy, tracker = GradientAllReduce(), Tracker()
    strategy.attach(Placement(world), model, lambda model: torch.optim.SGD(model.parameters(), lr=0.0), tracker=tracker)
    return model, GradientUpdate(strategy, tracker, precision, clip)


X = torch.arange(12.0).reshape(3, 4)


def test_sums_of_passes_become_the_mean_over_all_terms(world: World) -> None:
    model, update = make(world, Precision("fp32", CPU))
    before = model.weight.detach().clone()
    update.begin(terms=3, passes=2)
    update.backward(model(X[:1]).sum())
    update.backward(model(X[1:]).sum())
    assert update.apply(0.5)
    torch.testing.assert_close(model.weight.detach(), before - 0.5 * X.mean(0))
    update.begin(terms=3, passes=1)
    assert update.apply(0.5)
    torch.testing.assert_close(model.weight.detach(), before - 0.5 * X.mean(0))  # gradients had been cleared


def test_the_norm_is_clipped_after_the_mean(world: World) -> None:
    steps = []
    for passes in (1, 3):
        model, update = make(world, Precision("fp32", CPU), clip=2.0)
        before = model.weight.detach().clone()
        update.begin(3, passes)
        for part in torch.split(X, 3 // passes):
            update.backward(model(part).sum())
        update.apply(1.0)
        steps.append(before - model.weight.detach())
        assert float(steps[-1].norm()) == pytest.approx(2.0, abs=1e-4)
    torch.testing.assert_close(*steps)


def test_the_loss_scale_cancels_out_and_an_overflow_leaves_the_model_alone(world: World) -> None:
    scaled = Precision("fp16", SCALED, LossScale(1024.0, window=1))
    models = []
    for precision in (Precision("fp32", CPU), scaled):
        model, update = make(world, precision, clip=3.0)
        update.begin(3, 1)
        update.backward(model(X).sum())
        assert update.apply(0.5)
        models.append(model.weight.detach().clone())
    torch.testing.assert_close(*models)
    assert scaled.factor == 2048.0  # grown, after a window of one
    update.backward(model(X * torch.inf).sum())
    assert not update.apply(0.5)
    assert torch.equal(model.weight.detach(), models[1])
    assert (scaled.factor, update.skipped) == (1024.0, 1)
    update.backward(model(X).sum())
    assert update.apply(0.5)


def test_without_a_loss_scale_an_overflow_is_the_end(world: World) -> None:
    model, update = make(world, Precision("fp32", CPU))
    update.backward(model(X * torch.nan).sum())
    with pytest.raises(DivergedError, match="norm of the gradient is nan"):
        update.apply(0.5)


def test_a_checkpoint_is_replaced_only_as_a_whole(world: World, tmp_path: Path) -> None:
    path = tmp_path / "folder" / "checkpoint.pt"
    save_checkpoint(world, path, "a_task", {"size": 3, "weights": torch.ones(3)})
    with pytest.raises(AttributeError):
        save_checkpoint(world, path, "a_task", {"bad": lambda: None})
    state = load_checkpoint(world, path, "a_task", {"size": 3})
    assert state["weights"].tolist() == [1.0] * 3


def test_a_checkpoint_of_something_else(world: World, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(world, path, "a_task", {"size": 3})
    with pytest.raises(TaskUsageError, match="made with size = 3, this run has 4"):
        load_checkpoint(world, path, "a_task", {"size": 4})
    with pytest.raises(TaskUsageError, match="not a checkpoint of another"):
        load_checkpoint(world, path, "another", {})
    torch.save([1, 2], path)
    with pytest.raises(TaskUsageError, match="not a checkpoint of"):
        load_checkpoint(world, path, "a_task", {})


@pytest.mark.parametrize("content", [b"", b"PK\3\4 broken", b"\x80\x02cposix\nsystem\n."])
def test_a_damaged_checkpoint_runs_no_code(world: World, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(content)
    with pytest.raises(EnvironmentUnfitError, match="cannot be read as a checkpoint"):
        load_checkpoint(world, path, "a_task", {})
