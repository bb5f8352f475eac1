"""The contract between tool and tasks: variables in, events out."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from task_images import contract
from task_images.contract import Contract, ContractError, emit, format_event, parse_event

EVENT = {"v": 1, "event": "metric", "rank": 3, "time": 1.5, "name": "loss", "value": 0.25}


def test_an_event_is_one_line() -> None:
    line = format_event(EVENT)
    assert line.startswith("@mlbench {")
    assert "\n" not in line
    assert parse_event(line) == parse_event(line.encode() + b"\n") == EVENT


def test_what_json_cannot_hold_becomes_text() -> None:
    event = parse_event(format_event({**EVENT, "value": float("nan"), "more": [float("inf"), {"a": -float("inf")}]}))
    assert event is not None
    assert (event["value"], event["more"]) == ("nan", ["inf", {"a": "-inf"}])


def test_numbers_of_torch_and_numpy_are_numbers() -> None:
    event = parse_event(
        format_event({**EVENT, "value": torch.tensor([0.5]), "epoch": np.int64(3), "more": np.float32("nan")})
    )
    assert event is not None
    assert (event["value"], event["epoch"], event["more"]) == (0.5, 3, "nan")


@pytest.mark.parametrize("unit", [1, 1e3, 1e6, 1e9])
def test_a_time_may_be_in_smaller_units_than_seconds(unit: float) -> None:
    event = parse_event(format_event({**EVENT, "time": 1.75e9 * unit}))
    assert event is not None
    assert event["time"] == 1.75e9


def test_an_event_behind_an_unfinished_line() -> None:
    assert parse_event("\r 40%|###  | " + format_event(EVENT)) == EVENT


@pytest.mark.parametrize(
    "line",
    [
        "",
        "@mlbench",
        "@mlbench {",
        "@mlbench []",
        "@mlbench {}",
        "epoch 3 @mlbench",
        *(
            contract.PREFIX + json.dumps({**EVENT, **change})
            for change in (
                {"v": 2},
                {"event": "rumour"},
                {"rank": -1},
                {"rank": True},
                {"rank": "0"},
                {"rank": 2**53},
                {"rank": 1.0},
                {"time": "now"},
                {"time": True},
                {"time": float("nan")},
                {"time": float("inf")},
                {"time": -(2**53)},
                {"time": 1e20},
            )
        ),
    ],
)
def test_no_events(line: str) -> None:
    assert parse_event(line) is None
    assert parse_event(line.encode()) is None


def test_emit_writes_once_and_flushes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    stream = io.StringIO()
    emit("phase", stream=stream, phase="training", epoch=1)
    event = parse_event(stream.getvalue())
    assert event is not None
    assert (event["rank"], event["phase"], event["epoch"]) == (2, "training", 1)


def test_an_event_begins_a_line_of_its_file(tmp_path: Path) -> None:
    with open(tmp_path / "log", "a") as log, open(tmp_path / "log", "a") as bar:
        emit("phase", 0, stream=log, phase="loading")
        for _ in range(2):
            bar.write("\r50 %")
            bar.flush()
            emit("phase", 0, stream=log, phase="training")
            emit("phase", 0, stream=log, phase="validation")
    lines = (tmp_path / "log").read_bytes().split(b"\n")
    assert [bool(parse_event(line)) for line in lines] == [True, False, True, True, False, True, True, False]


def test_variables() -> None:
    given = Contract(
        {
            "RANK": "1",
            "WORLD_SIZE": "2",
            "MASTER_PORT": "1234",
            "MLBENCH_HOSTS": "a,b",
            "MLBENCH_PARAMETERS": '{"rate": 0.1}',
            "MLBENCH_DATA_DIR": "",
        }
    )
    assert (given.rank, given.world_size, given.master_port, given.hosts) == (1, 2, 1234, ["a", "b"])
    assert (given.parameters, given.data_dir, given.backend, given.seed) == ({"rate": 0.1}, None, "gloo", 42)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RANK", "one"),
        ("RANK", "1"),
        ("MASTER_PORT", "x"),
        ("MLBENCH_DEVICE", "tpu"),
        ("MLBENCH_GOAL", "best"),
        ("MLBENCH_PARAMETERS", "{"),
        ("MLBENCH_PARAMETERS", "[]"),
    ],
)
def test_wrong_variables_are_named(name: str, value: str) -> None:
    with pytest.raises(ContractError, match=name):
        Contract({name: value})


@pytest.mark.parametrize("change", [{"rank": 0}, {"rank": 2**53 - 1}, {"time": -(2**53) + 1}], ids=str)
def test_ranks_and_times_that_a_float_holds_are_figures(change: dict[str, object]) -> None:
    line = contract.PREFIX + json.dumps({**EVENT, **change})
    assert parse_event(line) is not None
    assert parse_event(line.encode()) is not None
