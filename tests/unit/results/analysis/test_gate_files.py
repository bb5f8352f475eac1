"""The files and lines that CI systems read from a gate: whole documents, escaping and limits."""

from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.errors import CannotTellError, TaskFailedError
from mlbench_cli.results.analysis.figures import figures
from mlbench_cli.results.analysis.gate import Check, Decision, Wanted, overall
from mlbench_cli.results.analysis.stats import Verdict
from mlbench_cli.results.archive.files import Archive


def check(verdict: Verdict = Verdict.PASSED, setting: str = "t spec gloo cpu 2") -> Check:
    return Check(setting, "seconds", 2, Decision(verdict, "why"))


FAILED, UNKNOWN = check(Verdict.FAILED, "f"), check(Verdict.CANNOT_TELL, "u")


@pytest.mark.parametrize(
    ("checks", "verdict"),
    [
        ([check(), UNKNOWN, FAILED], Verdict.FAILED),
        ([check(), UNKNOWN], Verdict.CANNOT_TELL),
        ([check(), check()], Verdict.PASSED),
        ([], Verdict.CANNOT_TELL),
    ],
)
def test_the_worst_check_decides_and_no_check_decides_nothing(checks: list[Check], verdict: Verdict) -> None:
    assert overall(checks) is verdict


@pytest.mark.parametrize(
    ("verdict", "code"),
    [
        (Verdict.PASSED, 0),
        (Verdict.FAILED, TaskFailedError.exit_code),
        (Verdict.CANNOT_TELL, CannotTellError.exit_code),
    ],
)
def test_exit_codes_tell_a_failure_from_what_cannot_be_told(verdict: Verdict, code: int) -> None:
    assert verdict.exit_code == code


# --- which figures and cells are checked ----------------------------------------------------------------------------


def archive(path: Path, run: str, seconds: float = 100.0, **result: Any) -> Archive:
    """Another run with the same evidence; `seconds` of its training."""
    found = Archive.open(path)
    found.run["id"] = found.result["id"] = run
    found.run["name"] = run
    found.result["task_seconds"] = {"wall": seconds, "training": seconds}
    found.result.update(result)  # type: ignore[typeddict-item]
    return found


def numbers(archive: Archive) -> dict[str, tuple[float, bool | None]]:
    return {name: (found.value, found.higher_is_better) for name, found in figures(archive).items()}


def test_the_figures_of_a_run_and_which_way_is_good(sealed: Path) -> None:
    """51,200 samples in 100 s, of which 10 s are validation, and a goal of at least 80 %."""
    found = numbers(Archive.open(sealed))
    assert found["val_Prec@1 best"] == (80.5, True)
    assert {name: found[name] for name in ("seconds", "throughput", "Prec@1")} == {
        "seconds": (100.0, False),
        "throughput": (pytest.approx(51200 / 90.0), True),
        "Prec@1": (80.5, True),
    }
    goal = {**Archive.open(sealed).result["goal"], "comparison": "<="}  # type: ignore[dict-item]
    assert numbers(archive(sealed, "x", goal=goal))["Prec@1"] == (80.5, False)
    assert "Prec@1" not in numbers(archive(sealed, "x", goal=None))
    assert "throughput" not in numbers(archive(sealed, "x", samples=None))


@pytest.mark.parametrize(
    ("text", "metric", "factor"),
    [("seconds=+10%", "seconds", 1.1), ("seconds=+0%", "seconds", 1.0), ("throughput=2", "throughput", 2.0)],
)
def test_a_limit_is_a_factor_or_a_share(text: str, metric: str, factor: float) -> None:
    found = Wanted.parse(text)
    assert found.metric == metric
    assert found.limit == pytest.approx(factor)
