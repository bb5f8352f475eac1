"""The same global batch on 1, 2 or 4 ranks is the same training: only rounding may differ."""

from pathlib import Path

import pytest

from tests import NIGHTLY
from tests.contract.task_images.ranks import RankServer

PARAMETERS = {
    "data": "synthetic",
    "training_rows": 1003,  # no multiple of anything: every epoch ends with a partial batch
    "validation_rows": 301,
    "epochs": 4,
    "goal_full": 100.0,
    "scale_limit": 1,
    "l2": 1e-3,
}


@pytest.mark.slow
@pytest.mark.parametrize("size", (2, 4) if NIGHTLY else (2,))
def test_curves_do_not_depend_on_the_number_of_ranks(ranks: RankServer, tmp_path: Path, size: int) -> None:
    curves = {}
    for number in (1, size):
        folder = tmp_path / str(number)
        parameters = {**PARAMETERS, "batch_size": 120 // number}
        folder.mkdir()
        ended = ranks.run("task_images.run epsilon_logistic_regression", number, folder, parameters)
        assert [one.code for one in ended] == [0] * number
        assert ended[0].result["samples"] == 4 * 1003
        curves[number] = [
            [point[name] for name in ("train_loss", "loss", "Prec@1", "F1-Score", "Dice Coefficient")]
            for point in ended[0].result["details"]["curve"]
        ]
    for together, alone in zip(curves[size], curves[1], strict=True):
        assert together == pytest.approx(alone, rel=1e-4)
    assert curves[1][-1][0] < curves[1][0][0]
