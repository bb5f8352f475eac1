"""The loop without torch: what a framework gets from it once it can update, validate, and write what it holds."""

import contextlib
import io
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from task_images.contract import CATEGORIES, Contract, parse_event
from task_images.harness.array_checkpoint import load_arrays, save_arrays
from task_images.harness.errors import DivergedError, EnvironmentUnfitError, TaskUsageError
from task_images.harness.goals import GoalWatch
from task_images.harness.loop import Loop, Plan, Unit, _count_lost_time
from task_images.harness.report import Reporter
from task_images.harness.schedules import Constant, PerUpdate
from task_images.harness.settings import Protocol
from task_images.harness.tracker import Snapshot
from task_images.harness.updates import SampleBatches, Update
from tests.contract.task_images.ranks import Record

Numbers = np.ndarray[Any, np.dtype[np.float64]]


class OneRank:
    """A world of one, without any framework."""

    rank, size, backend, threads, is_first = 0, 1, "none", 1, True

    def __init__(self, folder: Path) -> None:
        self.contract = Contract({"MLBENCH_OUTPUT_DIR": str(folder)})

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        return [list(values)]

    def sum(self, values: Sequence[float]) -> list[float]:
        return list(values)

    def agree(self, value: float) -> float:
        return value

    def barrier(self) -> None: ...
    def synchronize(self) -> None: ...
    def await_loading(self) -> None: ...

    def peak_memory(self) -> int:
        return 1

    def framework_facts(self) -> Record:
        return {}

    def backend_facts(self) -> dict[str, object]:
        return {}


class Batch(NamedTuple):
    values: Numbers
    total: int

    @property
    def size(self) -> int:
        return len(self.values)


class Values:
    """Eight numbers in four batches, another order in every epoch."""

    steps = 4

    def training(self, epoch: int) -> Iterator[Batch]:
        order = np.random.default_rng(epoch).permutation(8.0 + np.arange(8))
        for start in range(0, 8, 2):
            yield Batch(order[start : start + 2], 2)


