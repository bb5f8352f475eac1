"""Methods on real ranks: exact sums, conservation, bytes, checkpoints, and faults that the self-check finds."""

from pathlib import Path

import pytest

from tests import NIGHTLY
from tests.contract.task_images.methods import checks
from tests.contract.task_images.ranks import RankServer


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("size", (2, 3, 4, 8) if NIGHTLY else (3,))
def test_all_checks_hold(ranks: RankServer, tmp_path: Path, size: int) -> None:
    started = ranks.start("tests.contract.task_images.methods.checks", size, tmp_path, {})
    for one in ranks.wait(started, 800):
        assert one.stderr == ""
        assert [line for line in one.stdout.splitlines() if line.startswith("OK ")] == [
            f"OK {check.__name__}" for check in checks.CHECKS
        ]
        assert one.code == 0
