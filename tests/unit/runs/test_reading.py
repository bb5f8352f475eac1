"""Reading of runs: their logs line by line, what details and experiments say, and their removal."""

from typing import Any

import pytest

from mlbench_cli.results.archive.log_times import LogBlock
from mlbench_cli.runs.log_reader import select_entries, without_event
from task_images.contract import format_event

EVENT = format_event({"v": 1, "event": "metric", "rank": 0, "time": 1.0, "name": "loss", "value": 1}).encode() + b"\n"


# --- logs ------------------------------------------------------------------------------------------------------------


BLOCKS = [
    LogBlock(0, 10.0, True, [b"one\n", EVENT]),
    LogBlock(1, None, False, [b"two\n"]),
    LogBlock(0, 20.0, False, [b"half" + EVENT, b"three\n"]),
]


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ({"raw": False}, [b"one\n", b"two\n", b"half" + EVENT, b"three\n"]),
        ({"raw": True}, [b"one\n", EVENT, b"two\n", b"half" + EVENT, b"three\n"]),
        ({"raw": False, "since": 20.0}, [b"two\n", b"half" + EVENT, b"three\n"]),
        ({"raw": False, "since": 20.1}, [b"two\n"]),
        ({"raw": False, "tail": 1}, [b"three\n"]),
        ({"raw": False, "tail": 0}, []),
        ({"raw": True, "tail": 9}, [b"one\n", EVENT, b"two\n", b"half" + EVENT, b"three\n"]),
    ],
)
def test_which_lines_are_shown(options: dict[str, Any], texts: list[bytes]) -> None:
    assert [entry.text for entry in select_entries(BLOCKS, **options)] == texts


@pytest.mark.parametrize(
    ("line", "left"),
    [
        (EVENT, b""),
        (b"  " + EVENT, b""),
        (b"50%" + EVENT, b"50%\n"),
        (b"plain\n", b"plain\n"),
        (b"@mlbench {x\n", b"@mlbench {x\n"),
    ],
)
def test_a_line_without_its_event(line: bytes, left: bytes) -> None:
    assert without_event(line) == left


# --- details ---------------------------------------------------------------------------------------------------------


# --- experiments -----------------------------------------------------------------------------------------------------


# --- removal ---------------------------------------------------------------------------------------------------------
