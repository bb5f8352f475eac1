"""What the loop says while it trains, what a checkpoint holds, and how ranks go on after one of them was lost."""

import math
import pickle
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from task_images.contract import CATEGORIES, Contract
from task_images.harness.array_checkpoint import load_arrays
from task_images.harness.errors import DivergedError, EnvironmentUnfitError
from task_images.harness.goals import GoalWatch
from task_images.harness.loop import Plan, Unit, _count_lost_time
from task_images.harness.settings import Protocol
from task_images.harness.tracker import Snapshot
from task_images.harness.updates import SampleBatches, Update
from tests.unit.task_images.harness.test_loop import MeanTrainer, Steps, train


@dataclass
class Told:
    """What a training of epochs of `steps` updates told its reporter."""

    trainer: MeanTrainer
    result: Any
    phases: list[tuple[str, dict[str, Any]]]
    steps: list[tuple[int, int, dict[str, Any]]]
    metrics: list[tuple[str, float, dict[str, Any]]]
    said: list[str]


def tell(folder: Path, steps: int, plan: Plan, prepare: Callable[[Any], None] | None = None, **more: Any) -> Told:
    told = Told(None, None, [], [], [], [])  # type: ignore[arg-type]

    def arrange(trainer: MeanTrainer) -> None:
        trainer.batches = SampleBatches(Steps(steps))
        report: Any = trainer.report
        report.phase = lambda name, **fields: told.phases.append((name, fields))
        report.step = lambda step, count, **fields: told.steps.append((step, count, fields))
        report.metric = lambda name, value, **fields: told.metrics.append((name, value, fields))
        report.say = told.said.append
        if prepare:
            prepare(trainer)

    told.trainer, told.result = train(folder, plan, prepare=arrange, **{"goal": -1.0, **more})
    return told


def test_phases_alternate_between_training_and_validation(tmp_path: Path) -> None:
    told = tell(tmp_path, 4, Plan(2, validate_every=2))
    first, second = {"epoch": 1, "epochs": 2}, {"epoch": 2, "epochs": 2}
    epochs = [
        [("training", epoch), ("validation", epoch), ("training", epoch), ("validation", epoch)]
        for epoch in (first, second)
    ]
    assert told.phases == [*epochs[0], *epochs[1], ("finished", {})]
    assert told.steps == [(step, 4, epoch) for epoch in (first, second) for step in (1, 2, 3, 4)]


def test_the_model_is_told_whether_it_trains(tmp_path: Path) -> None:
    modes: list[bool] = []

    def watch(trainer: Any) -> None:
        trainer._set_mode = lambda training: modes.append(training)

    tell(tmp_path, 4, Plan(1, validate_every=2), watch)
    assert modes == [True, False, True, False]
    modes.clear()
    tell(tmp_path, 4, Plan(1, protocol=Protocol(0, 1, 2)), watch)
    assert modes == [True]


def test_a_point_of_the_curve_has_the_figures_of_its_validation(tmp_path: Path) -> None:
    validated: list[tuple[int, dict[str, float]]] = []

    def arrange(trainer: Any) -> None:
        trainer.after_validation = lambda epoch, values: validated.append((epoch, dict(values)))
        trainer._check_replicas = lambda: {"replica_distance": 0.25}
        trainer._collect_training_values = lambda: {"Prec@1": 50.0}
        trainer._wall = lambda: 7.5
        trainer._samples_per_second = lambda: 40.0

    told = tell(tmp_path, 2, Plan(2), arrange)
    # Numbers of 8, of which a tenth of the rest is learned in each update.
    distances = [3.5 + 8 * 0.9**count for count in (2, 4)]
    losses = [32 * (0.9 ** (2 * count - 4) + 0.9 ** (2 * count - 2)) / 2 for count in (2, 4)]
    assert told.trainer.curve == [
        {
            "epoch": epoch,
            "update": 2 * epoch,
            "seconds": 7.5,
            "train_loss": pytest.approx(loss),
            "samples_per_second": 40.0,
            "train_Prec@1": 50.0,
            "loss": 1.0,
            "distance": pytest.approx(distance),
            "replica_distance": 0.25,
        }
        for epoch, distance, loss in zip((1, 2), distances, losses, strict=True)
    ]
    assert validated == [
        (epoch, {"loss": 1.0, "distance": told.trainer.curve[epoch - 1]["distance"]}) for epoch in (1, 2)
    ]
    at = {"epoch": 1, "step": 2, "seconds": 7.5}
    assert told.metrics[2:6] == [
        ("train_Prec@1", 50.0, at),
        ("val_global_loss", 1.0, at),
        ("val_global_distance", pytest.approx(distances[0]), at),
        ("samples_per_second", 40.0, at),
    ]
    assert told.said[0] == (
        f"epoch 1/2 update 2  loss {losses[0]:.4f}  validation loss 1  distance {distances[0]:.4g}  40 samples/s  7.5 s"
    )


