"""What the forms for new runs propose, and what they remember."""

from pathlib import Path

import pytest

from mlbench_cli.runs.questions import propose_name, recall, remember
from mlbench_cli.runs.request import Request


@pytest.mark.parametrize(
    ("taken", "name"),
    [([], "my-run"), (["my-run-2"], "my-run2"), (["my-run-1", "my-run2-4"], "my-run3"), (["my-runner"], "my-run")],
)
def test_a_proposed_name_is_none_of_another_run_or_of_its_sizes(taken: list[str], name: str) -> None:
    assert propose_name(taken) == name


def test_what_a_form_did_not_ask_this_time_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert remember(Request(task="imagenet_resnet", data_dir="/data")) is None
    assert remember(Request(command="true")) is None
    assert {key: recall()[key] for key in ("task", "data_dir", "command")} == {
        "task": "custom",
        "data_dir": "/data",
        "command": "true",
    }
