"""The backend jax in real processes. Most is skipped if JAX is not installed: pip install -e '.[jax]'."""

import importlib.util
import json
import os
from pathlib import Path

import pytest

from mlbench_cli.tasks.catalog import load_task
from tests.contract.task_images.ranks import RankServer, launch_within

HAS_JAX = importlib.util.find_spec("jax") is not None
SECONDS = 250.0
BACKEND = {"MLBENCH_BACKEND": "jax"}
SIZES = [1, pytest.param(2, marks=pytest.mark.nightly)]
with_jax = pytest.mark.skipif(not HAS_JAX, reason="JAX, 0.4 GB, is not installed (extra: jax)")


@pytest.mark.skipif(HAS_JAX, reason="JAX is installed here")
def test_without_jax_it_says_how_to_get_it(ranks: RankServer, tmp_path: Path) -> None:
    (ended,) = ranks.run(
        "task_images.allreduce", 1, tmp_path, load_task("allreduce").resolve("tiny", {}), MLBENCH_BACKEND="jax"
    )
    assert ended.code == 78
    assert "pip install '.[jax]'" in ended.stderr


@with_jax
@pytest.mark.parametrize("size", SIZES)
def test_what_jax_has_is_measured_and_checked_like_all_others(tmp_path: Path, size: int) -> None:
    changes = {"collectives": "all", "dtypes": "all", "places": "all", "sizes": "100B,10KB", "samples": 3}
    parameters = load_task("allreduce").resolve("tiny", {**changes, "seconds_total": 0.0})
    ended = launch_within(SECONDS, "task_images.allreduce", size, tmp_path, parameters, BACKEND)
    assert [one.code for one in ended] == [0] * size, ended[0].stderr
    environment, result = ended[0].events("environment")[0], ended[0].result
    assert (environment["framework"], environment["backend"]) == ("jax", "jax")
    found = [(one["collective"], one["place"]) for one in result["details"]["series"] if one["sizes"] == 2]
    wanted = [("all_reduce", "in_place")]
    wanted += [(name, "out_of_place") for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")]
    assert sorted(found) == sorted(4 * wanted)  # each with four data types
    document = json.loads((tmp_path / "output-0/results/collectives.json").read_text())
    assert len(document["rows"]) == 2 * len(found)
    refused = {one["why"] for one in document["not_supported"]}
    assert any("only out of place" in why for why in refused)


@with_jax
def test_a_wrong_sum_is_noticed(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong_jax.py"
    wrong.write_text(
        "from task_images.frameworks import JaxRanks; from task_images.allreduce.task import main\n"
        "from task_images.run import run\n"
        "JaxRanks.collective = lambda self, name, donate: lambda array: array + 0\n"
        "run(main)\n"
    )
    parameters = load_task("allreduce").resolve("tiny", {"dtypes": "fp32"})
    paths = {**BACKEND, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    ended = launch_within(SECONDS, "wrong_jax", 2, tmp_path, parameters, paths)
    assert [one.code for one in ended] == [70, 70]
    assert "wrong result" in ended[0].stderr