def test_losses_and_rates_are_reported_with_their_update(tmp_path: Path) -> None:
    told = tell(tmp_path, 3, Plan(2, loss_every=2))
    assert [(name, fields) for name, _, fields in told.metrics if name in ("train_loss", "learning_rate")] == [
        (name, {"epoch": epoch, "step": step})
        for epoch, step in ((1, 2), (1, 3), (2, 5), (2, 6))
        for name in ("train_loss", "learning_rate")
    ]
    assert {value for name, value, _ in told.metrics if name == "learning_rate"} == {0.1}


def test_work_after_an_update_belongs_to_the_update(tmp_path: Path) -> None:
    totals: list[int] = []

    def arrange(trainer: Any) -> None:
        trainer.after_update = lambda: totals.append(trainer.position.total)

    tell(tmp_path, 3, Plan(1), arrange)
    assert totals == [0, 1, 2]


def test_a_budget_holds_also_if_the_goal_is_reached_before(tmp_path: Path) -> None:
    """A training for a given time ends with the accuracy reached by then."""
    seconds = iter(range(100))

    def arrange(trainer: Any) -> None:
        trainer._wall = lambda: float(next(seconds))
        trainer._is_over = lambda: False

    told = tell(tmp_path, 1, Plan(99, budget=5.0), arrange, goal=100.0)
    assert [point["seconds"] for point in told.trainer.curve] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert told.result["outcome"] == "budget_spent"
    assert told.result["details"]["measured_at_seconds"] == 5.0


def test_a_result_without_a_budget_has_no_such_moment(tmp_path: Path) -> None:
    told = tell(tmp_path, 2, Plan(1), close=lambda trainer: {"test_loss": 0.5})
    details = told.result["details"]
    assert "measured_at_seconds" not in details
    assert "throughput_protocol" not in details
    assert (details["test_loss"], details["updates_skipped"], details["peak_memory_bytes"]) == (0.5, 0, 1)
    assert len(details["curve"]) == 1
    assert details["throughput"].keys() == {"samples_per_second", "least", "most", "data_wait_share"}


def test_a_measured_training_reports_its_speed_and_its_loss(tmp_path: Path) -> None:
    def arrange(trainer: Any) -> None:
        trainer.unit = Unit("tokens", 8.0)

    told = tell(tmp_path, 4, Plan(1, protocol=Protocol(1, 2, 3)), arrange)
    details = told.result["details"]
    [(name, value, fields)] = told.metrics
    assert (name, fields) == ("tokens_per_second", {"unit": "tokens/s"})
    assert value == details["throughput_protocol"]["summary"]["mean"]
    # Numbers of 8 in seven updates; the warm-up counts.
    losses = [32 * 0.81**number for number in range(7)]
    assert details["train_loss"] == pytest.approx(sum(losses) / 7)
    assert told.steps == [(step, 7, {}) for step in range(1, 8)]
    assert told.phases == [("training", {}), ("finished", {})]
    assert told.said[0].startswith("throughput ")
    assert details["throughput"] == {}


