"""The trainings of today are those of the committed curves."""

from pathlib import Path

import pytest

from tests import slow
from tests.contract.task_images import golden
from tests.contract.task_images.ranks import RankServer

FAMILIES = ("digits_resnet", "epsilon_logistic_regression", "gpt_pretraining", "wmt17_transformer")

LOSSES = 2e-3
SAMPLES = 1.0  # percent of the validation samples: 3 of the digits


@pytest.mark.parametrize("task", [*FAMILIES, *slow(task for task in golden.TASKS if task not in FAMILIES)])
def test_a_training_has_its_committed_curve(ranks: RankServer, tmp_path: Path, task: str) -> None:
    found, kept = golden.take_curve(ranks, task, tmp_path), golden.read_curve(task)
    assert [point.keys() for point in found] == [point.keys() for point in kept]
    # Processors round differently; samples between two classes then count for the other one.
    for point, other in zip(found, kept, strict=True):
        for metric, value in other.items():
            assert point[metric] == pytest.approx(value, rel=LOSSES, abs=SAMPLES if "Prec@" in metric else 0), metric
