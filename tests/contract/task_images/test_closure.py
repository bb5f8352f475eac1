"""How much of the shared code a rank imports: what a reader of a task has to know of, and what its digest is of."""

from pathlib import Path

import pytest

from mlbench_cli.tasks.catalog import load_task
from task_images.facts import ROOT
from tests.contract.task_images.ranks import launch


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "ranks", "most"),
    [("digits_resnet", 2, 19), pytest.param("gpt_pretraining", 1, 32, marks=pytest.mark.nightly)],
)
def test_a_rank_imports_what_it_uses_and_little_else(task: str, ranks: int, most: int, tmp_path: Path) -> None:
    parameters = load_task(task).resolve("tiny", {"budget_seconds": 0.1})
    for rank in launch(f"tests.contract.task_images.closure {task}", ranks, tmp_path, parameters):
        assert rank.code == 0, rank.stderr
        found = sorted(rank.stdout.splitlines()[-1].split()[1:])
        lines = 0
        for name in found:
            place = ROOT.joinpath(*name.split("."))
            path = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
            lines += len(path.read_text().splitlines())
        print(len(found), "modules,", lines, "lines:", *found)
        assert len(found) <= most, found
