"""The loop without torch: what a framework gets from it once it can update, validate, and write what it holds."""

import contextlib
import io
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from task_images.contract import Contract, DivergedError, TaskError, parse_event
from task_images.parameters import ThroughputProtocol
from task_images.report import GoalWatch, Reporter
from task_images.schedules import Constant, PerUpdate
from task_images.train import Loop, Plan, Unit, Update
from task_images.world import World

Numbers = np.ndarray[Any, np.dtype[np.float64]]


class Values:
    """Eight numbers in four updates, another order in every epoch."""

    def count(self, epoch: int) -> int:
        return 4

    def updates(self, epoch: int, begin: int = 0) -> Iterator[Update[Numbers]]:
        order = np.random.default_rng(epoch).permutation(8.0 + np.arange(8))
        for number in range(begin, 4):
            yield Update([order[2 * number : 2 * number + 2]], 1, 2, 2, 2)


@dataclass
class MeanTrainer(Loop[Numbers]):
    """Learns the mean of the numbers: the loss is half the mean square of what is left."""

    learned: Numbers = field(default_factory=lambda: np.zeros(1))

    def _attach(self) -> None: ...

    def _update(self, update: Update[Numbers], rate: float) -> bool:
        [values] = update.passes
        errors = self.learned - values
        self.learned -= rate * errors.mean()
        self.losses.add(0.5 * (errors**2).mean(), update.weight, self.position.in_epoch + 1)
        return True

    def _check_replicas(self) -> dict[str, float]:
        return {}


def train(
    folder: Path,
    plan: Plan,
    *,
    rate: float = 0.1,
    seed: int = 1,
    goal: float = 0.0,
    prepare: Callable[[MeanTrainer], None] = lambda trainer: None,
    close: Callable[[MeanTrainer], Mapping[str, Any]] | None = None,
) -> tuple[MeanTrainer, Any]:
    """The trainer, and the result that it reports. `prepare` comes before the training, `close` is its last work."""
    folder.mkdir(exist_ok=True)
    contract = Contract({"MLBENCH_OUTPUT_DIR": str(folder)})
    world, out = World(contract, torch.device("cpu"), 1, grouped=False), io.StringIO()
    trainer = MeanTrainer(
        world, Reporter(world, "numbers", synthetic=True), Values(), PerUpdate(Constant(rate)), plan,
        name="mean", identity={"seed": seed}, goal=GoalWatch("distance", "<=", goal, 2 * goal, "full"),
        unit=Unit("numbers"),
    )  # fmt: skip
    trainer.validate = lambda epoch: {"loss": 1.0, "distance": abs(11.5 - float(trainer.learned[0]))}
    prepare(trainer)
    if close:
        trainer.closing = lambda: close(trainer)
    with contextlib.redirect_stdout(out):
        trainer.run()
    events = [event for event in map(parse_event, out.getvalue().splitlines()) if event]
    return trainer, next(event for event in events if event["event"] == "result")


def test_a_goal_ends_the_training(tmp_path: Path) -> None:
    trainer, result = train(tmp_path, Plan(100), goal=1.0)
    assert result["outcome"] == "goal_reached"
    assert result["epochs"] == trainer.curve[-1]["epoch"] < 100
    assert (result["updates"], result["samples"]) == (4 * result["epochs"], 8 * result["epochs"])


def test_a_rate_counts_the_waiting_for_data_and_not_the_validation(tmp_path: Path) -> None:
    class SlowValues(Values):
        def updates(self, epoch: int, begin: int = 0) -> Iterator[Update[Numbers]]:
            for update in super().updates(epoch, begin):
                time.sleep(0.02)
                yield update

    def validate(epoch: int) -> dict[str, float]:
        time.sleep(0.3)
        return {"loss": 1.0, "distance": 1.0}

    def slow_down(trainer: MeanTrainer) -> None:
        trainer.work, trainer.validate = SlowValues(), validate

    _, result = train(tmp_path, Plan(2), prepare=slow_down)
    found = result["details"]["throughput"]
    assert found["least"] == found["most"] == found["samples_per_second"] <= 2 / 0.02  # of the second epoch alone
    assert found["data_wait_share"] > 0.5


def test_a_schedule_follows_the_loss_of_the_validation(tmp_path: Path) -> None:
    seen: list[float] = []

    class Following(PerUpdate):
        def after_epoch(self, loss: float) -> None:
            seen.append(loss)

    def follow(trainer: MeanTrainer) -> None:
        trainer.schedule = Following(Constant(0.1))

    trainer, _ = train(tmp_path, Plan(2, validate_every=2), prepare=follow)
    assert seen == [1.0, 1.0]  # of epochs, not of validations within them
    late, _ = train(tmp_path, Plan(2, validate_every=3))  # shortly before the end of an epoch there is none
    assert [[point["update"] for point in each.curve] for each in (trainer, late)] == [[2, 4, 6, 8], [4, 8]]


def test_a_budget_ends_the_training_and_no_goal_does(tmp_path: Path) -> None:
    _, result = train(tmp_path, Plan(10**9, budget_seconds=0.05), goal=100.0)
    assert result["outcome"] == "budget_spent"
    assert result["details"]["measured_at_seconds"] >= 0.05
    assert result["wall_seconds"] >= 0.05  # though the goal was reached at the first validation


