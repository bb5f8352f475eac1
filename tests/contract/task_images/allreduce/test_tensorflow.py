"""TensorFlow's collectives in the task allreduce. Skipped without TensorFlow: pip install -e '.[local,tensorflow]'."""

import importlib.util
import json
from pathlib import Path

import pytest

from mlbench_cli.tasks.catalog import load_task
from tests.contract.task_images.ranks import RankServer, launch_within

HAS_TENSORFLOW = importlib.util.find_spec("tensorflow") is not None
SECONDS = 900.0
BACKEND = {"MLBENCH_BACKEND": "grpc"}


@pytest.mark.skipif(HAS_TENSORFLOW, reason="TensorFlow is installed here")
def test_without_tensorflow_it_says_how_to_get_it(ranks: RankServer, tmp_path: Path) -> None:
    parameters = load_task("allreduce").resolve("tiny", {})
    (ended,) = ranks.run("task_images.run allreduce", 1, tmp_path, parameters, MLBENCH_BACKEND="grpc")
    assert ended.code == 78
    assert "pip install '.[tensorflow]'" in ended.stderr


@pytest.mark.skipif(not HAS_TENSORFLOW, reason="TensorFlow, 1.2 GB, is not installed (extra: tensorflow)")
@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_what_tensorflow_has_is_measured_and_checked_like_all_others(tmp_path: Path, size: int) -> None:
    changes = {"collectives": "all", "dtypes": "all", "places": "all", "sizes": "100B,10KB", "samples": 3}
    parameters = load_task("allreduce").resolve("tiny", {**changes, "seconds_total": 0.0})
    ended = launch_within(SECONDS, "task_images.run allreduce", size, tmp_path, parameters, BACKEND)
    assert [one.code for one in ended] == [0] * size, ended[0].stderr
    environment, result = ended[0].events("environment")[0], ended[0].result
    assert (environment["framework"], environment["backend"]) == ("tensorflow", "grpc")
    found = {(one["collective"], one["place"]) for one in result["details"]["series"] if one["sizes"] == 2}
    assert found == {("all_reduce", "out_of_place"), ("all_gather", "out_of_place")}
    document = json.loads((tmp_path / "output-0/results/collectives.json").read_text())
    assert any("only out of place" in one["why"] for one in document["not_supported"])
