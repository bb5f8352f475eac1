"""What custom methods get from `door.Run`: gradients, weights and means, against numpy."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from task_images.comm.door import RegisteredMethod
from task_images.comm.methods import Method
from task_images.comm.registered import RegisteredRun
from task_images.harness.errors import TaskUsageError
from task_images.harness.precision import LossScale
from tests.unit.task_images.comm.threads import ThreadWorld, run_ranks

METHOD = Method.from_dict({"name": "custom", "engine": "registered", "options": "alpha=0.5,steps=3"})


class Averaging(RegisteredMethod):
    """The mean of all gradients; notes each call."""

    name = "custom"

    def __init__(self) -> None:
        self.calls: list[str] = []

    def start(self, run: Any) -> None:
        self.calls.append(f"start {run.update}")
        run.state["sum"] = torch.zeros(5)

    def reduce(self, run: Any) -> None:
        self.calls.append(f"reduce {run.update}")
        run.gradients = run.average(run.gradients)

    def exchange(self, run: Any, rate: float) -> None:
        self.calls.append(f"exchange {run.update} {rate}")


class Alone(Averaging):
    """Each rank has its own model."""

    identical = False

    def reduce(self, run: Any) -> None:
        self.calls.append(f"reduce {run.update}")


class Parameters(nn.Module):
    """A matrix and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.bias = nn.Parameter(torch.arange(1.0, 5.0).view(2, 2)), nn.Parameter(torch.tensor([5.0]))


def attach(world: ThreadWorld, method: RegisteredMethod, rate: float = 1.0, **options: Any) -> RegisteredRun:
    """A model whose weights are 1 to 5."""
    run = RegisteredRun(METHOD, method)
    run.attach(world, Parameters(), options.get("optimizer", lambda it: torch.optim.SGD(it.parameters(), rate)))
    return run


def accumulate(
    run: RegisteredRun, gradient: Tensor, weight: float = 1.0, total: float = 2.0, scale: Any = None
) -> None:
    run.begin(weight, total, 1, scale)
    matrix, bias = run.model.parameters()
    matrix.grad, bias.grad = gradient[:4].view(2, 2).clone(), gradient[4:].clone()


def own(rank: int) -> Tensor:
    return torch.tensor([1.0, -2.0, 3.0, -4.0, 5.0]) * (rank + 1)


# --- reduce ---------------------------------------------------------------------------------------------------------


def test_gradients_of_unequal_batches_have_their_weight() -> None:
    """3 and 1 of 4 samples: the mean over samples is 3/4 and 1/4 of the ranks' gradients."""

    def body(world: ThreadWorld) -> Tensor:
        run = attach(world, Averaging())
        accumulate(run, own(world.rank), weight=(3.0, 1.0)[world.rank], total=4.0)
        run.step(1.0)
        return run.weights

    expected = torch.arange(1.0, 6.0) - (3 * own(0) + own(1)) / 4
    for weights in run_ranks(2, body):
        torch.testing.assert_close(weights, expected)


def test_a_loss_scale_is_divided_out_once_before_the_hook() -> None:
    seen: list[Tensor] = []

    class Seeing(Averaging):
        def reduce(self, run: Any) -> None:
            seen.append(run.gradients)
            super().reduce(run)

    def body(world: ThreadWorld) -> Tensor:
        run = attach(world, Seeing())
        accumulate(run, 8 * own(0), scale=LossScale(8.0))
        assert run.step(1.0)
        return run.weights

    for weights in run_ranks(2, body):
        torch.testing.assert_close(weights, torch.arange(1.0, 6.0) - own(0))
    assert [gradient.tolist() for gradient in seen] == [own(0).tolist()] * 2


