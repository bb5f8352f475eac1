"""What figures over the number of workers show: every value by hand, and which figures a job has."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from mlbench_cli.results.analysis.series import Measurement, group_runs
from mlbench_cli.results.archive.conditions import Condition, Conditions
from mlbench_cli.results.figures.model import Axis, Figure, Kind, Scale
from mlbench_cli.results.figures.scaling import Job, phase_figures, scaling_figures, split_jobs

PARTS = {"forward": 40.0, "backward": 30.0, "communication": 20.0, "data_wait": 10.0}


def run(measured: Measurement, name: str, workers: int, seconds: float, **changes: Any) -> Measurement:
    """A run whose parts are shares of its time; changes of fields of the key, and of the measurement."""
    fields: dict[str, Any] = {
        "parts": {part: share / 100 * seconds for part, share in PARTS.items()},
        **{key: value for key, value in changes.items() if hasattr(measured, key)},
    }
    facts = {key: value for key, value in changes.items() if not hasattr(measured, key)}
    key = replace(measured.key, **facts)
    return replace(measured, name=name, source=name, workers=workers, seconds=seconds, key=key, **fields)


def jobs(*runs: Measurement, prices: Mapping[str, float] | None = None) -> list[Job]:
    return split_jobs(group_runs(runs), dict(prices or {}), published=False)


def figures(*runs: Measurement, prices: Mapping[str, float] | None = None) -> dict[str, Figure]:
    [job] = jobs(*runs, prices=prices)
    return {figure.key.removeprefix("job0-"): figure for figure in scaling_figures(job, 0)}


def values(figure: Figure) -> dict[str, list[tuple[float, float | None]]]:
    return {line.label: list(zip(line.xs, line.ys, strict=True)) for line in figure.lines}


OWN = "task's own method"


def test_every_figure_of_two_sizes(measured: Measurement) -> None:
    """100 s on one worker, 25 s on eight: 4 times as fast, half as efficient."""
    found = figures(run(measured, "a", 1, 100.0), run(measured, "b", 8, 25.0), prices={"a": 2.0, "b": 4.0})
    assert {key: values(figure) for key, figure in found.items()} == {
        "time": {OWN: [(1, 100.0), (8, 25.0)]},
        "speedup": {OWN: [(1, 1.0), (8, 4.0)], "ideal": [(1, 1.0), (8, 8.0)]},
        "efficiency": {OWN: [(1, 1.0), (8, 0.5)]},
        "compute-speedup": {OWN: [(1, 1.0), (8, 4.0)], "ideal": [(1, 1.0), (8, 8.0)]},
        "phases": {
            "forward": [(0, 40.0), (1, 10.0)],
            "backward": [(0, 30.0), (1, 7.5)],
            "communication": [(0, 20.0), (1, 5.0)],
            "data wait": [(0, 10.0), (1, 2.5)],
        },
        "communication": {OWN: [(1, 0.2), (8, 0.2)]},
        "cost": {OWN: [(1, 2.0), (8, 4.0)]},
        "price-index": {OWN: [(1, 1.0), (8, 0.5)], "below 1, distribution pays off": [(1, 1.0), (8, 1.0)]},
        "throughput": {OWN: [(1, measured.throughput), (8, measured.throughput)]},
    }
    assert {key: (figure.y.label, figure.y.unit, figure.y.scale) for key, figure in found.items()} == {
        "time": ("seconds to the goal", "s", Scale.LINEAR),
        "speedup": ("speed-up", "", Scale.LINEAR),
        "efficiency": ("efficiency", "", Scale.LINEAR),
        "compute-speedup": ("speed-up of computing", "", Scale.LOG2),
        "phases": ("seconds", "s", Scale.LINEAR),
        "communication": ("share of the time", "", Scale.LINEAR),
        "cost": ("US dollars", "", Scale.LINEAR),
        "price-index": ("price index", "", Scale.LOG10),
        "throughput": ("samples per second", "samples/s", Scale.LINEAR),
    }
    assert found["time"].x.ticks == (1.0, 8.0)
    assert found["time"].x.scale is Scale.LOG2
    assert found["phases"].x.categories == ("1 worker", "8 workers")
    assert [line.color for line in found["phases"].lines] == ["compute", "compute", "communication", "data"]
    assert found["phases"].lines[0].notes == ("waits 20\u00a0%", "waits 20\u00a0%")


@pytest.mark.parametrize(("seconds", "scale"), [(1600.0, Scale.LINEAR), (1601.0, Scale.LOG10)])
def test_times_that_differ_by_more_than_16_have_a_logarithmic_axis(
    measured: Measurement, seconds: float, scale: Scale
) -> None:
    found = figures(run(measured, "a", 1, seconds), run(measured, "b", 2, 100.0))
    assert found["time"].y.scale is scale
    assert found["time"].title.startswith("Time to goal: ")
    whole = figures(run(measured, "a", 1, seconds, measure="x"), run(measured, "b", 2, 100.0, measure="x"))
    assert whole["time"].title.startswith("Time: ")


def test_intervals_of_ratios_are_turned_with_them(measured: Measurement) -> None:
    """(k / k0) / S^2: the upper end of the speed-up gives the lower end of the index."""
    one = [run(measured, f"a{each}", 1, each) for each in (90.0, 100.0, 110.0)]
    two = [run(measured, f"b{each}", 2, each) for each in (50.0, 50.0, 50.0)]
    found = figures(*one, *two)
    speedup, efficiency, index = (found[key].lines[0] for key in ("speedup", "efficiency", "price-index"))
    low, high = speedup.low[1], speedup.high[1]
    assert low is not None
    assert high is not None
    assert low < 2.0 < high
    assert [efficiency.low[1], efficiency.high[1]] == pytest.approx([low / 2, high / 2])
    assert [index.low[1], index.high[1]] == pytest.approx([2 / high**2, 2 / low**2])
    assert index.ys[1] == pytest.approx(0.5)
    assert found["time"].caption.endswith("Bars: 95 % intervals.")
    pair = figures(*one[:2], *two)
    assert pair["time"].lines[0].few == (True, False)
    assert pair["time"].caption.endswith("Bars: 95 % intervals; pale: ranges of two runs.")
    assert figures(one[0], two[0])["time"].lines[0].low == ()


def test_a_job_of_one_size_has_bars_for_its_groups(measured: Measurement) -> None:
    found = figures(run(measured, "a", 2, 100.0, method="bsp"), run(measured, "b", 2, 50.0, method="wfbp"))
    assert set(found) == {"time", "phases", "communication", "throughput"}
    time = found["time"]
    assert (time.kind, time.x.label, time.x.categories) == (Kind.BARS, "series", ("bsp", "wfbp"))
    assert values(time) == {"bsp": [(0, 100.0)], "wfbp": [(1, 50.0)]}
    assert found["phases"].x.categories == ("bsp", "wfbp")
    assert figures(run(measured, "a", 2, 100.0)).keys() == {"phases"}  # single values are sentences


def test_points_without_a_success_have_no_value_but_a_note_on_their_share(measured: Measurement) -> None:
    runs = [
        run(measured, "a", 1, 100.0),
        run(measured, "b", 2, 60.0),
        run(measured, "c", 2, 5.0, outcome="goal_missed"),
    ]
    runs.append(run(measured, "d", 4, 10.0, outcome="failed"))
    found = figures(*runs)
    assert values(found["time"]) == {OWN: [(1, 100.0), (2, 60.0)]}
    assert found["time"].lines[0].notes == ("", "1 of 2 reached it")
    assert values(found["communication"]) == {OWN: [(1, 0.2), (2, 0.2)]}


def test_conditions_are_noted_at_their_points(measured: Measurement) -> None:
    shared = Conditions(shared=Condition("shared", "x"), quota_limited=Condition("quota_limited", "y"))
    found = figures(run(measured, "a", 1, 100.0, conditions=shared), run(measured, "b", 2, 60.0))
    assert found["time"].lines[0].notes == ("quota limited, shared", "")


def test_a_cost_needs_the_price_of_every_run(measured: Measurement) -> None:
    runs = [run(measured, "a", 1, 100.0), run(measured, "b", 2, 60.0), run(measured, "c", 2, 60.0)]
    assert values(figures(*runs, prices={"a": 1.0, "b": 2.0, "c": 4.0})["cost"]) == {OWN: [(1, 1.0), (2, 3.0)]}
    assert "cost" not in figures(*runs, prices={"b": 2.0})


def test_runs_with_a_budget_are_drawn_by_what_they_reached(measured: Measurement) -> None:
    runs = [
        run(measured, str(workers), workers, 60.0, outcome="budget_spent", budget="60", value=70.0 + workers)
        for workers in (1, 2)
    ]
    found = figures(*runs)
    assert set(found) & {"time", "speedup", "efficiency", "price-index"} == set()
    after = found["after-time"]
    assert values(after) == {OWN: [(1, 71.0), (2, 72.0)]}
    assert (after.caption, after.y.unit) == ("Prec@1 at the end of 60 s of training.", "%")


def test_phases_that_nobody_measured_are_not_drawn(measured: Measurement) -> None:
    runs = [run(measured, str(workers), workers, 60.0, parts={"other": 60.0}) for workers in (1, 2)]
    found = figures(*runs)
    assert "phases" not in found
    assert "communication" not in found
    assert "compute-speedup" not in found


def test_a_backward_pass_that_hides_communication_is_named(measured: Measurement) -> None:
    [plain] = jobs(run(measured, "a", 1, 100.0))
    [hidden] = jobs(run(measured, "a", 1, 100.0, hides=True))
    words = "The backward pass hides communication."
    assert [words in figure.caption for job in (plain, hidden) for figure in phase_figures(job, "k-")] == [False, True]
    assert [each.caption.endswith(words) for each in scaling_figures(hidden, 0) if "phases" in each.key] == [True]


def test_phases_have_a_figure_for_each_group(measured: Measurement) -> None:
    [job] = jobs(run(measured, "a", 1, 100.0, method="bsp"), run(measured, "b", 2, 50.0, method="wfbp"))
    first, second = phase_figures(job, "k-")
    assert [(each.key, each.x.categories) for each in (first, second)] == [
        *(("k-phases-0", ("1 worker",)), ("k-phases-1", ("2 workers",))),
    ]
    assert first.title.endswith(", bsp")
    assert first.y == Axis("seconds", from_zero=True, unit="s")
    both = {figure.key: figure for figure in scaling_figures(job, 3)}["job3-phases"]
    assert both.x.categories == ("bsp, 1 worker", "wfbp, 2 workers")


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
        ({"judge": 1}, 2),
        ({"task": "other"}, 2),
    ],
)
def test_groups_of_one_job_may_differ_in_how_but_not_in_what_they_train(
    measured: Measurement, change: dict[str, Any], count: int
) -> None:
    assert len(jobs(run(measured, "a", 1, 100.0), run(measured, "b", 1, 100.0, **change))) == count


def test_without_a_goal_the_parameters_are_the_amount_of_work(measured: Measurement) -> None:
    free = {"goal": "", "metric": ""}
    other = {"parameters": (("batch_size", "1"),)}
    assert len(jobs(run(measured, "a", 1, 100.0, **free), run(measured, "b", 1, 100.0, **free, **other))) == 2


@pytest.mark.parametrize(
    ("changes", "labels"),
    [
        ([{"method": "bsp"}, {"method": "wfbp"}], ["bsp", "wfbp"]),
        (
            [{"method": "bsp", "network": "a"}, {"method": "bsp", "network": "b"}, {"method": "wfbp", "network": "a"}],
            ["bsp, a", "bsp, b", "wfbp, a"],
        ),
        ([{"method": "bsp", "machine": "m"}, {"method": "wfbp", "machine": "n"}], ["bsp", "wfbp"]),
        ([{"machine": "m", "code": "c"}, {"machine": "n", "code": "c"}], ["m", "n"]),
    ],
)
def test_groups_are_named_by_the_fewest_settings_that_tell_them_apart(
    measured: Measurement, changes: list[dict[str, Any]], labels: list[str]
) -> None:
    [job] = jobs(*(run(measured, str(number), 1, 100.0, **each) for number, each in enumerate(changes)))
    assert sorted(group.label for group in job.groups) == labels
