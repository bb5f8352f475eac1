"""What a training that is started again takes up, and what its clock counts."""

import contextlib
import io
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from task_images.contract import Contract, TaskUsageError, parse_event
from task_images.data import lasting_generator
from task_images.methods.base import Bsp
from task_images.metrics import Mean
from task_images.report import GoalWatch, Reporter
from task_images.schedules import PerEpoch
from task_images.train import PassLoss, Plan, Trainer, Update
from task_images.world import open_world

UPDATES, EVERY = 5, 3  # of an epoch, and between two checkpoints: the last one is within the second epoch


@dataclass
class Noisy:
    """Rows with noise from a stream that goes on from update to update, a model with dropout and buffers, and a metric
    of the training samples."""

    model: nn.Module
    stream: torch.Generator
    size: Mean = field(default_factory=lambda: Mean("size"))

    def count(self, epoch: int) -> int:
        return UPDATES

    def updates(self, epoch: int, begin: int = 0) -> Iterator[Update[Tensor]]:
        for number in range(begin, UPDATES):
            rows = torch.randn(6, 4, generator=torch.Generator().manual_seed(10 * epoch + number))
            yield Update([rows], 1, 6.0, 6.0, 6)

    def prepare(self, part: Tensor) -> Tensor:
        return part + torch.randn(part.shape, generator=self.stream)

    def forward(self, model: nn.Module, data: Tensor) -> Tensor:
        outputs: Tensor = model(data)
        return outputs

    def loss(self, outputs: Tensor, data: Tensor) -> PassLoss:
        value = outputs.square().mean()
        return PassLoss(value, value.detach(), len(data))

    def observe(self, outputs: Tensor, data: Tensor) -> None:
        self.size.add_mean(outputs.abs().mean(), len(data))

    def collect_metrics(self) -> dict[str, float]:
        return {"size": self.size.value(self.size.take())}

    def read_sums(self) -> list[float]:
        return self.size.read()

    def load_sums(self, sums: list[float]) -> None:
        self.size.add(*sums)


class Counter:
    """Something that a task counts itself."""

    def __init__(self) -> None:
        self.number = 0

    def state_dict(self) -> Mapping[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.number = state["number"]


class LostError(Exception):
    """In place of the end of a rank's process."""


def start(
    folder: Path,
    attempt: int,
    after_update: Callable[[int], None],
    resume: Path | None = None,
    seed: int = 1,
    every: str = str(EVERY),
) -> Any:
    """One attempt of two epochs: the trainer, and the result that it reports."""
    output = folder / f"output-{attempt}"
    output.mkdir(parents=True)
    variables = {
        "OMP_NUM_THREADS": "1",
        "MLBENCH_OUTPUT_DIR": str(output),
        "MLBENCH_ATTEMPT": str(attempt),
        "MLBENCH_CHECKPOINT_DIR": str(folder / "checkpoints"),
        "MLBENCH_CHECKPOINT_EVERY": every,
        "MLBENCH_RESUME": str(resume or ""),
    }
    world, out = open_world(Contract(variables)), io.StringIO()
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.4), nn.Linear(8, 1))
    trainer = Trainer(
        world, Reporter(world, "rows", synthetic=True), Noisy(model, lasting_generator(1, "noise")),
        PerEpoch(lambda epoch: 0.1 / (1 + epoch)), Plan(2, report_every=1), validate=lambda epoch: {"loss": 1.0},
        make_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9), method=Bsp(),
        goal=GoalWatch("loss", "<=", 0.0, 1.0, "full"), states={"own": (own := Counter())}, identity={"seed": seed},
    )  # fmt: skip

    def after() -> None:
        own.number += 1
        after_update(trainer.position.total)

    trainer.after_update = after
    with contextlib.redirect_stdout(out):
        trainer.run()
    events = [event for event in map(parse_event, out.getvalue().splitlines()) if event]
    return trainer, events


def lose(folder: Path, seconds: float = 0.0) -> Path:
    """A training whose updates last at least so long, and that is lost in the second epoch; its last checkpoint."""
    place = folder / "checkpoints" / str(2 * EVERY)

    def after(done: int) -> None:
        time.sleep(seconds)
        if done == 2 * EVERY + 2:
            while not (place / "main.pt").exists():  # it is written while the training goes on
                time.sleep(0.01)
            raise LostError

    with contextlib.suppress(LostError):
        start(folder, 0, after)
    return place


def test_a_training_that_is_started_again_ends_as_one_that_was_not(tmp_path: Path) -> None:
    """To the bit: random streams, buffers, momentum, learning rate, and the figures of each epoch."""
    whole, told = start(tmp_path / "whole", 0, lambda update: None)
    again, rest = start(tmp_path / "lost", 1, lambda update: None, lose(tmp_path / "lost"))
    for (name, one), other in zip(whole.model.state_dict().items(), again.model.state_dict().values(), strict=True):
        assert torch.equal(one, other), name
    names = ("epoch", "update", "train_loss", "train_size")
    assert [[point[name] for name in names] for point in again.curve] == [
        [point[name] for name in names] for point in whole.curve
    ]
    rates = [[event["value"] for event in events if event.get("name") == "learning_rate"] for events in (told, rest)]
    assert rates[1] == rates[0][2 * EVERY :]
    assert again.states["own"].number == 2 * UPDATES
    for events in (told, rest):  # the light goal was passed before the checkpoint
        [result] = [event for event in events if event["event"] == "result"]
        assert result["details"]["goals"]["light"]["updates"] == UPDATES


def test_checkpoints_by_the_clock_are_as_far_apart_as_asked(tmp_path: Path) -> None:
    _, events = start(tmp_path, 0, lambda update: time.sleep(0.6 if update == 0 else 0.0), every="0.5s")
    assert 1 <= len([event for event in events if event.get("name") == "checkpoint_seconds"]) <= 2


def test_the_clock_of_a_run_goes_on_from_its_first_update_and_counts_nothing_twice(tmp_path: Path) -> None:
    place = lose(tmp_path, 0.02)
    before = time.monotonic()
    _, events = start(tmp_path, 1, lambda update: None, place)
    after = time.monotonic()
    began = json.loads((tmp_path / "checkpoints" / "clock-0.json").read_bytes())["monotonic"]
    [result] = [event for event in events if event["event"] == "result"]
    assert before - began <= result["wall_seconds"] <= after - began
    seconds = sum(part["rank0"] for part in result["timings"].values())
    assert abs(seconds - result["wall_seconds"]) < 1e-6
    assert result["updates"] == 2 * UPDATES


def test_a_training_does_not_go_on_from_that_of_another_seed(tmp_path: Path) -> None:
    with pytest.raises(TaskUsageError, match="made with seed = 1, this run has 2"):
        start(tmp_path, 1, lambda update: None, lose(tmp_path), seed=2)
