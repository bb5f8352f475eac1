"""Checkpoints from which ranks restart: when they are due, which files stay, and the clock of the whole run."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from task_images.contract import Contract
from task_images.harness.elastic import KEPT, ClockLook, ElasticCheckpoints


def make(folder: Path, **variables: str) -> tuple[ElasticCheckpoints, list[Any]]:
    written: list[Any] = []

    def write(path: Path, state: Mapping[str, Any]) -> None:
        written.append((path.relative_to(folder).as_posix(), state))
        path.write_text("state")

    contract = Contract({"WORLD_SIZE": "4", "MLBENCH_CHECKPOINT_DIR": str(folder), **variables})
    return ElasticCheckpoints(contract, write), written


@pytest.mark.parametrize(
    ("every", "is_on", "updates", "seconds"),
    [
        ("200", True, 200, 0.0),
        ("30s", True, 0, 30.0),
        ("5m", True, 0, 300.0),
        ("2h", True, 0, 7200.0),
        ("", False, 0, 60.0),
    ],
)
def test_checkpoints_come_after_updates_or_after_a_time(
    tmp_path: Path, every: str, is_on: bool, updates: int, seconds: float
) -> None:
    made, _ = make(tmp_path, MLBENCH_CHECKPOINT_EVERY=every)
    assert (made.is_on, made._updates, made._seconds) == (is_on, updates, seconds)


def test_every_so_many_updates_is_counted_and_needs_no_clock(tmp_path: Path) -> None:
    made, _ = make(tmp_path, MLBENCH_CHECKPOINT_EVERY="3")

    def refuse(value: float) -> float:
        raise AssertionError("no collective is needed")

    assert [total for total in range(1, 10) if made.is_due(total, refuse)] == [3, 6, 9]


def test_a_time_is_up_by_rank_0s_clock_and_begins_anew_with_each_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    made, written = make(tmp_path, MLBENCH_CHECKPOINT_EVERY="10s")
    due = []
    for total in range(1, 31):
        now[0] += 1.0
        if made.is_due(total, lambda value: value):
            due.append(total)
            made.keep(total, {}, {})
            made.wait()
    assert due == [10, 20, 30]
    assert len(written) == 6


def test_each_rank_writes_its_state_and_rank_0_the_common_one(tmp_path: Path) -> None:
    for rank in ("0", "2"):
        made, written = make(tmp_path, RANK=rank)
        made.keep(40, {"main": 1} if rank == "0" else None, {"own": rank})
        made.wait()
        expected: list[Any] = [(f"40/rank-{rank}.pt", {"own": rank})]
        assert written == expected + ([("40/main.pt", {"main": 1})] if rank == "0" else [])


@pytest.mark.parametrize("rank", ["0", "1"])
def test_the_last_three_stay(tmp_path: Path, rank: str) -> None:
    made, _ = make(tmp_path, RANK=rank)
    (tmp_path / "10").mkdir()
    (tmp_path / "10" / "rank-3.pt").touch()  # of another rank, which is slower
    for total in (10, 20, 30, 40, 50):
        made.keep(total, {} if rank == "0" else None, {})
        made.wait()
    assert KEPT == 3
    names = {path.relative_to(tmp_path).as_posix() for path in tmp_path.glob("*/*")}
    own = {f"{total}/rank-{rank}.pt" for total in (30, 40, 50)}
    main = {f"{total}/main.pt" for total in (30, 40, 50)} if rank == "0" else set()
    assert names == own | main | {"10/rank-3.pt"}
    assert not (tmp_path / "20").exists()


def test_what_cannot_be_written_is_raised_once_by_the_next(tmp_path: Path) -> None:
    def fail(path: Path, state: Mapping[str, Any]) -> None:
        raise OSError("disk full")

    made = ElasticCheckpoints(Contract({"MLBENCH_CHECKPOINT_DIR": str(tmp_path)}), fail)
    made.keep(1, None, {})
    with pytest.raises(OSError, match="disk full"):
        made.keep(2, None, {})
    made.wait()


def test_the_clock_of_the_run_begins_with_the_first_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [500.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    folder = tmp_path / "new"
    first, _ = make(folder, RANK="1")
    assert first.begin_training() == 0.0
    assert json.loads((folder / "clock-1.json").read_text()) == {"monotonic": 500.0}
    assert (folder / "training-0-1").exists()
    now[0] = 530.0
    second, _ = make(folder, RANK="0", MLBENCH_ATTEMPT="2", MLBENCH_FIRST_RANK="1")
    assert second.begin_training() == 30.0
    assert (folder / "training-2-0").exists()
    (folder / "clock-1.json").write_text("broken")
    assert second.begin_training() == 0.0


def test_an_attempt_resumes_only_from_what_it_is_given(tmp_path: Path) -> None:
    assert make(tmp_path)[0].resume is None
    assert make(tmp_path, MLBENCH_RESUME="/c/40")[0].resume == Path("/c/40")


def look(seconds: float, per_update: float, most: int = 1000) -> tuple[int, int]:
    """The update after which the moment is seen to be past, and the number of looks."""
    clock, looks = ClockLook(), 0

    def left() -> float:
        nonlocal looks
        looks += 1
        return seconds - total * per_update

    for total in range(1, most):
        if clock.is_past(total, left):
            return total, looks
    raise AssertionError("never")


@pytest.mark.parametrize(("seconds", "per_update"), [(10.0, 1.0), (10.0, 0.01), (600.0, 1.0), (0.5, 1.0), (3.0, 0.1)])
def test_the_end_is_noticed_within_two_updates_with_few_looks(seconds: float, per_update: float) -> None:
    total, looks = look(seconds, per_update, 2000)
    due = seconds / per_update
    assert due <= total <= due + 2
    assert looks <= 12 + due / 25


def test_a_moment_that_is_put_off_is_watched_from_the_next_update() -> None:
    clock = ClockLook()
    assert not clock.is_past(1, lambda: 100.0)
    assert not clock.is_past(2, lambda: 99.0)  # one second per update: half of the way is 49, 25 at most
    asked: list[int] = []

    def left(total: int) -> float:
        asked.append(total)
        return 500.0

    for total in range(3, 30):
        assert not clock.is_past(total, lambda total=total: left(total))  # type: ignore[misc]
    assert asked == [27, 28, 29]
