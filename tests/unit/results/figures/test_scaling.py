"""What figures over the number of workers show: every value by hand, and which figures a job has."""

import dataclasses
from typing import Any

import pytest
from msgspec.structs import replace

from mlbench_cli.results.analysis.jobs import Job, split_jobs
from mlbench_cli.results.analysis.series import Measurement, group_runs
from mlbench_cli.results.figures.chart import Chart
from mlbench_cli.results.figures.scaling import KINDS, scaling_chart

PARTS = {"forward": 40.0, "backward": 30.0, "communication": 20.0, "data_wait": 10.0}


def run(measured: Measurement, name: str, workers: int, seconds: float, **changes: Any) -> Measurement:
    """A run whose parts are shares of its time; changes of facts of the key, of figures by name, and of the outcome."""
    values = {"seconds": seconds, **{part: share / 100 * seconds for part, share in PARTS.items()}, "other": 0.0}
    values |= {key: value for key, value in changes.items() if key in measured.figures}
    known = {key: replace(measured.figures[key], value=value) for key, value in values.items()}
    facts = {key: value for key, value in changes.items() if key not in measured.figures and key != "outcome"}
    fields: dict[str, Any] = {"outcome": changes["outcome"]} if "outcome" in changes else {}
    figures = {**measured.figures, **known}
    moment, key = measured.moment._replace(run=name), dataclasses.replace(measured.key, **facts)
    return replace(measured, name=name, source=name, workers=workers, figures=figures, key=key, moment=moment, **fields)


def jobs(*runs: Measurement) -> list[Job]:
    return split_jobs(group_runs(runs))


def charts(*runs: Measurement) -> dict[str, Chart]:
    [job] = jobs(*runs)
    return {kind.key: chart for kind in KINDS if (chart := scaling_chart(job, kind)) is not None}


def test_intervals_of_ratios_are_turned_with_them(measured: Measurement) -> None:
    """(k / k0) / S^2: the upper end of the speedup gives the lower end of the index."""
    one = [run(measured, f"a{each}", 1, each) for each in (90.0, 100.0, 110.0)]
    two = [run(measured, f"b{each}", 2, each) for each in (50.0, 50.0, 50.0)]
    found = charts(*one, *two)
    speedup, index = (found[key].rows[1] for key in ("speedup", "price_index"))
    assert speedup["low"] < 2.0 < speedup["high"]
    assert [index["low"], index["high"]] == pytest.approx([2 / speedup["high"] ** 2, 2 / speedup["low"] ** 2])
    assert index["y"] == pytest.approx(0.5 / 0.99666**2, rel=1e-3)
    assert [row["few"] for row in charts(*one[:2], *two)["total_time"].rows] == [True, False]
    assert not any("low" in row for row in charts(one[0], two[0])["total_time"].rows)


def test_computing_alone_has_a_speedup_and_the_ideal_begins_at_the_fewest_workers(measured: Measurement) -> None:
    found = charts(run(measured, "a", 2, 100.0), run(measured, "b", 4, 40.0), run(measured, "c", 6, 20.0))
    for key in ("speedup", "compute_speedup"):
        one, two, three = (row["y"] for row in found[key].rows if row["series"] != "ideal")
        assert 0.999 < one < 1.001 < two < three
        assert [(row["x"], row["y"]) for row in found[key].rows if row["series"] == "ideal"] == [(2, 1), (4, 2), (6, 3)]


@pytest.mark.parametrize(
    ("change", "count"),
    [
        ({"method": "wfbp"}, 1),
        ({"network": "1gbit"}, 1),
        ({"machine": "other"}, 1),
        ({"parameters": (("batch_size", "1"),)}, 1),  # with a goal the amount of work is open
        ({"preset": "legacy"}, 2),
        ({"goal": "another"}, 2),
        ({"data": "other"}, 2),
        ({"synthetic": "synthetic data"}, 2),
        ({"label": "functional only"}, 2),
        ({"judge": 2}, 2),
        ({"task": "other"}, 2),
    ],
)
def test_groups_of_one_job_may_differ_in_how_but_not_in_what_they_train(
    measured: Measurement, change: dict[str, Any], count: int
) -> None:
    assert len(jobs(run(measured, "a", 1, 100.0), run(measured, "b", 1, 100.0, **change))) == count
