"""The self-check: it passes what is right in all of its phases, says what it has compared, and finds what is wrong."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from task_images.comm.asynchronous import AsynchronousServers
from task_images.comm.base import Strategy
from task_images.comm.drifting import LocalSteps, PostLocalSteps
from task_images.comm.exchange import Message
from task_images.comm.methods import NATIVE
from task_images.comm.presets import PRESETS, resolve
from task_images.comm.reducer import Reducer
from task_images.comm.registered import RegisteredRun
from task_images.comm.selfcheck import Checked, MethodWrongError, Training, check_method, shorten
from task_images.comm.wire import PUSH
from tests.unit.task_images.comm.threads import ThreadWorld, run_ranks

OWN = [name for name in PRESETS if resolve(name).engine not in NATIVE]
WITHOUT_SCALE = ("bytescheduler", "bytescheduler-ps", "dear")


def check(name: str, size: int = 2, prepare: Callable[[Strategy], None] | None = None) -> Checked:
    method = resolve(name)
    return run_ranks(size, lambda world: check_method(world, method, prepare), method)[0]


@pytest.mark.parametrize("name", [name for name in OWN if name != "noop"])
@pytest.mark.parametrize(
    "sizes", [[3], pytest.param([2, 3], marks=pytest.mark.nightly)], ids=["three", "two and three"]
)
def test_every_method_passes_on_two_and_three_ranks(name: str, sizes: list[int]) -> None:
    for size in sizes:
        found = check(name, size)
        both = {"dgc": ["SGD"], "onebit-adam": ["AdamW"]}.get(name, ["SGD", "AdamW"])
        assert [text.split()[0] for text in found.settings] == both
        assert all(("clip, loss scale" in text) is (name not in WITHOUT_SCALE) for text in found.settings)


@pytest.mark.parametrize(
    ("name", "sums", "training", "shortened"),
    [
        ("bsp", "exact", "as torch's optimizer with the mean gradient", ""),
        ("eftopk", "received values plus residuals", "with and without a growing loss scale", ""),
        ("signsgd-mv", "not compared, only that ranks agree", "with and without a growing loss scale", ""),
        ("postlocalsgd", "the mean equals", "alone, with the same gradients", "sync=postlocal:2,2"),
        ("async-ps", "the mean equals", "about as torch's optimizer alone", ""),
        ("diloco", "not compared", "with and without", "options=steps=2,outer_rate=0.7,outer_momentum=0.9"),
        ("onebit-adam", "not compared, only that ranks agree", "with and without", "options=warmup_steps=2"),
        ("noop", "no communication", "not compared", ""),
    ],
)
def test_it_says_what_was_compared_and_no_more(name: str, sums: str, training: str, shortened: str) -> None:
    found = check(name)
    assert sums in found.sums
    assert training in found.training
    assert found.shortened == shortened
    assert found.to_dict()["sums"] == found.sums
    assert str(found).startswith(f"sums: {found.sums}")


def test_phases_that_begin_later_begin_within_the_check() -> None:
    assert shorten(resolve("postlocalsgd")).sync == "postlocal:2,2"
    assert shorten(resolve("localsgd")).sync == "local:2"
    assert shorten(resolve("localsgd", {"sync": "local:1"})).sync == "local:1"
    assert shorten(resolve("powersgd", {"warmup": "1000"})).warmup == "2"
    assert shorten(resolve("slowmo")).options == "steps=2,beta=0.5,alpha=1"
    assert check("mgwfbp").updates > check("fusion").updates  # after its plan is made


def spoil(name: str, size: int = 2, prepare: Callable[[Strategy], None] | None = None) -> str:
    with pytest.raises(MethodWrongError) as error:
        check(name, size, prepare)
    return str(error.value)


def test_a_whole_step_of_every_worker_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients divided by the workers, and the change as it is: right for plain SGD, twice the decay and Adam's step
    on two workers."""

    def reduce(strategy: AsynchronousServers) -> None:
        for item in strategy._parameters:
            assert item.grad is not None
            item.grad.mul_(strategy._weight / strategy._total)

    def exchange(strategy: AsynchronousServers, updated: bool, rate: float) -> None:
        strategy._take(strategy._ask(PUSH, strategy._collect() - strategy._base))

    monkeypatch.setattr(AsynchronousServers, "_reduce", reduce)
    monkeypatch.setattr(AsynchronousServers, "_exchange", exchange)
    assert "training by" in spoil("async-ps")


