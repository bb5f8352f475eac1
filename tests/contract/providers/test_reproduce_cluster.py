"""`mlbench reproduce --create`: a cluster like the original's, shown with its price, and deleted whatever happens."""

from pathlib import Path
from typing import Any

import pytest

from tests.contract.commands.test_foreign_runs import digits
from tests.fakes.gke import World
from tests.unit.results.runs import sealed_run

PLACE = {"cluster": "theirs-2", "engine": "kubernetes", "cluster_kind": "gke/n1-standard-8", "workers": 2}


def make_archive(folder: Path, **changes: Any) -> str:
    """A result of another machine's cluster of two n1-standard-8."""
    return str(sealed_run(folder / "theirs", name="x-2-r1", **digits(**{**PLACE, **changes})))


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    return make_archive(tmp_path)


def test_the_price_is_shown_and_nothing_made_without_a_yes(command: Any, gke_world: World, archive: str) -> None:
    shown = command("reproduce", archive, "--create", "--dry-run")
    assert shown.code == 0, shown.err
    assert "n1-standard-8" in shown.err
    assert "Expected: " in shown.err  # as long as the original took
    assert "total" in shown.err
    asked = command("reproduce", archive, "--create")
    assert (asked.code, "There is no terminal to ask on" in asked.err) == (2, True)
    assert gke_world.clusters == {}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_cluster_is_deleted_even_if_no_run_can_start(command: Any, gke_world: World, archive: str) -> None:
    """The double's Kubernetes has no namespace. What the new cluster gives its runs is not the author's choice."""
    ended = command("reproduce", archive, "--create", "--yes")
    assert ended.code == 2, ended.err
    assert "no namespace" in ended.err
    assert "author" not in ended.err
    assert any(line.startswith("CreateCluster") for line in gke_world.log)
    assert gke_world.clusters == {}


@pytest.mark.parametrize(
    ("changes", "words", "message"),
    [
        ({"cluster_kind": "slurm/gpu"}, (), "The original ran on slurm, and --create makes clusters of"),
        ({"argv": ("sh", "-c", "true"), "task": "custom", "preset": "custom"}, (), "a command of its author"),
        ({}, ("--cluster", "lab"), "Leave one of them out"),
        ({}, ("--with", "other"), "--with judges existing runs"),
    ],
)
def test_what_cannot_be_made_is_refused(
    command: Any, gke_world: World, tmp_path: Path, changes: Any, words: tuple[str, ...], message: str
) -> None:
    refused = command("reproduce", make_archive(tmp_path, **changes), "--create", "--yes", *words)
    assert refused.code == 2
    assert message in refused.err
    assert gke_world.log == []
