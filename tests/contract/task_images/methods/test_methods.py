"""Methods on real ranks: exact sums, conservation, bytes, checkpoints, and faults that the self-check finds."""

from pathlib import Path

import pytest

from tests import NIGHTLY, slow
from tests.contract.task_images.methods import checks
from tests.contract.task_images.ranks import RankServer

ALL = [check.__name__ for check in checks.CHECKS]
FIRST = [
    "bytes_are_those_of_the_formula",
    "a_resumed_training_goes_on_as_if_it_had_not_stopped",
    "what_a_method_keeps_of_the_weights_follows_the_model_of_a_checkpoint",
    "another_number_of_ranks_shares_what_was_not_sent",
    "a_falsified_message_is_found",
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("size", "names"), [(size, ALL) for size in (2, 3, 4, 8)] if NIGHTLY else [(3, FIRST), *slow([(3, ALL)])]
)
def test_all_checks_hold(ranks: RankServer, tmp_path: Path, size: int, names: list[str]) -> None:
    started = ranks.start("tests.contract.task_images.methods.checks", size, tmp_path, {"checks": names})
    for one in ranks.wait(started, 800):
        assert one.stderr == ""
        assert [line for line in one.stdout.splitlines() if line.startswith("OK ")] == [f"OK {name}" for name in names]
        assert one.code == 0
