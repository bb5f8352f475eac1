"""The trainings of today are those of the committed curves."""

from pathlib import Path
from typing import Any

import pytest

from tests import NIGHTLY, slow
from tests.contract.task_images import golden
from tests.contract.task_images.ranks import RankServer

METHODS = golden.list_methods() if NIGHTLY else ["powersgd"]
FAMILIES = ("digits_resnet", "epsilon_logistic_regression", "gpt_pretraining", "wmt17_transformer")
CASES: list[Any] = [(task, task, None) for task in FAMILIES]
CASES += slow((task, task, None) for task in golden.TASKS if task not in FAMILIES)
CASES += [(f"method-{name}", golden.METHOD_TASK, name) for name in METHODS]

LOSSES = 2e-3
SAMPLES = 1.0  # percent of the validation samples: 3 of the digits
# The distance of replicas is a thousandth of the weights whose difference it is.
DISTANCES = 2e-2


@pytest.mark.parametrize(("name", "task", "method"), CASES, ids=lambda value: str(value))
def test_a_training_has_its_committed_curve(
    ranks: RankServer, tmp_path: Path, name: str, task: str, method: str | None
) -> None:
    found, kept = golden.take_curve(ranks, task, tmp_path, method), golden.read_curve(name)
    assert [point.keys() for point in found] == [point.keys() for point in kept]
    # Processors round differently; samples between two classes then count for the other one.
    for point, other in zip(found, kept, strict=True):
        for metric, value in other.items():
            relative = DISTANCES if metric == "replica_distance" else LOSSES
            assert point[metric] == pytest.approx(value, rel=relative, abs=SAMPLES if "Prec@" in metric else 0), metric
