"""How often the host waits for the GPU in a training, as CUDA itself counts it."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.tasks.catalog import load_task
from tests.contract.task_images.ranks import launch

WAITED = re.compile(r"called a synchronizing CUDA operation")

VARIABLES: Any = {"MLBENCH_DEVICE": "gpu", "MLBENCH_BACKEND": "nccl", "PYTHONWARNINGS": "always"}


@dataclass(frozen=True)
class Lengths:
    """Two trainings of different length; what the longer one waits more is that of its further steps."""

    name: str
    short: int
    long: int
    changes: Mapping[str, Any]


# At this learning rate no goal is reached.
NEVER = {"goal_full": 100.0, "goal_light": 100.0, "learning_rate": 1e-6}
EPOCHS = Lengths("epochs", 1, 3, {"training_images": 12_800, **NEVER})
RESIDENT = Lengths("epochs", 1, 3, {**EPOCHS.changes, "resident": True})
DIGITS = Lengths("epochs", 1, 9, NEVER)
ROWS = Lengths("epochs", 1, 3, {"training_rows": 12_800, "goal_full": 100.0, "goal_light": 100.0})
STEPS = Lengths("steps", 200, 600, {"evaluate_every": 200, "goal_full": 0.0, "goal_light": 0.0})


@pytest.mark.parametrize(
    ("task", "lengths"),
    [
        ("cifar10_resnet20", EPOCHS),
        ("cifar10_resnet20", RESIDENT),
        ("mnist", EPOCHS),
        ("digits_resnet", DIGITS),
        ("epsilon_logistic_regression", ROWS),
        ("gpt_pretraining", STEPS),
        ("bert_pretraining", STEPS),
    ],
)
def test_a_step_hardly_waits(tmp_path: Path, task: str, lengths: Lengths) -> None:
    """At most 0.2 times, the validations of the further steps included."""
    found = []
    for length in (lengths.short, lengths.long):
        folder = tmp_path / str(length)
        folder.mkdir()
        changes = {**lengths.changes, lengths.name: length, "module": f"task_images.run {task}"}
        [ended] = launch("tests.gpu.waits", 1, folder, load_task(task).resolve("tiny") | changes, **VARIABLES)
        assert ended.code == 0, ended.stderr[-2000:]
        found.append((len(WAITED.findall(ended.stderr)), ended.result["updates"]))
    (few, short), (many, long) = found
    assert long > short
    assert (many - few) / (long - short) <= 0.2, (found, Counter(ended.stderr.splitlines()).most_common(12))
