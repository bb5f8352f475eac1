"""Whether runs reproduce a result: the verdict, its reason, and what was not the same."""

from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.errors import UsageError
from mlbench_cli.results.analysis.reproduction import (
    choose_repeats,
    judge_reproduction,
)
from mlbench_cli.results.analysis.stats import Verdict
from mlbench_cli.results.archive.files import Archive
from tests.unit.results.runs import sealed_repeats, sealed_run

GOOD = (10.0, 10.2, 9.9)
MACHINE = {"platform": "Linux 6", "architecture": "x86_64", "cores": 2, "memory_bytes": 8 << 30, "cpu": "Xeon"}


def side(folder: Path, seconds: tuple[float, ...], outcome: str = "goal_reached", **changes: Any) -> list[Archive]:
    return [Archive.open(Path(path)) for path in sealed_repeats(folder, seconds, outcome, **changes)]


def on(cpu: str, driver: str | None = None, packages: dict[str, str] | None = None) -> dict[str, Any]:
    machine = {**MACHINE, "cpu": cpu, "gpu_driver": driver}
    return {"mlbench": "4.0.0", "python": "3.12.1", "machine": machine, "packages": packages or {"torch": "2.9"}}


@pytest.mark.parametrize(
    ("seconds", "verdict", "words"),
    [
        ((10.1, 9.9, 10.15), Verdict.REPRODUCED, "reproduced within 3.5\u00a0%"),
        ((12.5, 12.7, 12.4), Verdict.DIFFERENT, "different, 1.2"),
        ((7.5, 7.6, 7.4), Verdict.DIFFERENT, "different, 0.7"),
        ((11.0, 13.5, 10.2), Verdict.CANNOT_TELL, "undecided"),
        ((10.1,), Verdict.CANNOT_TELL, "give no interval"),
    ],
)
def test_times_decide_within_the_margin(
    tmp_path: Path, seconds: tuple[float, ...], verdict: Verdict, words: str
) -> None:
    found = judge_reproduction(side(tmp_path / "a", GOOD), side(tmp_path / "b", seconds))
    assert found.verdict is verdict
    assert words in found.reason
    assert [figure.row.name for figure in found.figures] == ["seconds"]


def test_a_single_original_is_reproduced_by_repeats(tmp_path: Path) -> None:
    five = (*GOOD, 10.1, 10.0)
    assert judge_reproduction(side(tmp_path / "a", (10.0,)), side(tmp_path / "b", five)).verdict is Verdict.REPRODUCED
    assert judge_reproduction(side(tmp_path / "c", (15.0,)), side(tmp_path / "d", five)).verdict is Verdict.DIFFERENT
    found = judge_reproduction(side(tmp_path / "e", (10.0,)), side(tmp_path / "f", (10.0,)))
    assert (found.verdict, found.to_dict()["figures"][0]["low"]) == (Verdict.CANNOT_TELL, None)


def test_the_margin_is_the_readers(tmp_path: Path) -> None:
    a, b = side(tmp_path / "a", GOOD), side(tmp_path / "b", (12.5, 12.7, 12.4))
    assert judge_reproduction(a, b, 0.4).verdict is Verdict.REPRODUCED
    for margin in (0.0, -1.0, 10.0, float("nan")):
        with pytest.raises(UsageError, match="The margin is"):
            judge_reproduction(a, b, margin)


def test_runs_that_miss_the_goal_are_a_difference_only_if_all_do(tmp_path: Path) -> None:
    a = side(tmp_path / "a", GOOD)
    missed = side(tmp_path / "b", GOOD, "goal_missed")
    assert judge_reproduction(a, missed).verdict is Verdict.DIFFERENT
    assert judge_reproduction(a, missed[:1]).verdict is Verdict.CANNOT_TELL
    found = judge_reproduction(a, [*missed[:1], *side(tmp_path / "c", GOOD)])
    assert found.verdict is Verdict.CANNOT_TELL
    assert "1 of 4 runs missed the goal" in found.reason


def test_a_result_after_a_time_budget_is_what_was_reached_in_it(tmp_path: Path) -> None:
    goal = {"metric": "Prec@1", "comparison": ">=", "threshold": 80.0, "kind": "full", "value": 80.5}
    spent = {"budget_seconds": 60.0, "parameters": {"budget_seconds": 60.0}}
    a, b = (
        side(tmp_path / name, (60.0, 60.1, 60.2), "budget_spent", goal={**goal, "last": last}, **spent)
        for name, last in (("a", 80.5), ("b", 60.0))
    )
    found = judge_reproduction(a, b)
    assert ([figure.row.name for figure in found.figures], found.verdict) == (["Prec@1"], Verdict.DIFFERENT)


