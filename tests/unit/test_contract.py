"""The contract between tool and tasks: variables in, events out."""

import io
import json
import time
from pathlib import Path

import pytest

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
                {"time": "now"},
                {"time": True},
                {"time": float("nan")},
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


def test_variables_that_are_not_there() -> None:
    assert vars(Contract({})) == {
        "rank": 0,
        "world_size": 1,
        "local_rank": 0,
        "local_world_size": 1,
        "node_rank": 0,
        "master_addr": "127.0.0.1",
        "master_port": 29500,
        "run_id": "unnamed",
        "backend": "gloo",
        "hosts": [],
        "device": "cpu",
        "goal": "full",
        "output_dir": ".",
        "data_dir": None,
        "seed": 42,
        "parameters": {},
        "calibrate": False,
        "network": None,
        "method": {},
        "role": "trainer",
        "servers": 0,
        "attempt": 0,
        "checkpoint_dir": None,
        "checkpoint_every": None,
        "resume_from": None,
        "survives": False,
        "is_shrunk": False,
        "first_rank": 0,
        "collective_seconds": 0,
    }


def test_every_variable_is_read_into_its_attribute() -> None:
    given = {
        "RANK": "3",
        "WORLD_SIZE": "5",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "NODE_RANK": "4",
        "MASTER_ADDR": "host",
        "MASTER_PORT": "1234",
        "MLBENCH_RUN_ID": "run-7",
        "MLBENCH_BACKEND": "nccl",
        "MLBENCH_HOSTS": "a,,b",
        "MLBENCH_DEVICE": "gpu",
        "MLBENCH_GOAL": "light",
        "MLBENCH_OUTPUT_DIR": "/out",
        "MLBENCH_DATA_DIR": "/data",
        "MLBENCH_SEED": "7",
        "MLBENCH_PARAMETERS": '{"steps": 3}',
        "MLBENCH_CALIBRATE": "1",
        "MLBENCH_NETWORK": "1gbit",
        "MLBENCH_METHOD": '{"name": "bsp"}',
        "MLBENCH_ROLE": "trainer",
        "MLBENCH_SERVERS": "2",
        "MLBENCH_ATTEMPT": "6",
        "MLBENCH_CHECKPOINT_DIR": "/checkpoints",
        "MLBENCH_CHECKPOINT_EVERY": "30s",
        "MLBENCH_RESUME": "/checkpoints/40",
        "MLBENCH_SURVIVE": "1",
        "MLBENCH_SHRUNK": "1",
        "MLBENCH_FIRST_RANK": "8",
        "MLBENCH_COLLECTIVE_SECONDS": "90",
    }
    assert vars(Contract(given)) == {
        "rank": 3,
        "world_size": 5,
        "local_rank": 1,
        "local_world_size": 2,
        "node_rank": 4,
        "master_addr": "host",
        "master_port": 1234,
        "run_id": "run-7",
        "backend": "nccl",
        "hosts": ["a", "b"],
        "device": "gpu",
        "goal": "light",
        "output_dir": "/out",
        "data_dir": "/data",
        "seed": 7,
        "parameters": {"steps": 3},
        "calibrate": True,
        "network": "1gbit",
        "method": {"name": "bsp"},
        "role": "trainer",
        "servers": 2,
        "attempt": 6,
        "checkpoint_dir": "/checkpoints",
        "checkpoint_every": "30s",
        "resume_from": "/checkpoints/40",
        "survives": True,
        "is_shrunk": True,
        "first_rank": 8,
        "collective_seconds": 90,
    }
    assert Contract({"RANK": "2", "WORLD_SIZE": "3"}).first_rank == 2


@pytest.mark.parametrize(
    ("rank", "role", "is_valid"),
    [
        *((-1, "trainer", False), (0, "trainer", True), (3, "trainer", True), (4, "trainer", False)),
        *((3, "server", False), (4, "server", True), (5, "server", True), (6, "server", False)),
    ],
)
def test_servers_have_the_numbers_behind_the_trainers(rank: int, role: str, is_valid: bool) -> None:
    variables = {"RANK": str(rank), "WORLD_SIZE": "4", "MLBENCH_ROLE": role, "MLBENCH_SERVERS": "2"}
    if is_valid:
        assert Contract(variables).rank == rank
        return
    with pytest.raises(ContractError, match=f"RANK is {rank} but WORLD_SIZE is 4"):
        Contract(variables)


@pytest.mark.parametrize(
    ("change", "is_event"),
    [
        ({"rank": 0}, True),
        ({"rank": 2**53 - 1}, True),
        ({"rank": 2**53}, False),
        ({"rank": 1.0}, False),
        ({"time": -(2**53) + 1}, True),
        ({"time": -(2**53)}, False),
        ({"time": 2**53}, False),
        ({"time": float("inf")}, False),
        *(({"event": kind}, True) for kind in ("metric", "phase", "result", "environment", "network")),
    ],
)
def test_ranks_and_times_that_a_float_holds_are_figures(change: dict[str, object], is_event: bool) -> None:
    line = contract.PREFIX + json.dumps({**EVENT, **change})
    assert (parse_event(line) is not None) is is_event
    assert (parse_event(line.encode()) is not None) is is_event


def test_an_event_has_a_version_a_rank_a_time_and_its_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 12.5)
    stream = io.StringIO()
    emit("metric", 3, stream=stream, name="größe", value=float("-inf"))
    assert stream.getvalue() == (
        '@mlbench {"v":1,"event":"metric","rank":3,"time":12.5,"name":"gr\\u00f6\\u00dfe","value":"-inf"}\n'
    )


@pytest.mark.parametrize(
    ("variables", "rank"),
    [({}, 0), ({"RANK": "2"}, 2), ({"RANK": "2", "MLBENCH_FIRST_RANK": "5"}, 5), ({"RANK": "two"}, 0)],
)
def test_an_event_is_of_the_rank_of_the_first_attempt(
    variables: dict[str, str], rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "MLBENCH_FIRST_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    stream = io.StringIO()
    emit("phase", stream=stream, phase="loading")
    event = parse_event(stream.getvalue())
    assert event is not None
    assert event["rank"] == rank
