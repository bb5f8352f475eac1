"""Archives without a store: opened with or without verification, read as tables, judged and compared."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli import api
from mlbench_cli.api import archives as module
from mlbench_cli.errors import DamagedArchive, NotFoundError
from tests.unit.results.runs import sealed_run


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two workers that reached its goal in 100 s."""
    return sealed_run(tmp_path_factory.mktemp("archives") / "a", name="demo-2")


@pytest.fixture
def damaged(sealed: Path, tmp_path: Path) -> Path:
    """The same after a byte of its log was changed."""
    folder = shutil.copytree(sealed, tmp_path / "b")
    log = folder / "logs" / "rank-0.log"
    log.write_bytes(log.read_bytes().replace(b"loading", b"Loading", 1))
    return folder


def test_an_archive_is_verified_unless_that_is_left_out(sealed: Path, damaged: Path, tmp_path: Path) -> None:
    with api.open_archive(str(sealed)) as archive:
        assert archive.run["name"] == "demo-2"
    with pytest.raises(DamagedArchive):
        api.open_archive(damaged)
    with api.open_archive(damaged, verify=False) as archive:
        assert archive.run["name"] == "demo-2"
    with pytest.raises(NotFoundError):
        api.open_archive(tmp_path / "none.zip", verify=False)
    assert api.check_archive(str(sealed)).problems == ()
    assert [problem.file for problem in api.check_archive(damaged).problems] == ["logs/rank-0.log"]


def test_metrics_are_a_table_with_run_and_workers(sealed: Path) -> None:
    with api.open_archive(sealed) as archive:
        table = api.metrics_of(archive)
    found = [(point.run, point.workers, point.rank, point.value) for point in table if point.name == "val_Prec@1"]
    assert found == [("demo-2", 2, 0, value) for value in (40.0, 60.0, 80.5)]


def test_an_archive_is_judged_again_to_the_same_result(sealed: Path) -> None:
    with api.open_archive(sealed) as archive:
        result: Any = archive.result
    found: Any = api.judge(sealed)
    assert found.result["outcome"] == result["outcome"] == "goal_reached"
    assert found.result["task_seconds"] == result["task_seconds"]


def test_archives_are_compared_by_names_and_accepted_differences(sealed: Path, tmp_path: Path) -> None:
    other = sealed_run(tmp_path / "c", name="other-2", seconds=50.0, backend="mpi")
    with api.open_archive(sealed) as a, api.open_archive(other) as b:
        found = api.compare([a], [b])
        assert (found.a, found.b) == ("demo-2", "other-2")
        assert [obstacle.word for obstacle in found.obstacles] == ["backend"]
        assert found.ratios["task"] == pytest.approx(0.5)
        accepted = api.compare([a], [b], names=("old", "new"), across=["backend"])
        assert (accepted.a, accepted.b, accepted.obstacles, accepted.across) == ("old", "new", (), ("backend",))


def test_a_reproduction_is_judged_with_the_margin_and_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(
        "mlbench_cli.results.analysis.reproduction.judge_reproduction", lambda *words: asked.append(words)
    )
    api.judge_reproduction(["a"], ["b"])  # type: ignore[list-item]
    api.judge_reproduction(["a"], ["b"], margin=0.05, figures=["throughput"])  # type: ignore[list-item]
    assert asked == [(["a"], ["b"], 0.1, ()), (["a"], ["b"], 0.05, ["throughput"])]


def test_a_report_has_its_title(sealed: Path) -> None:
    with api.open_archive(sealed) as archive:
        assert module.report([archive], title="A title").title == "A title"
