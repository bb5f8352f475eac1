"""Epochs to the goal against a reference: the rule and the numbers of MLPerf's own checker."""

import math
import statistics
from pathlib import Path

import pytest

from mlbench_cli.app import run
from mlbench_cli.results.analysis.gate import (
    decide_convergence,
    training_key,
)
from mlbench_cli.results.analysis.stats import Verdict, find_least_mean
from mlbench_cli.results.archive.files import Archive
from tests.unit.results.runs import sealed_run

REFERENCE = (36, 35, 37, 36, 38, 36, 35, 37, 36, 38)


def test_the_least_mean_is_that_of_mlperfs_checker() -> None:
    """The checker's own bisection gives 35.1094 for 10 reference runs and 5 runs, of which 3 count."""
    assert find_least_mean(REFERENCE, 3) == pytest.approx(35.109, abs=5e-4)


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ((36, 35, 37, 36, 38), Verdict.PASSED),
        ((33, 33, 34, 33, 34), Verdict.FAILED),
        ((60, 61, 62, 60, 61), Verdict.PASSED),  # slower is no matter of this check
        ((30,), Verdict.FAILED),
        ((), Verdict.CANNOT_TELL),
    ],
)
def test_runs_are_held_against_the_reference(values: tuple[float, ...], verdict: Verdict) -> None:
    assert decide_convergence(REFERENCE, values)[0] is verdict


def test_equal_epochs_do_not_divide_by_zero() -> None:
    assert decide_convergence((3.0,) * 6, (3.0,))[0] is Verdict.PASSED
    assert decide_convergence((3.0,) * 6, (2.0,))[0] is Verdict.FAILED


def test_a_reference_needs_five_runs() -> None:
    verdict, reason = decide_convergence(REFERENCE[:4], (30.0,))
    assert verdict is Verdict.CANNOT_TELL
    assert "5 are needed" in reason


@pytest.mark.parametrize(
    ("reference", "count", "mean", "kept", "quantile"),
    [
        ((10.0, 11.0, 12.0, 13.0, 20.0), 1, 12.0, 3, 2.919986),  # without the least and the greatest
        ((10.0, 10.5, 11.0, 11.5, 12.0, 99.0), 4, 11.25, 4, 1.943180),
    ],
)
def test_the_least_mean_is_a_one_sided_t_test_at_5_percent(
    reference: tuple[float, ...], count: int, mean: float, kept: int, quantile: float
) -> None:
    """The deviation is that of all values; Student's t for 95 % with 3 + 1 - 2 and 4 + 4 - 2 degrees of freedom."""
    reach = quantile * statistics.pstdev(reference) * math.sqrt(1 / kept + 1 / count)
    assert find_least_mean(reference, count) == pytest.approx(mean - reach, abs=1e-4)


@pytest.mark.parametrize("batch", [None, "64", True, math.inf])
def test_a_training_without_a_goal_or_a_batch_has_no_key(sealed: Path, batch: object) -> None:
    archive = Archive.open(sealed)
    archive.run["spec"]["parameters"]["batch_size"] = batch
    assert training_key(archive) is None
    whole = Archive.open(sealed)
    whole.result["goal"] = None
    assert training_key(whole) is None


def test_the_gate_names_a_training_that_converged_too_fast(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On other machines and with another number of ranks, but the same batch of all ranks together."""
    for number in range(5):
        sealed_run(tmp_path / "old" / str(number), name=f"ref-2-r{number}", seed=number, backend="mpi")
    parameters = {"batch_size": 256, "goal_full": 80.0, "goal_light": 70.0}
    same = sealed_run(tmp_path / "same", workers=1, parameters=parameters)
    gate = ["gate", "--baseline", str(tmp_path / "old"), "--check", "convergence"]
    assert run([*gate, str(same)]) == 0
    fast = sealed_run(tmp_path / "fast", workers=1, parameters=parameters, name="fast-1", epochs=2)
    assert run([*gate, str(fast)]) == 7
    assert "converged faster than the reference can" in capsys.readouterr().out
    missed = sealed_run(tmp_path / "missed", "goal_missed", workers=1, parameters=parameters, name="missed-1", epochs=2)
    assert run([*gate, str(missed)]) == 9
    other = sealed_run(tmp_path / "other", workers=1, name="other-1")
    assert run([*gate, str(other)]) == 9