def test_a_budget_is_held_against_the_time_that_the_result_names(tmp_path: Path) -> None:
    def write(trainer: MeanTrainer) -> None:
        trainer.after_validation = lambda epoch, values: time.sleep(0.06)  # longer than what is left of the budget

    _, result = train(tmp_path, Plan(10**9, budget_seconds=0.05), goal=100.0, prepare=write)
    assert result["outcome"] == "budget_spent"
    assert result["details"]["measured_at_seconds"] >= 0.05


def test_ranks_whose_clocks_differ_look_at_the_budget_after_the_same_updates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[tuple[int, float]] = []  # after which update rank 0 gave which time
    plan = Plan(10**9, budget_seconds=0.5)

    def lead(trainer: MeanTrainer) -> None:
        def agree(value: float) -> float:
            said.append((trainer.position.total, value))
            return value

        trainer.after_update = lambda: time.sleep(0.02)
        monkeypatch.setattr(trainer.world, "agree", agree)

    def follow(trainer: MeanTrainer) -> None:
        wall, left = trainer._wall, iter(said)

        def agree(value: float) -> float:
            update, agreed = next(left)
            assert update == trainer.position.total
            return agreed

        monkeypatch.setattr(trainer, "_wall", lambda: wall() + 1)
        monkeypatch.setattr(trainer.world, "agree", agree)

    _, first = train(tmp_path, plan, goal=100.0, prepare=lead)
    _, second = train(tmp_path, plan, goal=100.0, prepare=follow)
    assert first["updates"] == second["updates"]


def test_speed_is_measured_in_blocks(tmp_path: Path) -> None:
    _, result = train(tmp_path, Plan(1, protocol=ThroughputProtocol(1, 2, 3)))
    assert (result["outcome"], result["updates"]) == ("completed", 6)
    measured = result["details"]["throughput_protocol"]
    assert (measured["unit"], measured["per_update"], len(measured["rates"])) == ("numbers", 2.0, 2)


def test_an_update_that_is_skipped_keeps_the_learning_rate(tmp_path: Path) -> None:
    """fp16 overflows: the schedule goes on when the model does."""
    rates: list[float] = []

    def overflow_once(trainer: MeanTrainer) -> None:
        trainer.schedule, update = PerUpdate(lambda t: 1 / (1 + t)), trainer._update

        def observed(batch: Update[Numbers], rate: float) -> bool:
            rates.append(rate)
            return update(batch, rate) and len(rates) != 2

        trainer._update = observed  # type: ignore[assignment, method-assign]

    _, result = train(tmp_path, Plan(1), prepare=overflow_once)
    assert rates == [1, 1 / 2, 1 / 2, 1 / 3]
    assert result["details"]["updates_skipped"] == 1


def test_updates_that_are_all_skipped_between_two_reports_are_no_divergence(tmp_path: Path) -> None:
    """fp16 overflows first of all, because the loss scale starts high."""

    def overflow_first(trainer: MeanTrainer) -> None:
        update = trainer._update

        def update_later(batch: Update[Numbers], rate: float) -> bool:
            return trainer.position.total > 0 and update(batch, rate)

        trainer._update = update_later  # type: ignore[assignment, method-assign]

    trainer, result = train(tmp_path, Plan(2, report_every=1), prepare=overflow_first)
    assert result["details"]["updates_skipped"] == 1
    assert np.isfinite([point["train_loss"] for point in trainer.curve]).all()


def test_a_work_that_has_fewer_updates_than_it_says_is_an_error(tmp_path: Path) -> None:
    def promise_more(trainer: MeanTrainer) -> None:
        trainer.work.count = lambda epoch: 5  # type: ignore[method-assign]

    with pytest.raises(TaskError, match="epoch 1 ended after 4 updates, but its count is 5"):
        train(tmp_path, Plan(2), prepare=promise_more)


def test_a_validation_loss_that_is_not_finite_ends_the_training(tmp_path: Path) -> None:
    def diverge(trainer: MeanTrainer) -> None:
        trainer.validate = lambda epoch: {"loss": float("nan"), "distance": 0.0}

    with pytest.raises(DivergedError, match="the validation loss is nan in epoch 1"):
        train(tmp_path, Plan(2), goal=1.0, prepare=diverge)


def test_what_a_task_does_at_its_end_is_not_on_the_clock(tmp_path: Path) -> None:
    """A test set, for example; a goal that was missed has the time of the training alone, too."""

    def close(trainer: MeanTrainer) -> Mapping[str, Any]:
        return {"when": trainer.tracker.snapshot().wall}

    for goal, outcome in ((1.0, "goal_reached"), (0.0, "goal_missed")):
        _, result = train(tmp_path, Plan(20), goal=goal, close=close)
        assert result["outcome"] == outcome
        assert result["wall_seconds"] < result["details"]["when"]
        assert sum(times["rank0"] for times in result["timings"].values()) == pytest.approx(result["wall_seconds"])


def test_a_loss_that_is_not_finite_ends_the_training(tmp_path: Path) -> None:
    with pytest.raises(DivergedError, match="in epoch 1, at step 2: the training has"), np.errstate(all="ignore"):
        train(tmp_path, Plan(200, report_every=3), rate=1e200)
