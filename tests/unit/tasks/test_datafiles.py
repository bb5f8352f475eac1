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


# --- reading the list -------------------------------------------------------------------------------------------------

LEAST = {"wanted": [["a"]], "instead": "--set data=made"}


def test_a_list_of_files_is_read_as_a_whole() -> None:
    entry = {
        "when": {"data": ["real", "other"]},
        "folders": [".", "sub"],
        "wanted": [["train", "train.tar"], ["val"]],
        "imports": ["train.txt"],
        "download": "170 MB",
        "default_folder": True,
        "instead": "--set data=made",
    }
    assert parse_data_files("t/task.yaml", entry) == DataFiles(
        when={"data": ["real", "other"]},
        folders=(".", "sub"),
        wanted=(("train", "train.tar"), ("val",)),
        instead="--set data=made",
        download="170 MB",
        default_folder=True,
        imports=("train.txt",),
    )


def test_a_short_list_of_files_has_defaults() -> None:
    assert parse_data_files("t/task.yaml", LEAST) == DataFiles({}, (".",), (("a",),), "--set data=made")


@pytest.mark.parametrize("value", [False, None, "yes", 1])
def test_only_true_lets_the_cache_be_searched(value: object) -> None:
    assert parse_data_files("t/task.yaml", {**LEAST, "default_folder": value}).default_folder is False


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"when": {1: "a"}}, '"files.when" is not a mapping of parameters to values.'),
        ({"when": None}, '"files.when" is not a mapping of parameters to values.'),
        ({"wanted": []}, '"files.wanted" is not a list of lists of file names.'),
        ({"wanted": [[]]}, '"files.wanted" is not a list of lists of file names.'),
        ({"wanted": [["a"], [""]]}, '"files.wanted" is not a list of lists of file names.'),
        ({"wanted": [["a", 1]]}, '"files.wanted" is not a list of lists of file names.'),
        ({"wanted": "a"}, '"files.wanted" is not a list of lists of file names.'),
        ({"folders": []}, '"files.folders" is not a list of folders.'),
        ({"folders": [""]}, '"files.folders" is not a list of folders.'),
        ({"imports": "a"}, '"files.imports" is not a list of file names.'),
        ({"imports": [1]}, '"files.imports" is not a list of file names.'),
        ({"instead": None}, '"files.instead" and "files.download" are texts; "instead" is required.'),
        ({"download": 170}, '"files.instead" and "files.download" are texts; "instead" is required.'),
        ({"want": []}, 'unknown key \'want\' in "files". Did you mean "wanted"?'),
    ],
)
def test_a_bad_entry_is_named_with_its_file(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_data_files("t/task.yaml", {**LEAST, **changes})
    assert caught.value.message == f"t/task.yaml: {message}"


def test_no_further_files_are_imported_by_default() -> None:
    assert parse_data_files("t/task.yaml", {**LEAST, "imports": []}).imports == ()


# --- looking for them -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("when", "parameters", "are_read"),
    [
        ({}, {}, True),
        ({"data": "real"}, {"data": "real"}, True),
        ({"data": "real"}, {"data": "made"}, False),
        ({"data": "real"}, {}, False),
        ({"data": ["real", "other"]}, {"data": "other"}, True),
        ({"data": ["real", "other"]}, {"data": "made"}, False),
        ({"data": "real", "size": 3}, {"data": "real", "size": 3}, True),
        ({"data": "real", "size": 3}, {"data": "real", "size": 4}, False),
    ],
)
def test_files_are_read_if_all_parameters_say_so(
    when: dict[str, object], parameters: dict[str, object], are_read: bool
) -> None:
    assert FILES._replace(when=when).are_read(parameters) is are_read


def test_several_alternatives_are_joined_by_or(tmp_path: Path) -> None:
    files = DataFiles({}, (".",), (("a", "b", "c"), ("d",)), "")
    assert files.list_missing(str(tmp_path)) == ["a (or b or c)", "d"]
    (tmp_path / "c").touch()
    assert files.list_missing(str(tmp_path)) == ["d"]


def test_names_may_be_patterns_and_lie_in_any_of_the_folders(tmp_path: Path) -> None:
    files = DataFiles({}, (".", "sub"), (("train-*.tar",), ("x/val",)), "")
    (tmp_path / "sub" / "x").mkdir(parents=True)
    (tmp_path / "sub" / "train-0001.tar").touch()
    assert files.list_missing(str(tmp_path)) == ["x/val"]
    (tmp_path / "sub" / "x" / "val").touch()
    assert files.list_missing(str(tmp_path)) == []


def test_a_data_folder_takes_the_place_of_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cache" / "mlbench" / "datasets" / "sub" / "val").mkdir(parents=True)
    cached = DataFiles({}, (".", "sub"), (("val",),), "", default_folder=True)
    assert cached.list_missing(None) == []
    assert cached.list_missing(str(tmp_path)) == ["val"]


def test_the_cache_is_in_the_home_folder_without_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".cache" / "mlbench" / "datasets" / "val").mkdir(parents=True)
    assert DataFiles({}, (".",), (("val",),), "", default_folder=True).list_missing(None) == []
