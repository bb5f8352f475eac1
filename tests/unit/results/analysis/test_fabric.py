"""The figures of the IETF draft, against its formulas by hand."""

from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.errors import UsageError
from mlbench_cli.results.analysis.fabric import report_fabric
from mlbench_cli.results.archive.reader import Archive
from tests.unit.results.runs import sealed_run

BYTES = 400e6  # in 400 updates


def training(folder: Path, method: str, seconds: float, **changes: Any) -> Archive:
    sent = {"updates": 400.0, "messages": 400.0, "bytes": 0.0 if method == "noop" else BYTES}
    fields = {"training_seconds": seconds, "details": {"communication": sent}, "method": {"name": method}}
    return Archive.open(sealed_run(folder, **{**fields, **changes}))


def test_ratio_and_overlap_follow_from_computation_bytes_and_rate(tmp_path: Path) -> None:
    own, compute = training(tmp_path / "a", "bsp", 60.0), training(tmp_path / "b", "noop", 40.0)
    report = report_fabric([own], compute, None, 100e6)
    (job,) = report.jobs
    # 0.10 s of computation and 8 * 1 MB * 1 / 100 Mbit/s = 0.08 s on the wire; an update takes 0.15 s.
    assert job.seconds == pytest.approx(0.15)
    assert job.compute_seconds == pytest.approx(0.10)
    assert job.roofline_seconds == pytest.approx(0.18)
    assert job.jct_ratio == pytest.approx(0.15 / 0.18)
    assert job.overlap == pytest.approx(1 - 0.05 / 0.08)
    assert report.to_dict()["observation_points"] == "class (c), endpoint software"


def test_interference_and_fairness_of_two_trainings_side_by_side(tmp_path: Path) -> None:
    alone = training(tmp_path / "alone", "bsp", 40.0)
    beside = [training(tmp_path / str(seconds), "bsp", seconds) for seconds in (50.0, 80.0)]
    report = report_fabric(beside, None, alone, None)
    first, second = (job.interference for job in report.jobs)
    assert first == pytest.approx(1.25)
    assert second == pytest.approx(2.0)
    assert report.fairness == pytest.approx((0.8 + 0.5) ** 2 / (2 * (0.8**2 + 0.5**2)))
    assert [job.jct_ratio for job in report.jobs] == [None, None]


def test_references_that_are_none_are_refused(tmp_path: Path) -> None:
    own = training(tmp_path / "a", "bsp", 60.0)
    with pytest.raises(UsageError, match="it communicates"):
        report_fabric([own], training(tmp_path / "b", "powersgd", 40.0), None, 1e9)
    other = training(tmp_path / "c", "noop", 40.0, parameters={"batch_size": 64, "goal_full": 80.0, "goal_light": 70.0})
    with pytest.raises(UsageError, match="batch_size"):
        report_fabric([own], other, None, 1e9)
    single = training(tmp_path / "d", "noop", 40.0, workers=1)
    with pytest.raises(UsageError, match="number of ranks"):
        report_fabric([own], single, None, 1e9)


def test_a_run_that_sends_nothing_is_left_out_with_the_reason(tmp_path: Path) -> None:
    report = report_fabric([training(tmp_path / "a", "bsp", 60.0, workers=1)], None, None, None)
    assert not report.jobs
    assert "more than one rank" in report.to_dict()["anomalies"][0]
