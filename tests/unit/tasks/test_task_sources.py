"""Where external tasks come from: folders that are named, and installed distributions."""

import json
import os
import sys
from pathlib import Path

import pytest

from mlbench_cli import isolation
from mlbench_cli.errors import UsageError
from mlbench_cli.tasks import catalog
from mlbench_cli.tasks.task_sources import VARIABLE, TaskSource, list_sources, use_task_path


@pytest.fixture(autouse=True)
def nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """No task path and no installed packages but those of a test; what a test sets is undone."""
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.setattr(isolation, "protected_path", list)


def add_task(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "task.yaml").write_text("name: x")
    return folder / "task.yaml"


def install(place: Path, name: str, entry_points: str) -> None:
    folder = place / f"{name}.dist-info"
    folder.mkdir(parents=True)
    (folder / "entry_points.txt").write_text(entry_points)


def test_a_folder_of_tasks_is_the_root_of_their_imports(tmp_path: Path) -> None:
    files = [add_task(tmp_path / name) for name in ("b", "a")]
    (tmp_path / "c").mkdir()
    assert use_task_path(str(tmp_path))
    assert list_sources() == [TaskSource(file, str(tmp_path), str(tmp_path)) for file in sorted(files)]


def test_a_single_task_is_imported_from_its_parent(tmp_path: Path) -> None:
    file = add_task(tmp_path / "mine")
    add_task(tmp_path / "mine" / "inner")
    assert use_task_path(str(tmp_path / "mine"))
    assert list_sources() == [TaskSource(file, str(tmp_path / "mine"), str(tmp_path))]


def test_a_folder_is_added_once_and_before_those_that_were_known(tmp_path: Path) -> None:
    for name in ("one", "two"):
        add_task(tmp_path / name)
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    assert [use_task_path(path) for path in (one, two, one, None)] == [True, True, False, False]
    assert os.environ[VARIABLE] == f"{two}{os.pathsep}{one}"
    assert [source.origin for source in list_sources()] == [two, one]


def test_paths_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_task(tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert use_task_path("mine")
    assert not use_task_path("~/mine")
    assert os.environ[VARIABLE] == str(tmp_path / "mine")


@pytest.mark.parametrize(
    ("path", "words"), [("", "holds no task"), ("gone", "holds no task"), ("~no_such_user/x", "is not a folder")]
)
def test_a_folder_without_tasks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=words):
        use_task_path(path)
    assert os.environ[VARIABLE] == ""


def test_a_variable_that_names_no_tasks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, f"{os.pathsep}{tmp_path}")
    with pytest.raises(UsageError, match="holds no task") as caught:
        list_sources()
    assert VARIABLE in str(caught.value.hint)


# --- installed distributions ------------------------------------------------------------------------------------------

GROUP = "[console_scripts]\nx = y:z\n[mlbench.tasks]\n"


def test_tasks_of_installed_packages_have_their_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, inner = add_task(tmp_path / "pack" / "a"), add_task(tmp_path / "other" / "tasks" / "b")
    install(tmp_path, "Pack-1.0", f"{GROUP}mine = pack\n")
    install(tmp_path, "other-2.5.1", f"{GROUP}mine =  other.tasks \n")
    install(tmp_path, "third-3", "[console_scripts]\nx = y:z\n")
    monkeypatch.setattr(isolation, "protected_path", lambda: [str(tmp_path)])
    assert list_sources() == [TaskSource(file, "Pack 1.0"), TaskSource(inner, "other 2.5.1")]


def test_the_first_of_two_installations_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place, version in (("one", "2.0"), ("two", "1.0")):
        add_task(tmp_path / place / "pack" / "a")
        install(tmp_path / place, f"{'Pack' if place == 'one' else 'pack'}-{version}", f"{GROUP}mine = pack\n")
    monkeypatch.setattr(isolation, "protected_path", lambda: [str(tmp_path / "one"), str(tmp_path / "two")])
    assert list_sources() == [TaskSource(tmp_path / "one" / "pack" / "a" / "task.yaml", "Pack 2.0")]


@pytest.mark.parametrize(
    "entry_points",
    [
        "",
        "[mlbench.tasks]\n",
        "[mlbench.tasks.other]\nmine = pack\n",
        "[mlbench.tasks]\nmine = gone\n",
        "[mlbench.tasks]\nmine = pack.gone\n",
        "[mlbench.tasks]\nmine = module\n",
        "mlbench.tasks\nno section",
        "[mlbench.tasks]\na = pack.gone\na = pack.gone\n",
    ],
)
def test_entry_points_that_name_no_task_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry_points: str
) -> None:
    add_task(tmp_path / "pack" / "a")
    (tmp_path / "module.py").write_text("")
    install(tmp_path, "pack-1", entry_points)
    (tmp_path / "b-1.dist-info").mkdir()
    (tmp_path / "b-1.dist-info" / "entry_points.txt").write_bytes(b"[mlbench.tasks]\nx = \xff")
    monkeypatch.setattr(isolation, "protected_path", lambda: [str(tmp_path)])
    assert list_sources() == []


def test_named_folders_come_before_installed_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_task(tmp_path / "site" / "pack" / "a")
    install(tmp_path / "site", "pack-1", f"{GROUP}mine = pack\n")
    add_task(tmp_path / "mine")
    use_task_path(str(tmp_path / "mine"))
    monkeypatch.setattr(isolation, "protected_path", lambda: [str(tmp_path / "site")])
    assert [source.search_path for source in list_sources()] == [str(tmp_path), None]


def test_the_settings_of_a_task_in_a_folder_can_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = list(sys.path)
    monkeypatch.setattr(sys, "path", list(before))
    file = add_task(tmp_path / "mine")
    keys = {"name": "mine", "number": 9, "title": "T", "image": "i", "data": "none"}
    lists = {"command": ["x"], "backends": ["gloo"], "devices": ["cpu"]}
    file.write_text(json.dumps({**keys, **lists}))
    for _ in range(2):
        task = catalog._parse_source(TaskSource(file, "theirs", str(tmp_path)))
        assert (task.name, task.origin, task.search_path, task.folder) == (
            *("mine", "theirs", str(tmp_path)),
            tmp_path / "mine",
        )
    assert sys.path == [*before, str(tmp_path)]  # after everything else, and once
    catalog._parse_source(TaskSource(file, "theirs 1.0"))
    assert sys.path == [*before, str(tmp_path)]