def test_a_run_that_failed_says_nothing_of_the_original(tmp_path: Path) -> None:
    found = judge_reproduction(side(tmp_path / "a", GOOD), side(tmp_path / "b", GOOD, "failed"))
    assert (found.verdict, found.reason) == (Verdict.CANNOT_TELL, "x-1-r0 ended as failed.")


@pytest.mark.parametrize("change", [{"backend": "mpi"}, {"data": "other"}, {"method": {"preset": "wfbp"}}])
def test_another_request_reproduces_nothing(tmp_path: Path, change: dict[str, Any]) -> None:
    found = judge_reproduction(side(tmp_path / "a", GOOD), side(tmp_path / "b", GOOD, **change))
    assert found.verdict is Verdict.CANNOT_TELL
    assert found.reason.startswith("The requests differ.")
    assert found.not_the_same[0].matters
    slower = judge_reproduction(side(tmp_path / "c", GOOD), side(tmp_path / "d", (12.5, 12.7, 12.4), **change))
    assert slower.verdict is Verdict.DIFFERENT
    assert "seconds: different" in slower.reason
    assert "The requests differ." in slower.reason


def test_a_difference_on_another_machine_is_no_verdict_but_an_agreement_is(tmp_path: Path) -> None:
    a = side(tmp_path / "a", GOOD, provenance=on("Xeon"))
    same = judge_reproduction(a, side(tmp_path / "b", GOOD, provenance=on("EPYC")))
    assert same.verdict is Verdict.REPRODUCED
    assert [(each.name, each.original, each.reproduction) for each in same.not_the_same if each.matters] == [
        ("machines", "Xeon, 2 cores", "EPYC, 2 cores")
    ]
    for other, name in ((on("EPYC"), "machines"), (on("Xeon", "570.1"), "GPU driver")):
        slower = judge_reproduction(a, side(tmp_path / name, (12.5, 12.7, 12.4), provenance=other))
        assert slower.verdict is Verdict.CANNOT_TELL
        assert f"But there were other differences: {name}." in slower.reason


def test_functional_runs_measure_nothing(tmp_path: Path) -> None:
    change = {"functional_only": "one machine"}
    found = judge_reproduction(side(tmp_path / "a", GOOD, **change), side(tmp_path / "b", GOOD, **change))
    assert found.verdict is Verdict.CANNOT_TELL
    assert "functional, not a performance measurement" in found.reason


def test_what_is_no_single_result_is_refused(tmp_path: Path) -> None:
    a, b = side(tmp_path / "a", GOOD), side(tmp_path / "b", GOOD)
    more = [Archive.open(sealed_run(tmp_path / "more", workers=2))]
    other = side(tmp_path / "other", GOOD, backend="mpi")
    missed = side(tmp_path / "missed", GOOD, "goal_missed")
    for original, reproduction, words in (
        ([*a, *more], b, "have different numbers of workers"),
        ([*a, *other], b, "are not repeats of one run"),
        (missed, b, "it has no result to reproduce"),
        (a, [*b, a[0]], "so it cannot reproduce the original"),
    ):
        with pytest.raises(UsageError, match=words):
            judge_reproduction(original, reproduction)
    with pytest.raises(UsageError, match='no figure "speed"') as caught:
        judge_reproduction(a, b, asked=["speed"])
    assert "seconds" in (caught.value.hint or "")


def test_figures_that_are_asked_for_all_have_to_agree(tmp_path: Path) -> None:
    a, b = side(tmp_path / "a", GOOD), side(tmp_path / "b", (12.5, 12.7, 12.4))
    found = judge_reproduction(a, b, asked=["Prec@1", "seconds", "Prec@1"])
    assert [(figure.row.name, figure.verdict) for figure in found.figures] == [
        ("Prec@1", Verdict.REPRODUCED),
        ("seconds", Verdict.DIFFERENT),
    ]
    assert found.verdict is Verdict.DIFFERENT


def test_repeats_follow_from_the_originals_spread(tmp_path: Path) -> None:
    single = choose_repeats(side(tmp_path / "a", (10.0,)), ["seconds"], 0.1)
    calm = choose_repeats(side(tmp_path / "b", GOOD), ["seconds"], 0.1)
    noisy = choose_repeats(side(tmp_path / "c", (5.0, 10.0, 20.0)), ["seconds"], 0.1)
    assert single == (5, None)
    assert calm.margin is not None
    assert calm.number == 7
    assert calm.margin <= 0.1
    assert noisy.margin is not None
    assert noisy.margin > 1
    assert choose_repeats(side(tmp_path / "d", (5.0, 10.0, 20.0)), ["Prec@1", "seconds"], 0.1) == noisy
