"""The files that tasks want: every shipped task's list is sound, what is missing is found, bad lists are refused."""

from pathlib import Path

import pytest

from mlbench_cli.errors import UsageError
from mlbench_cli.tasks.catalog import Task, load_catalog
from mlbench_cli.tasks.datafiles import DataFiles, parse_data_files

NEEDY = [task for task in load_catalog().values() if task.files]
FILES = DataFiles({"data": "real"}, (".", "sub"), (("train", "train.tar"), ("val",)), "--set data=made")


@pytest.mark.parametrize("task", NEEDY, ids=lambda task: task.name)
def test_every_condition_is_a_parameter_with_that_value(task: Task) -> None:
    assert task.files is not None
    for name, value in task.files.when.items():
        assert set(value if isinstance(value, list) else [value]) <= set(task.parameters[name].choices)
    assert task.files.are_read(task.resolve("spec"))


def test_tasks_whose_data_is_a_choice_say_what_they_read() -> None:
    choosers = {task.name for task in load_catalog().values() if "data" in task.parameters}
    assert choosers == {task.name for task in NEEDY}


def test_missing_files_are_named_with_their_alternatives(tmp_path: Path) -> None:
    assert FILES.list_missing(str(tmp_path)) == ["train (or train.tar)", "val"]
    (tmp_path / "train.tar").touch()
    (tmp_path / "sub" / "val").mkdir(parents=True)
    assert FILES.list_missing(str(tmp_path)) == []
    assert FILES.list_missing(None) == ["train (or train.tar)", "val"]


def test_the_cache_is_looked_into_if_the_task_does_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "mlbench" / "datasets" / "val").mkdir(parents=True)
    cached = DataFiles({}, (".",), (("val",),), "", default_folder=True)
    assert cached.list_missing(None) == []
    assert DataFiles({}, (".",), (("val",),), "").list_missing(None) == ["val"]


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ([], '"files" is not a mapping'),
        ({"wnated": []}, "unknown key 'wnated'"),
        ({"instead": "x"}, "files.wanted"),
        ({"wanted": ["a"], "instead": "x"}, "files.wanted"),
        ({"wanted": [["a"]]}, '"instead" is required'),
        ({"wanted": [["a"]], "instead": "x", "download": 3}, "files.download"),
        ({"wanted": [["a"]], "instead": "x", "when": ["a"]}, "files.when"),
        ({"wanted": [["a"]], "instead": "x", "folders": "."}, "files.folders"),
    ],
)
def test_bad_lists_are_refused(entry: object, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_data_files("t/task.yaml", entry)
    assert words in caught.value.message
