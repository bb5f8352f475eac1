"""Lines about long preparations."""

from task_images.fetch import INTERVAL_SECONDS, ProgressLines


def test_the_time_that_is_left_follows_from_what_this_attempt_did() -> None:
    lines: list[str] = []
    now = 0.0
    progress = ProgressLines("packing", 4_000_000_000, lines.append, clock=lambda: now)
    progress.add(2_000_000_000, is_old=True)
    progress.add(1)
    assert lines == []
    now = INTERVAL_SECONDS
    progress.add(499_999_999)
    now += 1
    progress.add(1)
    assert lines == ["packing: 62% of 4.0 GB, 30 seconds left"]
    now = 60.0 * INTERVAL_SECONDS
    progress.reach(3_000_000_000)
    assert lines[1:] == ["packing: 75% of 4.0 GB, 10 minutes left"]


def test_nothing_is_promised_before_anything_is_done() -> None:
    lines: list[str] = []
    now = 0.0
    progress = ProgressLines("x", 0, lines.append, clock=lambda: now)
    now = 2 * INTERVAL_SECONDS
    progress.add(0)
    assert lines == ["x: 100% of 0 MB"]
