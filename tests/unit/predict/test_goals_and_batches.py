"""Samples to a goal: what runs say of them, and how they grow with the batch size, by hand."""

import math
from typing import Any

import pytest

from mlbench_cli.errors import UsageError
from mlbench_cli.predict.samples import (
    Basis,
    CriticalBatch,
    GoalPoint,
    SamplesToGoal,
    choose_model,
    fit,
    load_published,
    read_batch,
    read_noise_scale,
    read_point,
    same_batch,
)

Z90 = 1.2815515655446004  # scipy.stats.norm.ppf(0.9)


def test_the_critical_batch_needs_twice_as_many_samples() -> None:
    found = CriticalBatch(1000.0, 256.0)
    assert [found.samples(batch) for batch in (0, 256, 512)] == [1000.0, 2000.0, 3000.0]
    assert CriticalBatch(1000.0, math.inf).samples(1e9) == 1000.0


@pytest.mark.parametrize(("batch", "same"), [(99.0, True), (101.0, True), (98.9, False), (101.1, False), (100.0, True)])
def test_batch_sizes_within_a_hundredth_are_equal(batch: float, same: bool) -> None:
    assert same_batch(batch, 100.0) is same


def model(**changes: Any) -> SamplesToGoal:
    fields = {"known": 1000.0, "at": 100.0, "critical": 100.0, "spread": 0.2, "basis": Basis.PUBLISHED, "note": ""}
    return SamplesToGoal(**{**fields, **changes})


def test_samples_at_another_batch_follow_from_the_known_ones() -> None:
    """(1 + 300 / 100) / (1 + 100 / 100) = 2."""
    assert (model().samples(300.0), model().kept(300.0)) == (2000.0, 0.5)
    assert (model().samples(100.4), model().kept(100.4)) == (1000.0, 1.0)
    unknown = model(critical=None)
    assert (unknown.samples(300.0), unknown.kept(300.0)) == (None, None)
    assert (unknown.samples(100.0), unknown.kept(100.0)) == (1000.0, 1.0)


@pytest.mark.parametrize(
    ("changes", "batch", "error"),
    [
        ({}, 100.0, 0.0),
        ({"basis": Basis.MEASURED}, 100.0, 0.2),
        ({"critical": None}, 300.0, 0.0),
        ({}, 300.0, 0.2),
        ({"reach": (50.0, 200.0)}, 150.0, 0.2),
        ({"reach": (50.0, 200.0)}, 800.0, 0.4),  # four times as far: the square root of 4
        ({"reach": (50.0, 200.0)}, 12.5, 0.4),
        ({"reach": (50.0, 200.0)}, 50.0, 0.2),
    ],
)
def test_the_error_grows_with_the_distance_from_the_measured_batches(
    changes: dict[str, Any], batch: float, error: float
) -> None:
    assert model(**changes).log_error(batch) == pytest.approx(error)


def test_an_uncertain_critical_batch_is_an_error_of_the_prediction() -> None:
    """B_crit of 50 to 200: samples at 300 grow by 7 / 3 to 2.5 / 1.5, as 10th and 90th percentiles."""
    inner = abs(math.log((7 / 3) / (2.5 / 1.5))) / (2 * Z90)
    assert model(spread=0.0, critical_factor=2.0).log_error(300.0) == pytest.approx(inner, rel=1e-4)
    assert model(spread=0.3, critical_factor=2.0).log_error(300.0) == pytest.approx(math.hypot(0.3, inner), rel=1e-4)


def test_a_fit_through_two_points_is_exact() -> None:
    """E_min 1000 and B_crit 200: 1100 samples at 20, 2000 at 200."""
    found = fit([GoalPoint(20, 1100.0), GoalPoint(200, 2000.0)])
    assert [found.minimum, found.critical] == pytest.approx([1000.0, 200.0])
    assert found.error == pytest.approx(0.0, abs=1e-9)


def test_samples_in_proportion_to_the_batch_are_far_above_the_critical_one() -> None:
    """The same number of updates, 10, at every batch size: 5 % more or less is the error."""
    found = fit([GoalPoint(10, 80.0), GoalPoint(100, 1200.0)])
    assert found.samples(1000) / found.samples(100) == pytest.approx(10, rel=1e-2)
    assert found.critical == pytest.approx(0.01)
    exact = fit([GoalPoint(10, 100.0), GoalPoint(100, 1000.0), GoalPoint(50, 490.0)])
    assert exact.samples(200) == pytest.approx(2000, rel=0.02)


def test_samples_that_do_not_grow_have_their_mean_and_no_critical_batch() -> None:
    """Least squares of relative errors: the mean of 1 / x over the mean of 1 / x^2."""
    found = fit([GoalPoint(10, 100.0), GoalPoint(20, 50.0)])
    mean = (1 / 100 + 1 / 50) / (1 / 100**2 + 1 / 50**2)
    assert [found.minimum, found.critical] == pytest.approx([mean, math.inf])
    assert found.error == pytest.approx(math.sqrt(((mean / 100 - 1) ** 2 + (mean / 50 - 1) ** 2) / 2))


def run(**changes: Any) -> dict[str, Any]:
    spec = {"task": "t", "parameters": {"batch_size": 32}, **changes}
    return {"name": "a", "spec": spec}


def result(**changes: Any) -> dict[str, Any]:
    fields = {"outcome": "goal_reached", "goal": {"kind": "full"}, "samples": 500, "world_size": 4, "details": {}}
    return {**fields, **changes}


LIGHT = {"details": {"goals": {"light": {"samples": 200}}}}


