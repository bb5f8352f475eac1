"""Every method on real ranks: exact sums, conservation, bytes, checkpoints."""

from pathlib import Path

import pytest

from tests import NIGHTLY
from tests.contract.task_images.comm import checks
from tests.contract.task_images.ranks import RankServer


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("size", "stride"), ((2, 1), (3, 3), (3, 1), (4, 1), (8, 1)) if NIGHTLY else ((3, 3),))
def test_all_checks_hold(ranks: RankServer, tmp_path: Path, size: int, stride: int) -> None:
    """With a stride some checks are made of a third of the presets only."""
    started = ranks.start("tests.contract.task_images.comm.checks", size, tmp_path, {"stride": stride})
    for one in ranks.wait(started, 800):
        assert one.stderr == ""
        assert [line for line in one.stdout.splitlines() if line.startswith("OK ")] == [
            f"OK {check.__name__}" for check in checks.CHECKS
        ]
        assert one.code == 0