def test_a_measured_training_that_diverges_has_no_speed(tmp_path: Path) -> None:
    def arrange(trainer: Any) -> None:
        def update(update: Update[Any], rate: float) -> bool:
            trainer.losses.add(math.nan, update.weight)
            return True

        trainer._update = update

    with pytest.raises(DivergedError, match="the training loss is nan"):
        tell(tmp_path, 4, Plan(1, protocol=Protocol(1, 1, 1)), arrange)


@pytest.mark.parametrize(
    ("training", "waited", "samples", "rate"), [(3.0, 1.0, 80, 20.0), (0.0, 0.0, 80, 0.0), (0.0, 4.0, 80, 20.0)]
)
def test_speed_counts_steps_and_waiting_for_data(
    tmp_path: Path, training: float, waited: float, samples: int, rate: float
) -> None:
    told = tell(tmp_path, 1, Plan(1))

    def snapshot(scale: float) -> Snapshot:
        seconds = {**dict.fromkeys(CATEGORIES, 0.0), "data_wait": 1 + scale * waited, "validation": 50 * scale}
        return Snapshot(seconds, 100 * scale, 2 + scale * training, 0, 10 + int(scale * samples), 1)

    told.trainer._begin = snapshot(0.0)
    told.trainer.tracker.snapshot = lambda: snapshot(1.0)  # type: ignore[method-assign]
    assert told.trainer._samples_per_second() == rate


def test_the_share_of_waiting_is_that_of_training_without_validation(tmp_path: Path) -> None:
    told = tell(tmp_path, 1, Plan(1))
    seconds = {**dict.fromkeys(CATEGORIES, 0.0), "data_wait": 1.0, "validation": 50.0}
    found = Snapshot(seconds, 100.0, 3.0, 8, 16, 1)
    told.trainer.tracker.snapshot = lambda: found  # type: ignore[method-assign]
    told.trainer.curve = [{"samples_per_second": 4.0}]
    assert told.trainer._throughput()["data_wait_share"] == 0.25
    assert told.trainer._updates_per_second(None) == 4.0 * 8 / 16


# --- checkpoints ----------------------------------------------------------------------------------------------------