@pytest.mark.parametrize(
    ("spec", "outcome", "goal", "samples"),
    [
        ({}, {}, None, 500.0),
        ({}, {}, "full", 500.0),
        ({}, LIGHT, "light", 200.0),
        ({}, {"goal": {"kind": "light"}}, "light", 500.0),
        ({"goal": "light"}, {"goal": None}, None, 500.0),
        ({}, {"goal": None}, None, 500.0),
        ({}, {"details": {"goals": {"full": {"samples": 450}}}}, None, 450.0),
        ({}, {"outcome": "goal_missed", **LIGHT}, "light", 200.0),
        ({}, {"details": {"goals": None}}, None, 500.0),
    ],
)
def test_samples_to_a_goal_are_those_when_it_was_reached(
    spec: dict[str, Any], outcome: dict[str, Any], goal: str | None, samples: float
) -> None:
    assert read_point(run(**spec), result(**outcome), goal) == GoalPoint(128, samples, "", "a")


@pytest.mark.parametrize(
    ("outcome", "goal", "word"),
    [
        ({}, "light", "light"),
        ({"outcome": "goal_missed"}, None, "full"),
        ({"outcome": "completed"}, None, "full"),
        ({"samples": 0}, None, "full"),
        ({"samples": None}, None, "full"),
        ({"goal": {"kind": "light"}, "outcome": "goal_missed"}, None, "light"),
    ],
)
def test_a_goal_that_was_not_reached_has_no_samples(outcome: dict[str, Any], goal: str | None, word: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_point(run(), result(**outcome), goal)
    assert caught.value.message == (
        f'The run "a" has not reached the {word} goal of t, so it is unknown how many samples that takes.'
    )


@pytest.mark.parametrize(("method", "name"), [({"name": "bsp"}, "bsp"), ({}, ""), (None, ""), ("local", "local")])
def test_a_point_has_the_name_of_its_method(method: Any, name: str) -> None:
    assert read_point(run(method=method), result()).method == name


@pytest.mark.parametrize(
    ("parameters", "details", "batch"),
    [
        ({"batch_size": 32}, {}, 128),
        ({"batch_size": 32, "global_batch": 64}, {}, 64),
        ({"batch_size": 32, "global_batch": 64}, {"global_batch": 256}, 256),
        ({}, {}, None),
        ({"batch_size": "auto"}, {}, None),
        ({}, {"global_batch": 1}, 1),
        ({}, {"global_batch": 0}, None),
        ({}, {"global_batch": "many"}, None),
    ],
)
def test_the_global_batch_is_reported_or_that_of_all_ranks(
    parameters: dict[str, Any], details: dict[str, Any], batch: int | None
) -> None:
    assert read_batch(run(parameters=parameters), result(details=details)) == batch


def test_a_result_without_a_batch_size_is_refused() -> None:
    with pytest.raises(UsageError, match='The result of "a" does not tell its global batch size'):
        read_point(run(parameters={}), result())


@pytest.mark.parametrize(
    ("details", "scale"),
    [
        ({"noise_scale": {"samples": 50}}, 50.0),
        ({"noise_scale": {"samples": 0}}, None),
        ({"noise_scale": {"samples": None}}, None),
        ({"noise_scale": None}, None),
        ({}, None),
    ],
)
def test_the_noise_scale_is_what_a_run_has_measured(details: dict[str, Any], scale: float | None) -> None:
    assert read_noise_scale(result(details=details)) == scale


def test_runs_at_several_batches_are_fitted_and_reach_twice_as_far() -> None:
    points = [GoalPoint(200, 2000.0), GoalPoint(20, 1100.0), GoalPoint(20, 1100.0)]
    found = choose_model("t", points, 999.0)
    assert [found.at, found.known, found.critical] == pytest.approx([200, 2000.0, 200.0])
    assert (found.reach, found.basis) == ((10.0, 400), Basis.MEASURED)
    assert found.spread == pytest.approx(0.15 / Z90, rel=1e-3)
    assert found.note == "samples to goal: measured, 3 runs at batches 20, 200: B_crit 200, fit 0 % off"


def test_a_fit_that_is_far_off_says_so() -> None:
    points = [GoalPoint(10, 100.0), GoalPoint(20, 50.0)]
    found = choose_model("t", points, None)
    assert found.spread == fit(points).error > 0.15
    assert found.note.endswith("at batches 10, 20: B_crit above all of them, fit 32 % off")


def test_repeats_at_one_batch_have_their_geometric_mean() -> None:
    found = choose_model("t", [GoalPoint(64, 100.0), GoalPoint(64, 400.0)], 1234.0)
    assert [found.known, found.at, found.critical] == pytest.approx([200.0, 64, 1234.0])
    assert found.basis is Basis.GUESSED
    assert (found.spread, found.critical_factor, found.reach) == (0.0, 3.0, (0.0, math.inf))
    assert found.note == ("samples to goal: guessed from the gradient noise scale, 1,234 samples, within a factor of 3")


def test_a_published_table_reaches_from_half_its_smallest_batch_to_twice_its_largest() -> None:
    table, task, edition = load_published()["bert_large"]
    found = choose_model(task, [GoalPoint(256, 1000.0)], 5.0)
    batches = [point.batch for point in table]
    assert list(found.reach) == [min(batches) / 2, max(batches) * 2]
    assert found.spread == pytest.approx(max(0.2 / Z90, fit(table).error), rel=1e-3)
    assert [found.known, found.at] == pytest.approx([1000.0, 256])
    assert str(found.basis) == "published"
    assert found.note.startswith(f"samples to goal: published (bert_large, {edition}; mlcommons/logging")
