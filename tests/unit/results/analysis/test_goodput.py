"""Goodput: shares of a run with faults, and which run may be its reference."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

from mlbench_cli.errors import UsageError
from mlbench_cli.results.analysis import goodput
from mlbench_cli.results.analysis.comparability import Difference
from mlbench_cli.results.analysis.goodput import Goodput, measure_goodput

PARTS = {"startup": 10.0, "useful": 60.0, "checkpointing": 5.0, "waiting": 5.0, "lost": 20.0}
RECOVERIES = [
    {"seconds": 8.0, "detection": 1.0, "restart": 2.0, "loading": 3.0},
    {"seconds": 12.0, "detection": 3.0, "restart": 4.0, "loading": 5.0},
]
FAULTS = {
    "seconds": PARTS,
    "wall_seconds": 100.0,
    "goodput": 0.6,
    "attempts": 3,
    "injected": 2,
    "recoveries": RECOVERIES,
    "checkpoint_seconds": 0.5,
    "checkpoints": 9,
}


def archive(name: str = "faulted-2", faults: Any = None, **result: Any) -> Any:
    fields = {"samples": 6000, "task_seconds": {"wall": 50.0}, "world_size": 2, **result}
    return SimpleNamespace(result={"run": name, "faults": faults, **fields})


def faulted(**changes: Any) -> Goodput:
    return measure_goodput(archive(faults={**FAULTS, **changes}))


def test_the_parts_of_a_run_give_its_figures() -> None:
    found = faulted()
    assert (found.value, found.wall, found.faults, found.restarts) == (0.6, 100.0, 2, 2)
    assert found.recovery == 10.0
    assert found.mtbf == 45.0  # 90 s of training, of which 2 attempts ended early
    assert found.interval == 10.0  # 90 s and 9 checkpoints
    assert found.after_startup == pytest.approx(60 / 90)
    assert not found.is_referenced


def test_what_the_formulas_expect_follows_from_the_measured_figures() -> None:
    """E[ETTR] of arXiv 2410.21680 and Daly's interval (eq. 37), worked by hand; a restart takes 9 s."""
    found = faulted()
    assert found.ettr == pytest.approx((1 - (9 + 10 / 2) / 45) / (1 + 0.5 / 10))
    share = 0.5 / 90
    assert found.best == pytest.approx(math.sqrt(45.0) * (1 + math.sqrt(share) / 3 + share / 9) - 0.5)


@pytest.mark.parametrize(
    ("changes", "known"),
    [
        ({"attempts": 1, "recoveries": []}, (None, 10.0, None)),
        ({"checkpoints": 0}, (45.0, 45.0, 10.0)),  # without checkpoints a fault loses all since the last fault
        ({"recoveries": []}, (45.0, 10.0, None)),
    ],
)
def test_what_did_not_happen_has_no_figure(changes: dict[str, Any], known: tuple[float | None, ...]) -> None:
    found = faulted(**changes)
    assert (found.mtbf, found.interval, found.recovery) == known
    assert (found.ettr is None) is (found.best is None) is (None in known)


def test_a_run_that_only_started_up_has_no_useful_share() -> None:
    parts = {**dict.fromkeys(PARTS, 0.0), "startup": 100.0}
    found = faulted(seconds=parts)
    assert (found.after_startup, found.mtbf, found.interval) == (None, None, None)
    assert faulted(checkpoint_seconds=None).ettr is None


def test_a_checkpoint_that_costs_nothing_divides_by_nothing() -> None:
    found = faulted(checkpoint_seconds=0.0)
    assert found.ettr == pytest.approx((1 - 14 / 45), rel=1e-6)
    assert found.best == pytest.approx(math.sqrt(2 * 1e-6 * 45), rel=1e-2)


def test_a_run_without_a_record_of_faults_is_refused() -> None:
    with pytest.raises(UsageError, match="has no record of faults") as caught:
        measure_goodput(archive("plain-2"))
    assert "--faults" in str(caught.value.hint)


# --- against a reference --------------------------------------------------------------------------------------------


def refer(monkeypatch: pytest.MonkeyPatch, *differences: Difference, **reference: Any) -> Goodput:
    key = SimpleNamespace(differences=lambda _: differences)
    monkeypatch.setattr(goodput, "key_of", lambda _: key)
    return measure_goodput(archive(faults=FAULTS), archive("reference-2", **reference))


def test_with_a_reference_its_time_of_a_sample_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    found = refer(monkeypatch, samples=12000, task_seconds={"wall": 100.0})
    assert found.is_referenced
    assert found.value == pytest.approx(6000 * (100 / 12000) / 100)


@pytest.mark.parametrize("reference", [{"samples": 0}, {"samples": None}, {"task_seconds": {"wall": None}}])
def test_a_reference_without_samples_or_a_time_gives_no_value(
    monkeypatch: pytest.MonkeyPatch, reference: dict[str, Any]
) -> None:
    assert refer(monkeypatch, **reference).value is None


@pytest.mark.parametrize("name", ["faults", "on_failure", "checkpoint_every", "checkpoint_copy", "detect_seconds"])
def test_a_reference_may_differ_in_settings_of_faults(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    allowed = Difference("settings", f"values of {name}", "x", "y"), Difference("division", "divisions", "x", "y")
    assert refer(monkeypatch, *allowed).is_referenced


def test_another_setting_or_number_of_ranks_or_faults_of_its_own_make_no_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(UsageError, match="The values of batch_size differ: 16 and 32"):
        refer(monkeypatch, Difference("settings", "values of batch_size", "16", "32"))
    with pytest.raises(UsageError, match="another number of ranks"):
        refer(monkeypatch, world_size=4)
    with pytest.raises(UsageError, match="had faults itself"):
        refer(monkeypatch, faults={**FAULTS, "injected": 1})
    assert refer(monkeypatch, faults={**FAULTS, "injected": 0}).is_referenced