class Counter:
    """State of a task."""

    def __init__(self, number: int) -> None:
        self.number = number

    def state_dict(self) -> Mapping[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.number = state["number"]


def test_a_checkpoint_has_all_that_the_loop_needs_to_go_on(tmp_path: Path) -> None:
    def arrange(trainer: Any) -> None:
        trainer.states = {"counter": Counter(5)}
        trainer.goal = GoalWatch("distance", "<=", 5.0, 100.0, "full")
        trainer.schedule.patience, trainer.schedule.name = 3, "not a number"
        trainer.position_at = []

    told = tell(tmp_path, 5, Plan(1, checkpoint_every=3), arrange)
    state, [learned] = load_arrays(tmp_path / "checkpoint.pt", "mean", {"seed": 1})
    assert set(state) == {"form", "task", "seed", "schedule", "position", "clock", "goal", "states"}
    assert state["position"] == {"epoch": 1, "in_epoch": 3, "total": 3, "skipped": 0}
    assert state["states"] == {"counter": {"number": 5}}
    assert state["goal"] == {"best": None, "last": None, "passages": {}}
    assert state["schedule"]["patience"] == 3
    assert "name" not in state["schedule"]
    assert set(state["clock"]) == set(asdict(told.trainer.tracker.snapshot()))
    assert (state["clock"]["updates"], state["clock"]["samples"]) == (3, 6)
    assert float(learned[0]) == pytest.approx(8 * (1 - 0.9**3))


def test_a_training_without_a_goal_has_none_in_its_checkpoint(tmp_path: Path) -> None:
    def arrange(trainer: Any) -> None:
        trainer.goal = None

    tell(tmp_path, 2, Plan(1, checkpoint=True), arrange)
    state, _ = load_arrays(tmp_path / "checkpoint.pt", "mean", {"seed": 1})
    assert state["goal"] is None
    resumed = tell(tmp_path, 2, Plan(2, resume=str(tmp_path / "checkpoint.pt")))
    assert resumed.result["updates"] == 4


def test_a_run_that_lost_time_before_its_first_checkpoint_has_done_nothing_yet() -> None:
    begun = _count_lost_time(None, 7.0)
    assert begun == Snapshot({**dict.fromkeys(CATEGORIES, 0.0), "other": 7.0}, 7.0, 0.0, 0, 0, 0)


def test_a_training_goes_on_within_an_epoch_and_with_the_tasks_state(tmp_path: Path) -> None:
    def begin(trainer: Any) -> None:
        trainer.states = {"counter": Counter(5)}
        trainer.schedule.patience = 3

    tell(tmp_path / "first", 5, Plan(1, checkpoint_every=3), begin)
    counter = Counter(0)

    def resume(trainer: Any) -> None:
        trainer.states = {"counter": counter}
        trainer.schedule.patience = 0

    plan = Plan(2, resume=str(tmp_path / "first" / "checkpoint.pt"))
    told = tell(tmp_path / "rest", 5, plan, resume)
    assert [(step, fields["epoch"]) for step, _, fields in told.steps] == [(4, 1), (5, 1)] + [
        (n, 2) for n in range(1, 6)
    ]
    assert counter.number == 5
    assert told.trainer.schedule.patience == 3  # type: ignore[attr-defined]
    assert told.result["details"]["resumed"] == {"epoch": 0, "updates": 3}
    assert told.said[0] == "resuming after epoch 0, update 3"
    assert (told.result["updates"], told.result["samples"]) == (10, 20)


# --- restarts -------------------------------------------------------------------------------------------------------


@dataclass
class ElasticTrainer(MeanTrainer):
    """One that ranks can restart."""

    _keeps_elastic = True
    lost: tuple[str, ...] = ()
    shared: list[str] = field(default_factory=list)
    methods: list[Any] = field(default_factory=list)

    def _elastic_state(self) -> Mapping[str, Any]:
        return {"learned": self.learned.tolist(), "method": {"kept": self.world.rank}}

    def _load_elastic_state(self, state: Mapping[str, Any], read: Callable[[int], Mapping[str, Any]]) -> None:
        self.learned = np.array(state["learned"])
        ranks = range(state["ranks"]) if state["ranks"] != self.world.size else [self.world.rank]
        self.methods = [read(rank)["method"] for rank in ranks]

    def _own_state(self) -> Mapping[str, Any]:
        return {"random": 7}

    def _load_own_state(self, state: Mapping[str, Any]) -> None:
        self.shared.append(f"own {state['random']}")

    def _write_elastic(self, path: Path, state: Mapping[str, Any]) -> None:
        path.write_bytes(pickle.dumps(state))

    def _share_elastic(self, path: Path) -> bool:
        self.shared.append(path.name)
        return path.name not in self.lost

    def _read_elastic(self, path: Path) -> Mapping[str, Any]:
        found: Mapping[str, Any] = pickle.loads(path.read_bytes())
        return found


def tell_elastic(
    monkeypatch: pytest.MonkeyPatch, folder: Path, plan: Plan, lost: tuple[str, ...] = (), **variables: str
) -> Told:
    monkeypatch.setattr("tests.unit.task_images.harness.test_loop.MeanTrainer", ElasticTrainer)

    def arrange(trainer: Any) -> None:
        trainer.lost = lost
        trainer.world.contract = Contract({"MLBENCH_CHECKPOINT_DIR": str(folder / "kept"), **variables})

    return tell(folder, 3, plan, arrange)


def test_a_rank_keeps_checkpoints_for_restarts_every_so_many_updates(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told = tell_elastic(monkeypatch, tmp_path, Plan(2), MLBENCH_CHECKPOINT_EVERY="2")
    places = sorted(path.relative_to(tmp_path / "kept").as_posix() for path in (tmp_path / "kept").rglob("*.pt"))
    assert places == [f"{update}/{name}" for update in (2, 4, 6) for name in ("main.pt", "rank-0.pt")]
    main = pickle.loads((tmp_path / "kept" / "4" / "main.pt").read_bytes())
    own = pickle.loads((tmp_path / "kept" / "4" / "rank-0.pt").read_bytes())
    assert main["ranks"] == 1
    assert "method" not in main
    assert main["position"] == {"epoch": 2, "in_epoch": 1, "total": 4, "skipped": 0}
    assert [point["update"] for point in main["curve"]] == [3]
    assert main["learned"] == pytest.approx([8 * (1 - 0.9**4)])
    assert (own["method"], own["own"]) == ({"kept": 0}, {"random": 7})
    found = [fields for name, _, fields in told.metrics if name == "checkpoint_seconds"]
    assert [(fields["step"], fields["unit"]) for fields in found] == [(2, "s"), (4, "s"), (6, "s")]


@pytest.mark.parametrize("variables", [{}, {"MLBENCH_CHECKPOINT_EVERY": "60s"}])
def test_without_an_interval_or_before_it_is_over_nothing_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variables: dict[str, Any]
) -> None:
    told = tell_elastic(monkeypatch, tmp_path, Plan(2), **variables)
    assert not list(tmp_path.rglob("*.pt"))
    assert told.result["updates"] == 6


def test_a_restarted_rank_goes_on_from_the_checkpoint_with_its_own_state(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = tell_elastic(monkeypatch, tmp_path / "whole", Plan(2))
    tell_elastic(monkeypatch, tmp_path / "first", Plan(2), MLBENCH_CHECKPOINT_EVERY="2")
    kept = tmp_path / "first" / "kept" / "4"
    told = tell_elastic(monkeypatch, tmp_path / "rest", Plan(2), MLBENCH_RESUME=str(kept))
    trainer: Any = told.trainer
    assert [step for step, _, _ in told.steps] == [2, 3]
    assert float(trainer.learned[0]) == pytest.approx(float(whole.trainer.learned[0]))
    losses = [point["train_loss"] for point in whole.trainer.curve]
    assert [point["train_loss"] for point in trainer.curve] == pytest.approx(losses)
    assert trainer.shared == ["main.pt", "own 7"]
    assert trainer.methods == [{"kept": 0}]
    [(_, seconds, fields)] = [one for one in told.metrics if one[0] == "restore_seconds"]
    assert seconds >= 0
    assert fields == {"step": 4, "unit": "s"}
    assert told.result["details"]["resumed"] == {"epoch": 1, "updates": 4}


def copy_for_three(first: Path) -> None:
    """Make a checkpoint one of three ranks."""
    main = pickle.loads((first / "main.pt").read_bytes())
    (first / "main.pt").write_bytes(pickle.dumps({**main, "ranks": 3}))
    own = pickle.loads((first / "rank-0.pt").read_bytes())
    for rank in (1, 2):
        (first / f"rank-{rank}.pt").write_bytes(pickle.dumps({**own, "method": {"kept": rank}}))


def test_fewer_ranks_share_what_all_had_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tell_elastic(monkeypatch, tmp_path / "first", Plan(2), MLBENCH_CHECKPOINT_EVERY="2")
    kept = tmp_path / "first" / "kept" / "4"
    copy_for_three(kept)
    told = tell_elastic(monkeypatch, tmp_path / "rest", Plan(2), MLBENCH_RESUME=str(kept), MLBENCH_SHRUNK="1")
    trainer: Any = told.trainer
    assert trainer.shared == ["main.pt", "rank-0.pt", "rank-1.pt", "rank-2.pt"]
    assert trainer.methods == [{"kept": 0}, {"kept": 1}, {"kept": 2}]
    with pytest.raises(EnvironmentUnfitError, match="what the method had kept of rank 1 is on no machine") as error:
        tell_elastic(
            monkeypatch, tmp_path / "lost", Plan(2), ("rank-1.pt",), MLBENCH_RESUME=str(kept), MLBENCH_SHRUNK="1"
        )
    assert re.search("--checkpoint-copy peer", str(error.value.hint))