@pytest.mark.parametrize("method", [Averaging, Alone])
def test_an_overflow_skips_the_hook_and_lowers_the_scale(method: type[Averaging]) -> None:
    """On all ranks if they must stay identical; otherwise only on the rank that has it."""

    def body(world: ThreadWorld) -> tuple[bool, list[str], float, bool]:
        made, scale = method(), LossScale(8.0)
        run = attach(world, made)
        accumulate(run, own(0) * (torch.inf if world.rank else 1.0), scale=scale)
        updated = run.step(1.0)
        return updated, made.calls, scale.value, bool(run.weights.isfinite().all())

    first, second = run_ranks(2, body)
    assert second == (False, ["start 1", "exchange 1 1.0"], 4.0, True)
    if method is Averaging:
        assert first == second
    else:
        assert first == (True, ["start 1", "reduce 1", "exchange 1 1.0"], 8.0, True)


def test_an_update_after_an_overflow_is_made() -> None:
    def body(world: ThreadWorld) -> list[bool]:
        run, scale, made = attach(world, Averaging()), LossScale(8.0), []
        for factor in (torch.inf, 1.0):
            accumulate(run, own(0) * factor, scale=scale)
            made.append(run.step(1.0))
        return made

    assert run_ranks(2, body) == [[False, True]] * 2


def test_one_rank_trains_without_any_hook() -> None:
    def body(world: ThreadWorld) -> tuple[Tensor, list[str], int]:
        method = Averaging()
        run = attach(world, method)
        accumulate(run, own(0), weight=2.0, total=4.0)
        run.step(0.5)
        return run.weights, method.calls, run.update

    [(weights, calls, update)] = run_ranks(1, body)
    torch.testing.assert_close(weights, torch.arange(1.0, 6.0) - 0.25 * own(0))
    assert (calls, update) == ([], 2)


def test_hooks_see_updates_from_1_and_their_learning_rate() -> None:
    def body(world: ThreadWorld) -> list[str]:
        method = Averaging()
        run = attach(world, method)
        for rate in (0.5, 0.25):
            accumulate(run, own(0))
            run.step(rate)
        return method.calls

    assert run_ranks(2, body)[0] == ["start 1", "reduce 1", "exchange 1 0.5", "reduce 2", "exchange 2 0.25"]


@pytest.mark.parametrize("is_done", [True, False])
def test_a_step_of_the_method_replaces_that_of_the_optimizer(is_done: bool) -> None:
    class Stepping(Averaging):
        def step(self, run: Any, rate: float) -> bool:
            run.weights = run.weights + 10 * rate
            return is_done

    def body(world: ThreadWorld) -> Tensor:
        run = attach(world, Stepping())
        accumulate(run, own(0))
        run.step(0.5)
        return run.weights

    expected = torch.arange(1.0, 6.0) + 5 - (0 if is_done else 0.5) * own(0)
    torch.testing.assert_close(run_ranks(2, body)[0], expected)


# --- what hooks read and write --------------------------------------------------------------------------------------


def look(body: Callable[[RegisteredRun, int], Any], size: int = 2, **options: Any) -> list[Any]:
    return run_ranks(size, lambda world: body(attach(world, Averaging(), **options), world.rank))


def test_weights_and_gradients_are_copies() -> None:
    def body(run: RegisteredRun, rank: int) -> None:
        accumulate(run, own(rank))
        run.weights.zero_()
        run.gradients.zero_()
        assert run.weights.tolist() == [1, 2, 3, 4, 5]
        assert torch.equal(run.gradients, own(rank))
        given = torch.full((5,), 7.0)
        run.gradients = run.weights = given
        given.zero_()
        assert run.weights.tolist() == run.gradients.tolist() == [7.0] * 5

    look(body)


def test_a_parameter_without_gradient_has_zeros() -> None:
    def body(run: RegisteredRun, rank: int) -> list[float]:
        accumulate(run, own(0))
        next(run.model.parameters()).grad = None
        found: list[float] = run.gradients.tolist()
        return found

    assert look(body) == [[0, 0, 0, 0, 5]] * 2


def test_the_mean_is_over_all_ranks() -> None:
    def body(run: RegisteredRun, rank: int) -> Tensor:
        assert run.size == 3
        return run.average(own(rank))

    for mean in look(body, 3):
        torch.testing.assert_close(mean, 2 * own(0))


