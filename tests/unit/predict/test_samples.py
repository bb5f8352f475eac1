"""Samples to a goal: the fit against numpy and against published tables, and what each basis allows."""

import math
from typing import Any

import numpy
import pytest

from mlbench_cli.errors import UsageError
from mlbench_cli.predict.samples import Basis, GoalPoint, choose_model, fit, load_published, read_point


def test_the_fit_is_that_of_numpys_least_squares() -> None:
    points, _, _ = load_published()["resnet50"]
    rows = numpy.array([(1 / point.samples, point.batch / point.samples) for point in points])
    (minimum, slope), *_ = numpy.linalg.lstsq(rows, numpy.ones(len(rows)), rcond=None)
    found = fit(points)
    assert found.minimum == pytest.approx(minimum)
    assert found.critical == pytest.approx(minimum / slope)


@pytest.mark.parametrize("name", load_published())
def test_two_parameters_describe_every_published_table(name: str) -> None:
    assert fit(load_published()[name][0]).error < 0.095


@pytest.mark.parametrize(
    ("name", "small", "large", "growth"), [("resnet50", 4096, 32768, 1.40), ("bert_large", 448, 8192, 1.73)]
)
def test_a_large_step_is_predicted_without_its_own_points(name: str, small: int, large: int, growth: float) -> None:
    """The rest of the table tells how samples grow over 8 to 18 times the batch, within 20 %."""
    rest = [point for point in load_published()[name][0] if point.batch not in (small, large)]
    found = fit(rest)
    assert found.samples(large) / found.samples(small) == pytest.approx(growth, rel=0.2)


def test_samples_never_fall_with_the_batch_nor_below_nothing() -> None:
    falling = fit([GoalPoint(16, 120.0), GoalPoint(64, 100.0)])
    assert (falling.critical, falling.samples(1e6)) == (math.inf, falling.samples(1))
    steep = fit([GoalPoint(16, 10.0), GoalPoint(64, 400.0)])
    assert steep.minimum > 0
    assert steep.samples(64) > steep.samples(16) > 0
    with pytest.raises(ValueError, match="same batch size"):
        fit([GoalPoint(16, 10.0), GoalPoint(16, 12.0)])


def test_the_best_basis_is_chosen_and_named() -> None:
    one = [GoalPoint(256, 1000.0)]
    measured = choose_model("bert_pretraining", [*one, GoalPoint(1024, 1600.0)], 300.0)
    published = choose_model("bert_pretraining", one, 300.0)
    guessed = choose_model("digits_resnet", one, 256.0)
    nothing = choose_model("digits_resnet", one, None)
    assert [model.basis for model in (measured, published, guessed, nothing)] == [*Basis, None]
    assert measured.samples(1024) == pytest.approx(1600)
    assert measured.kept(1024) == pytest.approx(1000 / 1600)
    assert published.critical == pytest.approx(12_710, rel=0.01)
    assert guessed.samples(512) == pytest.approx(1500)
    assert nothing.samples(256) == pytest.approx(1000)
    assert (nothing.samples(512), nothing.kept(512)) == (None, None)
    assert "known at batch 256 only" in nothing.note


def test_a_guess_is_less_certain_than_a_fit_and_more_so_far_away() -> None:
    one = [GoalPoint(256, 1000.0)]
    guessed, measured = choose_model("x", one, 256.0), choose_model("x", [*one, GoalPoint(1024, 1600.0)], None)
    assert measured.log_error(1024) < guessed.log_error(1024) < guessed.log_error(8192)
    assert measured.log_error(1024) < measured.log_error(65_536)


def test_a_run_that_missed_its_goal_says_nothing() -> None:
    run: dict[str, Any] = {
        "name": "a",
        "spec": {"task": "digits_resnet", "goal": "full", "parameters": {"batch_size": 64}},
    }
    result: dict[str, Any] = {
        "outcome": "goal_missed",
        "goal": {"kind": "full"},
        "samples": 5000,
        "world_size": 2,
        "details": {"goals": {"light": {"samples": 4000}}},
    }
    with pytest.raises(UsageError, match="has not reached the full goal"):
        read_point(run, result)
    assert read_point(run, result, "light") == GoalPoint(128, 4000.0, "", "a")
