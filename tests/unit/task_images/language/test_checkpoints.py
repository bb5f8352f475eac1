"""Distributed checkpoints with one rank: what is in the folder, what resumes, what is damaged or of another run."""

import json
from pathlib import Path
from typing import Any

import pytest

from task_images.contract import EnvironmentUnfitError, TaskUsageError
from task_images.language.checkpoints import (
    read_facts,
)

FACTS = {"task": "a_task", "seed": 1, "parameters": {"width": 8}, "position": {"total": 3}}


@pytest.mark.parametrize(
    ("expected", "words"),
    [
        ({"task": "a_task"}, ""),
        ({"task": "a_task", "seed": 1, "parameters": {"width": 8}}, ""),
        ({"task": "other"}, "task = 'a_task', this run has 'other'"),
        ({"seed": 2}, "seed = 1, this run has 2"),
        ({"parameters": {"width": 16}}, "width = 8, this run has 16"),
        ({"parameters": {"depth": 2}}, "depth = None, this run has 2"),
    ],
)
def test_a_checkpoint_belongs_to_runs_with_its_parameters(tmp_path: Path, expected: Any, words: str) -> None:
    (tmp_path / "mlbench.json").write_text(json.dumps({"form": 3, **FACTS}))
    if not words:
        assert read_facts(tmp_path, expected)["position"] == {"total": 3}
        return
    with pytest.raises(TaskUsageError, match=f"was made with {words}"):
        read_facts(tmp_path, expected)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "is not a checkpoint"),
        ("{", "is not a checkpoint"),
        ("[3]", "not of the form 3"),
        ('{"form": 2}', "form 3"),
    ],
)
def test_other_folders_are_no_checkpoints(tmp_path: Path, text: str | None, words: str) -> None:
    if text is not None:
        (tmp_path / "mlbench.json").write_text(text)
    with pytest.raises(EnvironmentUnfitError, match=words):
        read_facts(tmp_path, {})