@pytest.mark.parametrize("name", ["ef-signsgd", "eftopk", "powersgd", "dgc"])
def test_a_residual_that_an_overflow_changes_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Message, "restore", lambda message: None)
    assert "after an overflow, and differs" in spoil(name)


@pytest.mark.parametrize("name", ["ef-signsgd", "eftopk", "powersgd"])
def test_a_residual_in_units_of_the_loss_scale_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = Reducer.begin

    def begin_scaled(strategy: Reducer, *values: Any, **more: Any) -> None:
        begin(strategy, *values, **more)
        if strategy._scale is not None:
            strategy._share, strategy._divisor = strategy._share * strategy._scale.value, strategy._scale.value

    monkeypatch.setattr(Reducer, "begin", begin_scaled)
    assert "growing loss scale" in spoil(name)


def test_a_limit_of_clipping_in_units_of_the_loss_scale_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    clip = Reducer._clip_own

    def clip_scaled(strategy: Reducer, limit: float) -> None:
        clip(strategy, limit / (strategy._scale.value if strategy._scale else 1.0))

    monkeypatch.setattr(Reducer, "_clip_own", clip_scaled)
    assert "clip" in spoil("dgc")


def test_a_wrong_average_of_a_phase_that_begins_later_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    @torch.no_grad()
    def add_up(strategy: PostLocalSteps) -> None:
        for parameter in strategy._parameters:
            strategy._link.all_reduce(parameter.detach())

    monkeypatch.setattr(PostLocalSteps, "_average", add_up)
    assert "postlocalsgd failed" in spoil("postlocalsgd")


def test_an_average_over_some_of_the_ranks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    average = LocalSteps._average

    def average_some(strategy: LocalSteps) -> None:
        own = strategy._collect()
        average(strategy)
        if strategy.world.rank == 2:
            strategy._distribute(own)

    monkeypatch.setattr(LocalSteps, "_average", average_some)
    assert "localsgd failed" in spoil("localsgd", 3)


def test_a_skip_of_one_rank_alone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others make an update that must not be."""
    monkeypatch.setattr(Reducer, "_agree", lambda strategy, finite: True)
    assert "update 7 overflow, and the update was made" in spoil("eftopk")


def test_updates_that_are_skipped_without_an_overflow_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RegisteredRun, "_ask_all", lambda strategy, finite: False)
    assert "are finite, and it was skipped" in spoil("onebit-adam")


def test_tensors_of_small_gradients_count_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousandth of the others' magnitude: what is lost there was below the largest error that was allowed."""
    take = Reducer._take

    def lose(strategy: Reducer, slot: Any) -> None:
        take(strategy, slot)
        if slot.name == "layers.second.weight" and strategy.world.rank == 1:
            slot.view.zero_()

    monkeypatch.setattr(Reducer, "_take", lose)
    assert "differ by" in spoil("eftopk")


def test_its_gradients_differ_between_ranks_unless_they_train_on_their_own() -> None:
    def draw(world: ThreadWorld, name: str) -> dict[str, Tensor]:
        return Training(world, resolve(name))._gradients(world.rank, 1)

    for name, are_equal in (("fusion", False), ("localsgd", True)):
        one, other = run_ranks(2, lambda world, name=name: draw(world, name))  # type: ignore[misc]
        assert torch.equal(one["first"], other["first"]) is are_equal
