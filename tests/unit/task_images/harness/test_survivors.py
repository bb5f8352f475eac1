"""A rank that outlives another one waits for the next attempt, and files are replaced as a whole or not at all."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from task_images.contract import Contract
from task_images.harness import survivors
from task_images.harness.files import replace_file
from task_images.harness.survivors import await_next_attempt


@pytest.mark.parametrize("has_group", [True, False])
def test_a_rank_leaves_its_group_and_takes_the_variables_of_the_next_attempt(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, has_group: bool
) -> None:
    environment = {"RANK": "2", "WORLD_SIZE": "4", "OTHER": "kept"}
    calls: list[str] = []
    waits: list[float] = []
    group = SimpleNamespace(_abort_process_group=lambda: calls.append("abort"))
    monkeypatch.setattr(survivors, "dist", SimpleNamespace(is_initialized=lambda: has_group, distributed_c10d=group))
    monkeypatch.setattr(survivors, "os", SimpleNamespace(environ=environment))
    monkeypatch.setattr(survivors, "gc", SimpleNamespace(collect=lambda: calls.append("free memory")))

    def sleep(seconds: float) -> None:
        """The agent writes after the third look. Files for other ranks and attempts are not for this one."""
        assert (tmp_path / "waiting-3-2").exists()
        assert seconds < 0.1
        waits.append(seconds)
        for name in ("next-4-1.json", "next-3-2.json", "next-5-2.json"):
            (tmp_path / name).write_text('{"RANK": "9"}')
        if len(waits) == 3:
            (tmp_path / "next-4-2.json").write_text(json.dumps({"RANK": "1", "MLBENCH_ATTEMPT": "4"}))

    monkeypatch.setattr(survivors, "time", SimpleNamespace(sleep=sleep))
    contract = Contract(
        {"RANK": "2", "WORLD_SIZE": "4", "MLBENCH_ATTEMPT": "3", "MLBENCH_CHECKPOINT_DIR": str(tmp_path)}
    )
    await_next_attempt(contract)
    assert environment == {"RANK": "1", "WORLD_SIZE": "4", "OTHER": "kept", "MLBENCH_ATTEMPT": "4"}
    assert calls == [*(["abort"] if has_group else []), "free memory"]
    assert len(waits) == 3


def test_a_file_is_replaced_once_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    path.write_bytes(b"old")
    with replace_file(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_written_keeps_its_old_contents(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    path.write_bytes(b"old")

    def write() -> Any:
        with replace_file(path) as file:
            file.write(b"half")
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        write()
    assert path.read_bytes() == b"old"
