"""Runs of one sitting are not independent of each other: what that means for the gate and for comparisons."""

from collections.abc import Iterable
from importlib import import_module
from pathlib import Path

import pytest

from mlbench_cli.results.analysis.compare import compare
from mlbench_cli.results.analysis.gate import decide
from mlbench_cli.results.analysis.sessions import Basis, Sessions, moment_of, relate
from mlbench_cli.results.analysis.sessions import find_sessions as sessions_of
from mlbench_cli.results.analysis.stats import Verdict, ratio
from mlbench_cli.results.archive.files import Archive
from mlbench_cli.util.times import timestamp
from tests.unit.results.runs import START, sealed_run

DAY = 86400.0


def find_sessions(a: Iterable[Archive], b: Iterable[Archive]) -> Sessions:
    return sessions_of(list(map(moment_of, a)), list(map(moment_of, b)))


def _archive(folder: Path, number: int, at: float = 0.0, *, seconds: float = 100.0, session: str = "boot") -> Archive:
    path = sealed_run(folder / f"{number}", seconds=seconds, name=f"x-2-r{number}")
    archive = Archive.open(path)
    archive.run["provenance"] = {"session": session}
    archive.result["started"] = timestamp(START + at)
    return archive


def test_runs_of_one_boot_with_less_than_an_hour_between_them_are_a_session(tmp_path: Path) -> None:
    a = [_archive(tmp_path, number, 600.0 * number) for number in range(3)]
    b = [_archive(tmp_path, 3, 1800.0), _archive(tmp_path, 4, DAY), _archive(tmp_path, 5, DAY, session="another boot")]
    found = find_sessions(a, b)
    assert len(set(found.a)) == 1
    assert found.b[0] == found.a[0]
    assert len(set(found.b)) == 3
    assert found.basis is Basis.WITHIN


def test_the_hour_of_a_session_counts_from_the_end_of_a_run(tmp_path: Path) -> None:
    a = [_archive(tmp_path, 0, seconds=7200.0), _archive(tmp_path, 1, 9000.0)]  # half an hour after it
    b = [_archive(tmp_path, 2, 600.0), _archive(tmp_path, 3, 9100.0 + 3700.0)]  # beside it, and later than an hour
    found = find_sessions(a, b)
    assert len({*found.a, found.b[0]}) == 1
    assert found.b[1] not in found.a


def test_sides_that_were_not_run_alternately_are_named(tmp_path: Path) -> None:
    archives = [_archive(tmp_path, number, 600.0 * number, seconds=100.0 + number % 2) for number in range(6)]
    blocks, turns = (archives[:3], archives[3:]), (archives[::2], archives[1::2])
    assert "the sides did not alternate" in decide(compare(*blocks), 1.5).reason
    assert "alternately" not in decide(compare(*turns), 1.5).reason


@pytest.mark.parametrize(
    ("a", "b", "basis"),
    [
        ((1, 1), (1, 1), Basis.WITHIN),
        ((1, 1), (2, 2), Basis.UNKNOWN),
        ((1, 2), (1, 2), Basis.PAIRED),
        ((1, 2), (3, 4), Basis.BETWEEN),
        ((1, 2, 3), (4,), Basis.UNKNOWN),
    ],
)
def test_what_can_be_compared_follows_from_the_sessions(a: tuple[int, ...], b: tuple[int, ...], basis: Basis) -> None:
    assert Sessions(a, b).basis is basis


@pytest.mark.parametrize(
    ("changes", "is_shared"),
    [
        ({}, True),
        ({"cluster": "other"}, True),  # the boot of this machine says more
        ({"engine": "kubernetes"}, False),
        ({"engine": "kubernetes", "cluster": "other"}, False),
    ],
)
def test_a_session_is_a_boot_of_this_machine_or_a_cluster(
    sealed: Path, changes: dict[str, str], is_shared: bool
) -> None:
    one, other = Archive.open(sealed), Archive.open(sealed)
    for archive, name in ((one, "one"), (other, "other")):
        archive.run["id"] = name
        archive.run["provenance"] = {"session": "boot"}
    other.run["spec"].update(changes)
    assert bool(find_sessions([one], [other]).shared) == is_shared
    one.run["spec"].update(changes)
    one.run["provenance"] = None
    if "engine" in changes:
        assert find_sessions([one], [other]).shared == (1,)


