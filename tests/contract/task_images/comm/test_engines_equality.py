"""torch's own engines on real ranks against the references, and the page's cells of them."""

from pathlib import Path

import pytest

from task_images.comm.methods import NATIVE
from tests.contract.task_images.ranks import RankServer
from tests.unit.task_images.comm.equality import SETTINGS, read_page

PROGRAM = "tests.contract.task_images.comm.equality_ranks"


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
def test_torchs_engines_are_what_the_page_says(ranks: RankServer, tmp_path: Path, size: int) -> None:
    """By day the engines are compared with the mean by hand, in checks.py."""
    ended = ranks.run(PROGRAM, size, tmp_path, {})
    assert [one.code for one in ended] == [0] * size, ended[0].stderr
    lines = [line.split() for line in ended[0].stdout.splitlines() if line.startswith("CELL ")]
    assert {(method, name) for _, method, name, *_ in lines} == {
        (method, name) for method in NATIVE for name in SETTINGS
    }
    page = read_page()
    for _, method, name, cell, *why in lines:
        (expected,) = [part for part in page[method][name].split("), ") if str(size) in part]
        assert cell == expected.partition(" ")[0], (method, name, why)
