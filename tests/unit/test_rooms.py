"""How many rooms a reader of the way of a run enters, and how often he comes back to one; and how that is counted."""

from pathlib import Path

import pytest

from tools import count_rooms
from tools.count_rooms import House, follow

MAX_ROOMS = MAX_RETURNS = 15

HALL = """
from contextlib import closing
from mlbench_cli import words
from mlbench_cli.east import room
from mlbench_cli.east.room import Box, Door, measure

def enter(door: Door, boxes: list[Box]) -> None:
    words.speak()
    door.open()
    for box in boxes:
        box.lid.lift()
    greet()
    room.measure(1)
    measure(2)
    greet()
    sorted(boxes, key=weigh)
    for item in untyped:
        item.lift()

def greet() -> None:
    with closing(room.find_boxes()) as found:
        next(found).shake()

def weigh(box: Box) -> int:
    return box.weight

class Guest:
    def __init__(self) -> None:
        self._boxes = Box.pair()

    def leave(self) -> None:
        (left, right) = self._boxes
        right.shake()
"""
ROOM = """
from collections.abc import Iterator
from typing import Protocol
from mlbench_cli.west.attic import Lid

class Door(Protocol):
    def open(self) -> None: ...

class Box:
    lid: "Lid | None"

    @property
    def weight(self) -> int:
        return 1

    def shake(self) -> None:
        pass

    @classmethod
    def pair(cls) -> tuple[int, "Box"]:
        return 1, cls()

def measure(number: int) -> int:
    return number

def find_boxes() -> Iterator[Box]:
    yield Box()
"""
ATTIC = """
class Lid:
    def lift(self) -> None:
        pass
"""


@pytest.fixture
def house(tmp_path: Path) -> House:
    files = {"east/hall.py": HALL, "east/room.py": ROOM, "west/attic.py": ATTIC, "words.py": "def speak(): ..."}
    for name, text in {**files, "__init__.py": "", "east/__init__.py": "", "west/__init__.py": ""}.items():
        path = tmp_path / "mlbench_cli" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return House(tmp_path)


def test_the_way_of_a_followed_run_has_few_rooms_and_returns() -> None:
    """If this fails: let a room do its part as a whole, so that nobody has to come back to it."""
    walk = follow(count_rooms.WAY_OF_A_RUN)
    assert len(walk.rooms) <= MAX_ROOMS, sorted(walk.rooms)
    assert walk.returns <= MAX_RETURNS, walk.stays
    ends = {"mlbench_cli.results.archive.judge", "mlbench_cli.results.archive.layout", "mlbench_cli.runs.finalize"}
    assert ends <= walk.rooms
    assert {"judge", "write_sums", "ProgressReader.read"} <= {place.name for place in walk.places}


def test_each_function_is_read_once_where_it_is_first_called(house: House) -> None:
    walk = follow("mlbench_cli.east.hall.enter", house)
    assert [place.name for place in walk.places] == [
        *("enter", "Lid.lift", "greet", "find_boxes", "Box", "Box.shake", "measure", "weigh", "Box.weight"),
    ]
    hall, room, attic = "mlbench_cli.east.hall", "mlbench_cli.east.room", "mlbench_cli.west.attic"
    assert walk.stays == [hall, attic, hall, room, hall, room]
    assert (len(walk.rooms), walk.returns) == (3, 3)


def test_a_method_knows_what_its_class_has_made(house: House) -> None:
    walk = follow("mlbench_cli.east.hall.Guest.leave", house)
    assert [place.name for place in walk.places] == ["Guest.leave", "Box.shake"]


@pytest.mark.parametrize("name", ["mlbench_cli.east.hall", "mlbench_cli.east.hall.nothing", "elsewhere.enter"])
def test_what_is_no_function_is_refused(house: House, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="is no function"):
        follow(name, house)
    with pytest.raises(SystemExit) as ended:
        count_rooms.main([name])
    assert ended.value.code == 2
    assert f"{name} is no function of mlbench_cli or providers" in capsys.readouterr().err


def test_the_command_prints_the_way_and_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert count_rooms.main(["mlbench_cli.runs.finished.read_finished"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("\nmlbench_cli.runs.finished\n  read_finished\n")
    assert printed.endswith("read_finished: 1 rooms, 0 returns, 3 functions and classes\n")