def test_a_change_cannot_be_told_from_a_difference_between_two_sessions(tmp_path: Path) -> None:
    old = [_archive(tmp_path / "a", number, seconds=100.0 + number) for number in range(3)]
    new = [_archive(tmp_path / "b", number, DAY, seconds=150.0 + number) for number in range(3)]
    found = compare(old, new, ("old", "new"))
    assert found.rows["seconds"].words.endswith(", other session")
    assert str(found.verdict).startswith("No verdict on old and new (3 and 3 runs): measured in different sessions")
    assert decide(found, 1.0).verdict is Verdict.CANNOT_TELL
    same = [_archive(tmp_path / "c", number, 1000.0, seconds=150.0 + number) for number in range(3)]
    found = compare(old, same, ("old", "new"))
    assert found.verdict == "new is 1.50× slower than old (95 %: 1.47 to 1.53; 3 and 3 runs)."
    assert found.sessions.note == "one session, so differences from day to day are not included"
    assert "from day to day" in decide(found, 1.0).reason


def test_sessions_with_both_sides_are_compared_in_pairs() -> None:
    # Sessions differ by a factor of 2, and the new code is 10 % slower in each.
    levels = (10.0, 20.0, 14.0)
    old = [level * factor for level in levels for factor in (0.99, 1.01)]
    new = [1.1 * value for value in old]
    each = tuple(number for number in range(3) for _ in range(2))
    found, independent = relate(old, new, Sessions(each, each)), ratio(old, new)
    assert found is not None
    assert independent is not None
    assert found.mean == pytest.approx(1.1)
    assert found.gate(1.05) is Verdict.FAILED
    assert independent.gate(1.05) is Verdict.CANNOT_TELL


def test_more_runs_in_one_new_session_are_no_more_evidence() -> None:
    old = (10.0, 10.8, 9.4, 10.3, 9.9, 10.6)
    one = relate(old, (11.2,), Sessions(tuple(range(6)), (9,)))
    many = relate(old, (11.2,) * 5, Sessions(tuple(range(6)), (9,) * 5))
    assert one is not None
    assert many is not None
    assert [one.low, one.high] == pytest.approx([many.low, many.high])
    assert one.gate(1.0) is many.gate(1.0) is Verdict.CANNOT_TELL


@pytest.mark.slow
def test_at_most_one_in_twenty_fails_by_chance_whatever_sessions_differ_by() -> None:
    simulation = import_module("benchmarks.gate_errors")
    assert len(simulation.SPREADS) == 2
    cases = [(design, spread) for design in simulation.DESIGNS for spread in simulation.SPREADS]
    alarms = [simulation.simulate(design, spread, 0.0, series=400) for design, spread in cases]
    # 400 series with a level of 5 %: more than 36 failures have a probability of 0.03 % (binomial).
    assert max(errors.failed for errors in alarms) <= 0.09
    assert max(errors.failed_without_sessions for errors in alarms) > 0.3  # what it guards against


# --- blocks and times -----------------------------------------------------------------------------------------------


def _timed(sealed: Path, name: str, begin: float | None, seconds: float | None, created: float = 0.0) -> Archive:
    archive = Archive.open(sealed)
    archive.run["id"] = name
    archive.run["created"] = timestamp(START + created)
    archive.result["started"] = None if begin is None else timestamp(START + begin)
    archive.result["wall_seconds"] = seconds
    return archive


@pytest.mark.parametrize(
    ("a", "b", "in_blocks"),
    [
        (((0.0, 1.0), (20.0, 1.0)), ((10.0, 90.0), (30.0, 90.0)), False),  # by their begins, and not by their ends
        (((0.0, 90.0), (10.0, 1.0)), ((20.0, 1.0), (30.0, 1.0)), True),
        (((0.0, 1.0), (10.0, 1.0)), ((10.0, 1.0), (20.0, 1.0)), False),  # two began at once
        (((20.0, 1.0), (30.0, 1.0)), ((0.0, 1.0), (10.0, 1.0)), True),
        (((0.0, 1.0), (10.0, 1.0)), ((20.0, 1.0),), False),
    ],
)
def test_sides_are_in_blocks_by_the_begins_of_their_runs(
    sealed: Path, a: tuple[tuple[float, float], ...], b: tuple[tuple[float, float], ...], in_blocks: bool
) -> None:
    sides = [[_timed(sealed, f"{name}{n}", *each) for n, each in enumerate(own)] for name, own in (("a", a), ("b", b))]
    assert find_sessions(sides[0], sides[1]).in_blocks == in_blocks
