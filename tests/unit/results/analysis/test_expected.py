"""Which figures of runs are compared with what their machines are expected to reach, and which links are slow."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.results.analysis.expected import (
    CheckedFigure,
    Expected,
    SlowLink,
    check_figures,
)
from mlbench_cli.results.analysis.verdict import Verdict
from mlbench_cli.results.archive.reader import Archive
from tests.unit.results.runs import sealed_run

PLACE = Expected("gke/n1", 2, 2, "gloo", "throughput", 0.0, "", "unknown-task", "spec")


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sealed_run(tmp_path_factory.mktemp("archives") / "a", cluster_kind="gke/n1")


def archive(path: Path, run: str = "a", rate: float = 100.0, **result: Any) -> Archive:
    """A run of 100 s with so many samples per second."""
    found = Archive.open(path)
    found.run["id"] = found.run["name"] = run
    fields = {"task_seconds": {"wall": 100.0, "training": 100.0}, "timings": {}, "samples": 100.0 * rate}
    found.result.update({**fields, **result})  # type: ignore[typeddict-item]
    return found


@pytest.mark.parametrize(
    ("rate", "share", "verdict"),
    [
        (190.0, 0.95, Verdict.PASSED),
        (189.9, 0.95, Verdict.FAILED),
        (160.0, 0.8, Verdict.PASSED),
        (300.0, 0.95, Verdict.PASSED),
    ],
)
def test_a_figure_may_be_a_share_below_what_is_expected(
    sealed: Path, rate: float, share: float, verdict: Verdict
) -> None:
    [found] = check_figures([archive(sealed, rate=rate)], [replace(PLACE, value=200.0)], share)
    assert (found.verdict, found.share) == (verdict, rate / 200.0)


@pytest.mark.parametrize(
    "change",
    [{"machine": "gke/n2"}, {"workers": 3}, {"ranks": 3}, {"backend": "mpi"}, {"task": "other"}, {"preset": "legacy"}],
)
def test_without_a_figure_for_the_same_place_nothing_can_be_told(sealed: Path, change: dict[str, Any]) -> None:
    [found] = check_figures([archive(sealed)], [replace(PLACE, value=200.0, **change)])
    assert (found.verdict, found.expected, found.share, found.links) == (Verdict.CANNOT_TELL, None, None, ())


@pytest.mark.parametrize(
    "change",
    [
        {"outcome": "failed"},
        {"outcome": "goal_missed"},
        {"label": {"word": "functional", "reason": "x"}},
        {"samples": None},
    ],
)
def test_runs_that_measured_nothing_do_not_count(sealed: Path, change: dict[str, Any]) -> None:
    assert check_figures([archive(sealed, **change)], [replace(PLACE, value=1.0)]) == []


@pytest.mark.parametrize(
    ("ends", "suspects"),
    [
        ([], []),
        ([("b", "a")], ["a", "b"]),
        ([("a", "b"), ("b", "c")], ["b"]),
        ([("a", "b"), ("c", "d")], []),
    ],
)
def test_a_machine_at_an_end_of_every_slow_link_is_suspect(ends: list[tuple[str, str]], suspects: list[str]) -> None:
    links = tuple(SlowLink(0, 1, each, 1.0, 0.5) for each in ends)
    assert CheckedFigure((), None, "x", "m", 1.0, None, Verdict.FAILED, links).suspects == suspects


# --- links ----------------------------------------------------------------------------------------------------------


# --- what is recorded -----------------------------------------------------------------------------------------------