def test_signs_are_scaled_by_the_mean_magnitude_of_each_tensor() -> None:
    def body(run: RegisteredRun, rank: int) -> tuple[Tensor, Tensor]:
        return run.average_signs(own(rank) * (1 - 2 * rank))

    def compress(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.concatenate([np.sign(part) * np.abs(part).mean() for part in (values[:4], values[4:])])

    ranks = [compress((own(rank) * (1 - 2 * rank)).numpy()) for rank in range(2)]
    for rank, (mean, compressed) in enumerate(look(body)):
        np.testing.assert_allclose(mean.numpy(), np.mean(ranks, 0), rtol=1e-6)
        np.testing.assert_allclose(compressed.numpy(), ranks[rank], rtol=1e-6)


def test_options_are_numbers_by_name() -> None:
    assert look(lambda run, rank: run.options)[0] == {"alpha": 0.5, "steps": 3.0}


def test_the_optimizers_state_is_flat() -> None:
    def body(run: RegisteredRun, rank: int) -> tuple[Tensor, Tensor]:
        accumulate(run, own(0), total=2.0)
        run.step(0.1)
        return run.optimizer_state("exp_avg"), run.optimizer_state("step")

    mean, steps = look(body, optimizer=lambda it: torch.optim.AdamW(it.parameters(), betas=(0.75, 0.99)))[0]
    torch.testing.assert_close(mean, 0.25 * own(0))  # (1 - beta1) g
    assert steps.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(("kind", "factor"), [("AdamW", 1 - 0.1 * 0.5), ("Adam", 1.0)])
def test_only_decoupled_decay_shrinks_weights(kind: str, factor: float) -> None:
    """Adam adds its decay to the gradient; AdamW multiplies weights by 1 - rate x decay (torch.optim.AdamW)."""

    def body(run: RegisteredRun, rank: int) -> Tensor:
        return run.decayed_weights(0.1)

    def make(model: nn.Module) -> torch.optim.Optimizer:
        optimizer: type[torch.optim.Adam] = getattr(torch.optim, kind)
        return optimizer(model.parameters(), weight_decay=0.5)

    torch.testing.assert_close(look(body, optimizer=make)[0], factor * torch.arange(1.0, 6.0))


# --- start and state ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2])
def test_an_optimizer_that_the_method_does_not_support_is_rejected_if_there_are_other_ranks(size: int) -> None:
    class Choosy(Averaging):
        optimizers = ("Adam", "AdamW")

    def body(world: ThreadWorld) -> None:
        attach(world, Choosy(), optimizer=lambda it: torch.optim.AdamW(it.parameters()))
        attach(world, Choosy())

    if size == 1:
        run_ranks(1, body)
        return
    with pytest.raises(TaskUsageError, match="custom needs the optimizer Adam or AdamW; the task has SGD"):
        run_ranks(2, body)


def test_only_identical_models_are_compared_and_only_others_are_averaged() -> None:
    def body(world: ThreadWorld) -> tuple[bool, bool]:
        means = []
        for method in (Averaging(), Alone()):
            run = attach(world, method)
            run.weights = own(world.rank)
            with run.consensus():
                means.append(run.weights.tolist() == (1.5 * own(0)).tolist())
            assert torch.equal(run.weights, own(world.rank))
        assert (run.traits.identical, run.traits.gradients_agree) == (False, False)
        assert attach(world, Averaging()).traits.identical
        return means[0], means[1]

    assert run_ranks(2, body) == [(False, True)] * 2


def test_a_resumed_rank_has_its_own_weights_and_state() -> None:
    def body(world: ThreadWorld) -> None:
        run = attach(world, Alone())
        accumulate(run, own(world.rank))
        run.step(1.0)
        run.state["sum"] += world.rank + 1
        kept = run.method_state()
        resumed = attach(world, Alone())
        resumed.load_method_state(kept)
        assert torch.equal(resumed.weights, run.weights)
        assert resumed.state["sum"].tolist() == [world.rank + 1.0] * 5
        assert resumed.update == 2
        assert kept["ranks"][1 - world.rank] is None

    run_ranks(2, body)
