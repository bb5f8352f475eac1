"""Ranks that wait for each other for ever are told from ranks that wait for one that computes."""

import pytest

from mlbench_cli.agent.hang import IDLE_SECONDS, IdleWatch
from tests.fakes.clock import Clock


def test_a_run_hangs_only_when_all_of_its_ranks_are_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, watch, used = Clock(), IdleWatch(), 0.0
    monkeypatch.setattr("mlbench_cli.agent.hang.time", clock)

    def wait(seconds: float, share: float) -> bool:
        """Whether the run hangs after so many seconds in which rank 0 uses a share of a core, and rank 1 none."""
        nonlocal used
        for _ in range(int(seconds)):
            clock.now, used = clock.now + 1, used + share
            watch.look([{"rank": 0, "cpu_seconds": used}, {"rank": 1, "cpu_seconds": 0.0}])
        return watch.is_long

    assert not wait(2 * IDLE_SECONDS, share=1.0)
    assert not wait(IDLE_SECONDS - 2, share=0.0)
    assert wait(4, share=0.0)
    assert watch.since == clock.now - IDLE_SECONDS - 2
    assert not wait(1, share=1.0)
