"""Every method equals its paper's pseudo-code, with every way to update that tasks have, or is refused."""

from pathlib import Path

import pytest

from task_images.methods import FILES
from tests import slow
from tests.contract.task_images.methods.equality import EQUAL, REFUSED, SETTINGS, Case, is_refused, make
from tests.contract.task_images.ranks import RankServer

PROGRAM = "tests.contract.task_images.methods.equality"


# By day each optimizer and each situation is met, by two ranks or by three.
OF_TWO, OF_THREE = ["SGD, plain", "momentum, clip", "AdamW, overflow"], ["AdamW, clip", "momentum, overflow"]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("size", "settings"),
    [
        (2, OF_TWO),
        *slow([(3, OF_THREE)]),
        *(pytest.param(size, SETTINGS, id=f"{size}, all", marks=pytest.mark.nightly) for size in (2, 3, 4)),
    ],
)
def test_every_method_equals_its_reference_or_is_refused(
    ranks: RankServer, tmp_path: Path, size: int, settings: list[str]
) -> None:
    ended = ranks.wait(ranks.start(PROGRAM, size, tmp_path, {"settings": settings}, servers=1), 800)
    assert [one.code for one in ended] == [0] * (size + 1), [one.stderr[-1000:] for one in ended]
    lines = [line.split("|") for line in ended[0].stdout.splitlines() if line.startswith("CELL|")]
    found = {(name, setting): cell for _, name, cell, setting in lines}
    wanted = {
        (name, setting): REFUSED if is_refused(make(name), Case(setting, size)) else EQUAL
        for name in FILES
        for setting in settings
    }
    assert {key: cell for key, cell in found.items() if cell != wanted[key]} == {}
    assert found.keys() == wanted.keys()
