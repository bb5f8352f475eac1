"""The figures of the IETF draft, against its formulas by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.errors import UsageError
from mlbench_cli.model.faults import plan_of
from mlbench_cli.results.analysis.fabric import report_fabric
from mlbench_cli.results.archive.documents import write_run_document
from mlbench_cli.results.archive.reader import Archive
from mlbench_cli.results.archive.seal import seal
from mlbench_cli.results.report.fabric import make_fabric_page
from mlbench_cli.results.report.html import render_html
from tests.unit.results.runs import START, event, new_run, observation_of, sealed_run, spec, training_log

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


def test_recovery_counts_from_the_return_of_the_link_to_the_next_update(tmp_path: Path) -> None:
    script = "at 30s for 12s link 1 down; at 90s link 0 10mbit"
    run_spec = spec(faults=script, on_failure="fail", network="50mbit,5ms", method={"name": "bsp"})
    steps = [event("phase", at=at, phase="training", step=n, steps=9) for n, at in enumerate((20.0, 31.5, 45.0, 60.0))]
    log = training_log()
    run = new_run(tmp_path / "run", run_spec, {0: [*log[:-1], *steps, log[-1]], 1: training_log(1)})
    plan = [fault.to_dict() for fault in plan_of(run_spec)]
    times: list[dict[str, Any]] = [{"at": 32.0, "until": 44.0}, {"at": 92.0, "until": None}]
    attempt = {"started": 1.0, "training": 2.0, "ended": 103.0, "ranks": 2}
    record = {"script": script, "policy": "fail", "began": START, "ended": 103.0, "attempts": [attempt]}
    events = [{"planned": planned, **moment} for planned, moment in zip(plan, times, strict=True)]
    (run.folder / "faults.json").write_text(json.dumps({**record, "events": events}))
    write_run_document(run, None)
    seal(run, observation_of())
    report = report_fabric([Archive.open(run.folder)], None, None, None)
    first, second = report.links
    assert (first.worker, first.down) == (1, 12.0)
    assert first.recovery == pytest.approx(1.0)
    assert first.gap == pytest.approx(13.5)
    assert (second.worker, second.down, second.gap, second.recovery) == (0, None, None, None)
    page = render_html(make_fabric_page(report))
    for heading in ("1. Device under test", "6. Results", "Links that were changed", "10. Comparability"):
        assert heading in page