@dataclass
class MeanTrainer(Loop[Batch]):
    """Learns the mean of the numbers: the loss is half the mean square of what is left."""

    learned: Numbers = field(default_factory=lambda: np.zeros(1))

    def _attach(self) -> None: ...

    def _update(self, update: Update[Batch], rate: float) -> bool:
        [batch] = update.passes
        errors = self.learned - batch.values
        self.learned -= rate * errors.mean()
        self.losses.add(0.5 * (errors**2).mean(), update.weight)
        return True

    def _read_losses(self, losses: list[float]) -> list[float]:
        return losses

    def _check_replicas(self) -> dict[str, float]:
        return {}

    def _write(self, path: Path, state: Mapping[str, Any]) -> None:
        save_arrays(self.world, path, self.name, state, [self.learned])

    def _read(self, path: Path) -> Mapping[str, Any]:
        state, [learned] = load_arrays(path, self.name, self.identity)
        self.learned = learned.astype(np.float64)
        return state


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
    world, out = OneRank(folder), io.StringIO()
    trainer = MeanTrainer(
        world, Reporter(world, "numbers", synthetic=True), SampleBatches(Values()), PerUpdate(Constant(rate)), plan,
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


def test_training_past_the_goal_stops_the_clock_there(tmp_path: Path) -> None:
    stopped, at_goal = train(tmp_path / "to", Plan(12), goal=1.0)
    trainer, result = train(tmp_path / "past", Plan(12, past_goal=True), goal=1.0)
    assert trainer.curve[-1]["epoch"] == 12 > stopped.curve[-1]["epoch"]
    assert (result["outcome"], result["updates"]) == ("goal_reached", at_goal["updates"])
    assert result["goal"]["value"] == at_goal["goal"]["value"]
    assert result["goal"]["last"] == trainer.curve[-1]["distance"] < result["goal"]["value"]


def test_a_budget_ends_the_training_and_no_goal_does(tmp_path: Path) -> None:
    _, result = train(tmp_path, Plan(10**9, budget=0.05), goal=100.0)
    assert result["outcome"] == "budget_spent"
    assert result["details"]["measured_at_seconds"] >= 0.05


def test_a_budget_is_held_against_the_time_that_the_result_names(tmp_path: Path) -> None:
    def write(trainer: MeanTrainer) -> None:
        trainer.after_validation = lambda epoch, values: time.sleep(0.06)  # longer than what is left of the budget

    _, result = train(tmp_path, Plan(10**9, budget=0.05), goal=100.0, prepare=write)
    assert result["outcome"] == "budget_spent"
    assert result["details"]["measured_at_seconds"] >= 0.05


def test_ranks_whose_clocks_differ_look_at_the_budget_after_the_same_updates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[tuple[int, float]] = []  # after which update rank 0 gave which time
    plan = Plan(10**9, budget=0.5)

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
    _, result = train(tmp_path, Plan(1, protocol=Protocol(1, 2, 3)))
    assert (result["outcome"], result["updates"]) == ("completed", 6)
    measured = result["details"]["throughput_protocol"]
    assert (measured["unit"], measured["per_update"], len(measured["rates"])) == ("numbers", 2.0, 2)


def test_a_resumed_training_goes_on_with_clock_and_arrays(tmp_path: Path) -> None:
    whole, _ = train(tmp_path / "whole", Plan(4))
    first, _ = train(tmp_path / "first", Plan(2, checkpoint=True))
    saved = tmp_path / "first" / "checkpoint.pt"
    rest, result = train(tmp_path / "rest", Plan(4, resume=str(saved)))
    assert [point["epoch"] for point in rest.curve] == [3, 4]
    assert [point["train_loss"] for point in rest.curve] == [point["train_loss"] for point in whole.curve[2:]]
    assert rest.curve[0]["seconds"] > first.curve[-1]["seconds"]
    assert result["details"]["resumed"] == {"epoch": 2, "updates": 8}
    with pytest.raises(TaskUsageError, match=r"was made with seed = 1, this run has 2.*"):
        train(tmp_path / "rest", Plan(4, resume=str(saved)), seed=2)
    saved.write_bytes(saved.read_bytes()[:60])
    with pytest.raises(EnvironmentUnfitError, match="cannot be read as a checkpoint"):
        train(tmp_path / "rest", Plan(4, resume=str(saved)))
    with pytest.raises(EnvironmentUnfitError, match="No such file"):
        train(tmp_path / "rest", Plan(4, resume=str(tmp_path / "none.npz")))


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
    with pytest.raises(DivergedError, match="the training has diverged"), np.errstate(all="ignore"):
        train(tmp_path, Plan(200, loss_every=4), rate=1e200)


# --- what is reported, and when -------------------------------------------------------------------------------------


class Steps(Values):
    """`steps` batches of two numbers."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def training(self, epoch: int) -> Iterator[Batch]:
        for _ in range(self.steps):
            yield Batch(np.full(2, 8.0), 2)


@dataclass
class Log:
    """What a training of epochs of `steps` updates did."""

    trainer: MeanTrainer
    result: Any
    metrics: list[tuple[str, int]]  # name and update
    said: list[str]


def observe(
    folder: Path, steps: int, plan: Plan, *, goal: float = -1.0, prepare: Callable[[MeanTrainer], None] | None = None
) -> Log:
    metrics: list[tuple[str, int]] = []
    said: list[str] = []

    def arrange(trainer: MeanTrainer) -> None:
        trainer.batches = SampleBatches(Steps(steps))
        report: Any = trainer.report
        report.metric = lambda name, *_, **fields: metrics.append((name, fields.get("step", 0)))
        report.say = said.append
        if prepare:
            prepare(trainer)

    trainer, result = train(folder, plan, goal=goal, prepare=arrange)
    return Log(trainer, result, metrics, said)


def updates_of(log: Log, name: str) -> list[int]:
    return [update for metric, update in log.metrics if metric == name]


def test_the_training_loss_is_reported_every_25_updates_and_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    """As in the original benchmark, so that curves have points at the same updates."""
    log = observe(tmp_path, 60, Plan(2))
    assert updates_of(log, "train_loss") == [25, 50, 60, 85, 110, 120]
    assert updates_of(log, "learning_rate") == updates_of(log, "train_loss")


def test_the_loss_at_the_end_of_an_epoch_is_reported_once(tmp_path: Path) -> None:
    assert updates_of(observe(tmp_path, 4, Plan(1, loss_every=2)), "train_loss") == [2, 4]


@pytest.mark.parametrize(
    ("steps", "every", "expected"),
    [(8, 0, [8]), (8, 3, [3, 6, 8]), (7, 3, [3, 7]), (8, 4, [4, 8]), (9, 4, [4, 9]), (10, 4, [4, 8, 10])],
)
def test_no_validation_comes_shortly_before_that_at_the_end_of_an_epoch(
    tmp_path: Path, steps: int, every: int, expected: list[int]
) -> None:
    """At least half an interval before."""
    log = observe(tmp_path, steps, Plan(1, validate_every=every))
    assert [point["update"] for point in log.trainer.curve] == expected
    assert updates_of(log, "val_global_distance") == expected


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (Plan(2), []),
        (Plan(2, checkpoint=True), [5, 10]),
        (Plan(2, checkpoint_every=3), [3, 6, 9]),
        (Plan(2, checkpoint_every=5), [5, 10]),
        (Plan(2, checkpoint=True, checkpoint_every=4), [4, 5, 8, 10]),
    ],
)
def test_checkpoints_are_written_at_the_end_of_epochs_and_every_so_many_updates(
    tmp_path: Path, plan: Plan, expected: list[int]
) -> None:
    written: list[int] = []

    def note(trainer: MeanTrainer) -> None:
        trainer._write = lambda path, state: written.append(state["position"]["total"])  # type: ignore[method-assign]

    observe(tmp_path, 5, plan, prepare=note)
    assert written == expected


def test_a_goal_within_an_epoch_ends_it_with_a_checkpoint(tmp_path: Path) -> None:
    log = observe(tmp_path, 9, Plan(3, validate_every=3, checkpoint=True), goal=100.0)
    assert (log.result["outcome"], log.result["updates"]) == ("goal_reached", 3)
    state, _ = load_arrays(tmp_path / "checkpoint.pt", "mean", {"seed": 1})
    assert (state["position"]["in_epoch"], state["position"]["epoch"]) == (3, 1)


def test_skipped_updates_keep_the_learning_rate_and_are_counted(tmp_path: Path) -> None:
    """The schedule counts changes of the model, so an overflow in fp16 does not shorten a warm-up."""
    rates: list[float] = []

    def arrange(trainer: MeanTrainer) -> None:
        trainer.schedule = PerUpdate(lambda update: 0.01 * update)

        def skip(update: Update[Batch], rate: float) -> bool:
            rates.append(rate)
            trainer.losses.add(1.0, update.weight)
            return len(rates) not in (2, 3)

        trainer._update = skip  # type: ignore[method-assign]

    log = observe(tmp_path, 6, Plan(1), prepare=arrange)
    assert rates == pytest.approx([0.0, 0.01, 0.01, 0.01, 0.02, 0.03])
    assert (log.result["details"]["updates_skipped"], log.result["updates"]) == (2, 6)


def test_an_update_may_learn_more_slowly(tmp_path: Path) -> None:
    rates: list[float] = []

    def arrange(trainer: MeanTrainer) -> None:
        batches, update = trainer.batches.updates, trainer._update

        def slowed(epoch: int, begin: int = 0) -> Iterator[Update[Batch]]:
            for number, each in enumerate(batches(epoch, begin)):
                yield replace(each, rate_factor=0.5**number)

        def note(each: Update[Batch], rate: float) -> bool:
            rates.append(rate)
            return update(each, rate)

        trainer.batches.updates = slowed  # type: ignore[method-assign]
        trainer._update = note  # type: ignore[assignment, method-assign]

    observe(tmp_path, 3, Plan(1), prepare=arrange)
    assert rates == pytest.approx([0.1, 0.05, 0.025])


def test_the_schedule_follows_the_validation_loss_or_without_one_that_of_the_training(tmp_path: Path) -> None:
    seen: list[float] = []

    def arrange(trainer: MeanTrainer) -> None:
        trainer.schedule.after_epoch = seen.append  # type: ignore[assignment, method-assign]

    observe(tmp_path / "with", 4, Plan(2, validate_every=2), prepare=arrange)
    assert seen == [1.0, 1.0]  # at the end of epochs only
    seen.clear()

    def without(trainer: MeanTrainer) -> None:
        arrange(trainer)
        trainer.validate, trainer.goal = None, None

    log = observe(tmp_path / "without", 4, Plan(2), prepare=without)
    assert seen == [point["train_loss"] for point in log.trainer.curve]
    assert log.result["outcome"] == "completed"


def test_a_goal_on_training_samples_needs_no_validation(tmp_path: Path) -> None:
    def arrange(trainer: MeanTrainer) -> None:
        trainer.validate = None
        trainer.goal = GoalWatch("train_error", "<=", 4.0, 8.0, "full")
        trainer._collect_training_values = lambda: {"error": 8.0 - float(trainer.learned[0])}  # type: ignore[method-assign]

    log = observe(tmp_path, 4, Plan(9), prepare=arrange)
    assert log.result["outcome"] == "goal_reached"
    assert [point["train_error"] <= 4.0 for point in log.trainer.curve] == [False, True]  # 8 x 0.9^4 and 8 x 0.9^8
    assert updates_of(log, "train_error") == [4, 8]


def test_throughput_leaves_out_the_first_interval_unless_there_is_no_other(tmp_path: Path) -> None:
    """It has what is done once, e.g. allocating memory and choosing kernels."""
    log = observe(tmp_path, 2, Plan(4))
    for rates, expected in (([1.0, 5.0, 9.0, 6.0], (6.0, 5.0, 9.0)), ([3.0], (3.0, 3.0, 3.0))):
        log.trainer.curve = [{"samples_per_second": rate} for rate in rates]
        found = log.trainer._throughput()
        assert (found["samples_per_second"], found["least"], found["most"]) == expected
        assert 0 <= found["data_wait_share"] <= 1
    # Two samples per update.
    assert log.trainer._updates_per_second(None) == pytest.approx(1.5)
    log.trainer.curve = []
    assert (log.trainer._throughput(), log.trainer._updates_per_second(None)) == ({}, None)


def test_the_protocol_counts_units_and_neither_validates_nor_checks_the_goal(tmp_path: Path) -> None:
    def arrange(trainer: MeanTrainer) -> None:
        trainer.unit = Unit("tokens", 64.0)

    log = observe(tmp_path, 4, Plan(1, protocol=Protocol(3, 2, 5)), goal=100.0, prepare=arrange)
    assert log.result["details"]["throughput_protocol"]["per_update"] == 2 * 64.0
    assert log.trainer.curve == []
    assert log.result.get("goal") is None
    assert log.result["updates"] == 10  # without the warm-up
    assert log.trainer.position.total == 13
    assert log.trainer.position.epoch == 4  # three epochs of 4 updates, and one more
    assert log.metrics == [("tokens_per_second", 0)]


def test_time_lost_before_a_restart_counts_for_the_run_and_not_as_training() -> None:
    earlier = Snapshot(
        dict.fromkeys(CATEGORIES, 1.0), wall=float(len(CATEGORIES)), training=2.0, updates=5, samples=9, epoch=1
    )
    lost = _count_lost_time(earlier, earlier.wall + 30.0)
    assert lost is not None
    assert (lost.wall, lost.training, lost.updates) == (earlier.wall + 30.0, 2.0, 5)
    assert lost.seconds == {**earlier.seconds, "other": 31.0}
    assert _count_lost_time(earlier, 0.0) == earlier  # a clock of another machine
    assert _count_lost_time(None, 0.0) is None
    begun = _count_lost_time(None, 7.0)
    assert begun is not None
    assert (begun.wall, begun.seconds["other"], begun.updates) == (7.0, 7.0, 0)
