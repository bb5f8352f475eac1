"""Which runs of a baseline count, and which results are checked against them."""

from pathlib import Path
from typing import Any

from mlbench_cli.results.analysis.gate import Check, Wanted, check_results, overall
from mlbench_cli.results.analysis.stats import Verdict
from mlbench_cli.results.archive.files import Archive
from tests.unit.results.runs import sealed_repeats

GOOD = (100.0, 101.0, 99.0, 100.5)
SLOW = (150.0, 151.0, 149.0)


def archives(folder: Path, seconds: tuple[float, ...], workers: int = 2) -> list[Archive]:
    return [Archive.open(Path(path)) for path in sealed_repeats(folder, seconds, workers=workers)]


def check(results: list[Archive], baseline: list[Archive], **wanted: Any) -> Check:
    (found,) = check_results(results, baseline, [Wanted(**wanted)])
    return found


def rounded(found: Check) -> tuple[float, ...]:
    """The values of the baseline in whole milliseconds: sums of shares differ in the last digits."""
    return tuple(round(value, 3) for value in found.to_dict()["baseline"])


def test_an_archive_on_both_sides_is_not_compared_with_itself(tmp_path: Path) -> None:
    """A folder of results that is its own baseline would pass every gate."""
    slow = archives(tmp_path / "slow", SLOW)
    alone = check(slow, slow)
    assert (alone.decision.verdict, alone.to_dict()["baseline"]) == (Verdict.CANNOT_TELL, [])
    both = check(slow, archives(tmp_path / "old", GOOD) + slow)
    assert (both.decision.verdict, rounded(both)) == (Verdict.FAILED, GOOD)


def test_sizes_are_checked_one_by_one(tmp_path: Path) -> None:
    baseline = archives(tmp_path / "two", GOOD) + archives(tmp_path / "three", GOOD, workers=3)
    results = archives(tmp_path / "a", GOOD[:3]) + archives(tmp_path / "b", SLOW, workers=3)
    found = {one.workers: one for one in check_results(results, baseline, [Wanted()])}
    assert {workers: one.decision.verdict for workers, one in found.items()} == {2: Verdict.PASSED, 3: Verdict.FAILED}
    assert overall(list(found.values())) is Verdict.FAILED
    assert overall([]) is Verdict.CANNOT_TELL


def test_results_without_the_figure_decide_nothing_and_hide_no_others(tmp_path: Path) -> None:
    sides = []
    for side in ("old", "new"):
        silent = archives(tmp_path / f"{side}3", GOOD, workers=3)
        for archive in silent:
            archive.result["samples"] = None
        sides.append(archives(tmp_path / f"{side}2", GOOD) + silent)
    found = {one.workers: one.decision for one in check_results(sides[1], sides[0], [Wanted("throughput")])}
    assert {workers: one.verdict for workers, one in found.items()} == {2: Verdict.PASSED, 3: Verdict.CANNOT_TELL}
    assert found[3].reason == "These runs have no throughput."
