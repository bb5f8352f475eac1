"""Words of the dashboard's pages: outcomes, settings, progress, time left, ratios."""

import re
from typing import Any

import pytest

pytest.importorskip("markupsafe")

from mlbench_cli.model.run import Outcome
from mlbench_cli.results.analysis.statistics import EstimateDocument
from mlbench_cli.server.words import (
    TONES,
    draw_ratio,
    eta_words,
    facts_of,
    plain_value,
    progress_share,
    progress_words,
    say,
)


def test_every_outcome_has_a_tone() -> None:
    assert set(map(str, Outcome)) <= set(TONES)
    good = {word for word, tone in TONES.items() if tone == "good"}
    assert good == {"goal_reached", "completed", "budget_spent"}
    assert (TONES["failed"], TONES["goal_missed"], TONES["running"]) == ("bad", "warn", "live")
    assert say(Outcome.GOAL_REACHED) == "goal reached"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        ("", "–"),
        (0, "0"),
        (False, "no"),
        (True, "yes"),
        (["gloo", "nccl", "gloo"], "gloo, nccl"),
        ([True, None], "yes, –"),
        (1.5, "1.5"),
    ],
)
def test_a_setting_is_shown_as_text(value: object, text: str) -> None:
    """Zero is a value, not a missing one; equal values of several runs are shown once."""
    assert plain_value(value) == text


@pytest.mark.parametrize(
    ("progress", "share"),
    [
        (None, None),
        ({}, None),
        ({"elapsed": 30.0, "eta": 90.0}, 0.25),
        ({"elapsed": 999.0, "eta": 1.0}, 0.99),  # not full before the end
        ({"elapsed": 30.0, "eta": None, "epoch": 3, "epochs": 4}, 0.75),
        ({"elapsed": 30.0, "eta": 90.0, "epoch": 3, "epochs": 4}, 0.25),  # the goal may come before the last epoch
        ({"epoch": 5, "epochs": 4}, 1.0),
        ({"epoch": 3}, None),
        ({"epoch": 3, "epochs": 0}, None),
    ],
)
def test_the_bar_of_a_run_follows_the_goal_and_else_the_epochs(
    progress: dict[str, Any] | None, share: float | None
) -> None:
    assert progress_share({"progress": progress}) == share


def test_progress_in_words() -> None:
    goal = {"metric": "Prec@1", "value": 71.3, "threshold": 80.0}
    training = {"phase": "training", "epoch": 3, "epochs": 20}
    assert progress_words({"progress": training, "goal": goal}) == (
        "training, epoch 3 of 20, top-1 accuracy 71.3\u00a0% of 80"
    )
    assert progress_words({"progress": {"phase": "training", "epoch": 0}}) == "training, epoch 0"
    assert progress_words({"progress": None, "goal": {**goal, "value": None}}) == "starting"


@pytest.mark.parametrize(
    ("progress", "text"),
    [
        (None, "no estimate yet"),
        ({"eta": None}, "no estimate yet"),
        ({"eta": 234.0, "eta_high": 468.0}, "about 200 s left"),
        ({"eta": 234.0, "eta_high": 468.1}, "no estimate yet"),
        ({"eta": 234.0, "eta_high": None}, "about 200 s left"),
    ],
)
def test_the_time_left_is_rounded_and_needs_bounds_within_a_factor_of_two(
    progress: dict[str, Any] | None, text: str
) -> None:
    assert eta_words({"progress": progress}).replace("\u00a0", " ") == text


def ratio(mean: float, low: float | None = None, high: float | None = None, count: int = 3) -> EstimateDocument:
    made: Any = {"mean": mean, "low": low, "high": high, "count": count}
    found: EstimateDocument = made
    return found


@pytest.mark.parametrize(
    ("mean", "place"), [(1.0, 50.0), (2.0, 100.0), (0.5, 0.0), (8.0, 100.0), (0.01, 0.0), (2**0.5, 75.0)]
)
def test_a_ratio_is_drawn_on_a_logarithmic_strip_from_one_half_to_two(mean: float, place: float) -> None:
    assert f'cx="{place:.1f}%"' in draw_ratio(ratio(mean))


def test_the_interval_of_a_ratio_is_drawn_from_three_runs_on() -> None:
    drawn = draw_ratio(ratio(1.0, 0.5, 2.0))
    assert re.search(r'<line x1="0.0%" x2="100.0%"[^>]*class="range', drawn)
    assert "range" not in draw_ratio(ratio(1.0, 0.5, 2.0, count=2))
    assert "range" not in draw_ratio(ratio(1.0))
    assert 'x1="0.0%"' in draw_ratio(ratio(1.0, -0.5, 2.0))  # an interval may reach below zero
    assert draw_ratio(None) == draw_ratio(ratio(0.0)) == ""


def test_the_facts_of_a_run() -> None:
    status = {
        "task": "mnist",
        "preset": "spec",
        "method": "topk",
        "workers": 1,
        "cluster": "local",
        "backend": "gloo",
        "device": "cpu",
        "network": None,
    }
    facts = dict(facts_of(status, None))
    assert facts == {
        "Task": "mnist",
        "Method": "topk",
        "Workers": "1 worker on this machine, gloo, cpu",
        "Network": "not shaped",
    }
    other = {**status, "preset": "tiny", "workers": 2, "cluster": "gke-4", "network": "1Gbit"}
    facts = dict(facts_of(other, {"division": None}))
    assert facts["Task"] == "mnist, preset tiny"
    assert facts["Workers"].startswith("2 workers on gke-4")
    assert (facts["Network"], facts["Division"]) == ("1Gbit", "none")
    measured = dict(facts_of({**other, "measured_network": "0.9 Gbit/s"}, {"division": {"word": "open"}}))
    assert (measured["Network"], measured["Division"]) == ("0.9 Gbit/s", "open")
