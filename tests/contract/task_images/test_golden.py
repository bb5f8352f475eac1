"""The trainings of today are those of the committed curves."""

from pathlib import Path

import pytest

from tests import NIGHTLY
from tests.contract.task_images import golden
from tests.contract.task_images.ranks import RankServer

METHODS = golden.list_methods() if NIGHTLY else ["fusion", "eftopk", "powersgd", "localsgd"]
CASES: list[tuple[str, str, str | None]] = [(task, task, None) for task in golden.TASKS]
CASES += [(f"method-{name}", golden.METHOD_TASK, name) for name in METHODS]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "task", "method"), CASES, ids=lambda value: str(value))
def test_a_training_has_its_committed_curve(
    ranks: RankServer, tmp_path: Path, name: str, task: str, method: str | None
) -> None:
    found, kept = golden.take_curve(ranks, task, tmp_path, method), golden.read_curve(name)
    assert [point.keys() for point in found] == [point.keys() for point in kept]
    for point, other in zip(found, kept, strict=True):
        assert list(point.values()) == pytest.approx(list(other.values()), rel=2e-3)  # processors round differently
