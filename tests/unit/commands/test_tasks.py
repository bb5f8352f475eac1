"""`mlbench tasks`: tasks of other folders, and parameters with their bounds."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from mlbench_cli.app import run
from mlbench_cli.commands.tasks import _format_value, _meaning
from mlbench_cli.tasks import catalog
from mlbench_cli.tasks.catalog import Parameter


@pytest.fixture
def own_folder(own_tasks: None, tmp_path: Path) -> Path:
    """A folder with a task like allreduce, in a process that does not know it yet."""
    folder = tmp_path / "my tasks"
    (folder / "own_task").mkdir(parents=True)
    shipped = Path(catalog.__file__).parents[2] / "task_images" / "allreduce" / "task.yaml"
    document = yaml.safe_load(shipped.read_text())
    document |= {"name": "own_task", "number": "z9", "title": "A task of this test", "image": "example.org/own:1"}
    (folder / "own_task" / "task.yaml").write_text(yaml.safe_dump(document))
    return folder


def test_a_task_of_another_folder_is_shown_with_the_command_that_runs_it(
    own_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["tasks", "own_task", "--task-path", str(own_folder)]) == 0
    printed = capsys.readouterr()
    assert "A task of this test" in printed.out
    assert f"--task own_task --task-path '{own_folder}' --set " in printed.err


def test_a_folder_without_tasks_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tasks", "--task-path", str(tmp_path)]) == 2
    assert "holds no task" in capsys.readouterr().err
    assert run(["tasks", "no_such_task"]) == 4


def parameter(**fields: Any) -> Parameter:
    return Parameter("p", **{"type": "float", "help": "rate", **fields})


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "rate (float)"),
        ({"min": 0.0}, "rate (float, >= 0)"),
        ({"max": 1.0}, "rate (float, <= 1)"),
        ({"min": 0.0, "max": 0.25}, "rate (float, 0..0.25)"),
        ({"type": "int", "min": 1, "max": 1_000_000_000}, "rate (int, 1..1000000000)"),
        ({"type": "str", "choices": ("a", "b")}, "rate (a, b)"),
        ({"type": "list", "choices": ("a", "b")}, "rate (some of: a, b)"),
    ],
)
def test_the_meaning_of_a_parameter_has_its_bounds(fields: dict[str, Any], text: str) -> None:
    assert _meaning(parameter(**fields)) == text


@pytest.mark.parametrize(
    ("fields", "value", "text"),
    [
        ({"type": "list", "choices": ("a", "b")}, ["a", "b"], "all"),
        ({"type": "list", "choices": ("a", "b")}, ["b"], "b"),
        ({"type": "list", "choices": ("a",)}, ["a"], "a"),
        ({"type": "sizes"}, [1, 2, 3, 4], "1,2,3,4"),
        ({"type": "sizes"}, [1, 2, 3, 4, 5], "5 from 1 to 5"),
        ({"type": "bool"}, True, "true"),
    ],
)
def test_a_value_is_shown_as_set_takes_it_or_named_if_it_is_long(
    fields: dict[str, Any], value: object, text: str
) -> None:
    assert _format_value(parameter(**fields), value) == text
