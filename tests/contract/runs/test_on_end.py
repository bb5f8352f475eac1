"""The command of the setting on-end, at the end of real runs."""

import json
import time
from pathlib import Path

import pytest

from mlbench_cli.app import run


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def wait_for(path: Path, seconds: float = 60.0) -> str:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if path.is_file() and (text := path.read_text()).endswith("\n"):
            return text
        time.sleep(0.05)
    raise AssertionError(f"{path} was not written")


def test_the_command_gets_the_facts_of_each_run_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "ends"
    command = f'cat > "{target}.$MLBENCH_RUN_NAME.json"; echo "$MLBENCH_RUN_OUTCOME $MLBENCH_RUN_TASK" >> "{target}"'
    monkeypatch.setenv("MLBENCH_ON_END", command)
    assert run(["run", "good", "1", "--command", "true"]) == 0
    assert wait_for(target) == "completed custom\n"
    assert run(["run", "bad", "1", "--command", "false"]) == 7
    while wait_for(target).count("\n") < 2:
        time.sleep(0.05)
    assert run(["wait", "good-1"]) == 0  # nobody runs it again
    assert target.read_text() == "completed custom\nfailed custom\n"
    document = json.loads((tmp_path / "ends.bad-1.json").read_text())
    assert (document["name"], document["outcome"], document["workers"]) == ("bad-1", "failed", 1)


def test_a_command_that_fails_changes_nothing_about_the_run(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLBENCH_ON_END", "echo 'no mail today' >&2; exit 3")
    assert run(["run", "good", "1", "--command", "true"]) == 0
    (folder,) = (home / "runs").iterdir()
    assert "no mail today" in wait_for(folder / ".state" / "on_end.log")
    assert run(["verify", str(folder)]) == 0
