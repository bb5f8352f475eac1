"""Tasks of other people: from an installed package and from a folder, listed, run, judged, verified, refused."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENTRY_POINTS = "[console_scripts]\nx = y:z\n\n[mlbench.tasks]\nmine = greetings.tasks\n"
DECLARATION = """
from dataclasses import dataclass
from task_images.parameters import Task, TrainingSettings, parameter

@dataclass(frozen=True)
class Settings(TrainingSettings):
    words: int = parameter(3, "number of words", min=1, max=9)
    goal_full: float = parameter(2.0, "goal")
    goal_light: float = parameter(1.0, "easier goal")

TASK = Task(
    settings=Settings,
    number="z9",
    title="Says hello",
    image="registry.example/me/hello:1",
    backends=["gloo"],
    devices=["cpu"],
    data="none",
    goal={"metric": "score", "comparison": ">=", "wording": "score {threshold}"},
)
"""
PROGRAM = """
from task_images.contract import emit
from greetings import WORD

def main(contract):
    print(WORD * contract.parameters["words"], contract.parameters["blocks_after"], flush=True)
    if contract.rank:
        return
    goal = {"metric": "score", "comparison": ">=", "threshold": 2.0, "kind": "full", "value": 3.0, "last": 3.0}
    emit("metric", name="val_global_score", value=3.0, epoch=1)
    emit(
        "result", 0, outcome="goal_reached", goal=goal, wall_seconds=0.002, training_seconds=0.001, updates=1,
        samples=1,
        epochs=1, synthetic=False, data="words", details={},
        data_identity={"counts": {}, "digest": None, "official": True, "reason": None},
    )
"""


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """A folder of installed packages in which one distribution brings a task."""
    folder = tmp_path / "site"
    task = folder / "greetings" / "tasks" / "hello"
    task.mkdir(parents=True)
    (folder / "greetings" / "__init__.py").write_text("WORD = 'hello '\n")
    (task.parent / "__init__.py").touch()
    (task / "__init__.py").write_text(DECLARATION)
    (task / "task.py").write_text(PROGRAM)
    describe(task.parent)
    info = folder / "greetings-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: greetings\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    return folder


@pytest.fixture
def mine(tmp_path: Path, packages: Path) -> Path:
    """The same task in a folder that is no package."""
    folder = tmp_path / "mine"
    shutil.copytree(packages / "greetings" / "tasks", folder)
    (folder / "__init__.py").unlink()
    describe(folder)
    return folder


def describe(folder: Path) -> None:
    command = [sys.executable, "-m", "task_images.describe", str(folder)]
    assert "hello" in subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def mlbench(home: Path, *words: str, code: int = 0, python: str = sys.executable, **environment: str) -> str:
    known = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MLBENCH_TASK_PATH")}
    done = subprocess.run(
        [python, "-m", "mlbench_cli", *words],
        env={**known, "MLBENCH_HOME": str(home), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def test_a_package_that_is_installed_twice_counts_once(tmp_path: Path, packages: Path) -> None:
    (tmp_path / "lib64").symlink_to(packages)
    old = tmp_path / "old" / "greetings-1.1.dist-info"
    old.mkdir(parents=True)
    (old / "entry_points.txt").write_text(ENTRY_POINTS)
    path = os.pathsep.join(map(str, (packages, tmp_path / "lib64", old.parent)))
    document = json.loads(mlbench(tmp_path / "home", "tasks", "hello", "-o", "json", PYTHONPATH=path))
    assert document["origin"] == "greetings 1.2"
    assert "Says hello" in mlbench(tmp_path / "home", "tasks", PYTHONPATH=path)


@pytest.mark.slow
def test_a_task_of_an_installed_package_is_listed_run_and_verified(tmp_path: Path, packages: Path) -> None:
    home, site = tmp_path / "home", str(packages)
    assert "Says hello" in mlbench(home, "tasks", PYTHONPATH=site)
    document = json.loads(mlbench(home, "tasks", "hello", "-o", "json", PYTHONPATH=site))
    assert (document["origin"], document["presets"]["spec"]["blocks_after"]) == ("greetings 1.2", 10)
    mlbench(home, "run", "own", "1", "--task", "hello", "--set", "words=2", PYTHONPATH=site)
    assert "hello hello  10" in mlbench(home, "logs", "own-1", PYTHONPATH=site)
    archive = next(home.rglob("result.json")).parent
    result = json.loads((archive / "result.json").read_text())
    assert result["outcome"] == "goal_reached"
    assert result["division"] == {"word": "open", "reason": "the task is not mlbench's own but of greetings 1.2"}
    mlbench(home, "verify", str(archive), PYTHONPATH=site)
    # Without the package the archive is still whole; the rules have nothing to be compared with.
    assert "cannot be compared" in mlbench(home, "verify", str(archive), code=9)


def test_a_folder_of_tasks_is_named_by_option_or_variable(tmp_path: Path, mine: Path) -> None:
    home = tmp_path / "home"
    (mine / "hello" / "task.py").write_text(PROGRAM.replace("from greetings import WORD", "WORD = 'ciao '"))
    assert "Says hello" in mlbench(home, "tasks", "--task-path", str(mine))
    assert f"--task hello --task-path {mine}" in mlbench(home, "tasks", "hello", "--task-path", str(mine))
    mlbench(home, "run", "own", "2", "--task", "hello", "--task-path", str(mine))
    assert "ciao ciao ciao" in mlbench(home, "logs", "own-2")
    mlbench(home, "run", "more", "1", "--task", "hello", MLBENCH_TASK_PATH=str(mine))
    asked = ("run", "other", "1", "--task", "hello", "--task-path", str(mine), "--method", "fusion")
    assert "add method={'own': 'bsp'} to its TASK" in mlbench(home, *asked, code=2)


def test_a_task_has_the_name_and_the_annotations_that_it_likes(tmp_path: Path, packages: Path) -> None:
    """`translation` is also a folder of mlbench's own code, and annotations may be texts."""
    home, folder = tmp_path / "home", tmp_path / "mine"
    shutil.copytree(packages / "greetings" / "tasks" / "hello", folder / "translation")
    text = DECLARATION.replace("    goal_full", '    sizes: list[int] = parameter([1, 2], "sizes")\n    goal_full')
    (folder / "translation" / "__init__.py").write_text(f"from __future__ import annotations\n{text}")
    (folder / "translation" / "task.py").write_text(PROGRAM.replace("from greetings import WORD", "WORD = 'salve '"))
    subprocess.run([sys.executable, "-m", "task_images.describe", str(folder)], cwd=ROOT, check=True)
    words = ("--task", "translation", "--task-path", str(folder), "--set", "sizes=3,4")
    mlbench(home, "run", "own", "1", *words)
    assert "salve salve salve" in mlbench(home, "logs", "own-1")


def test_a_file_of_a_method_may_hold_dataclasses(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "from task_images.methods.base import Method\n"
        "@dataclass\nclass Kept:\n    updates: int = 0\n"
        "class Mine(Method):\n    name, summary, source = 'mine', 'keeps count', 'this test'\n"
    )
    words = ("methods", "mine", "--method-path", str(tmp_path / "mine.py"))
    assert "keeps count" in mlbench(tmp_path / "home", *words)
    with open(tmp_path / "mine.py", "a") as file:
        file.write("    from task_images.methods.base import Option\n    options = {'nesterov': Option(True)}\n")
    assert "the default True of an option is no number" in mlbench(tmp_path / "home", *words, code=2)


def test_a_task_knows_its_interpreter_where_none_is_named_python(tmp_path: Path, mine: Path) -> None:
    """As on Debian, where only python3 exists; what starts processes of its own needs sys.executable."""
    home, venv = tmp_path / "home", tmp_path / "venv"
    (mine / "hello" / "task.py").write_text(
        PROGRAM.replace("from greetings import WORD", "import sys; WORD = sys.executable")
    )
    python = venv / "bin" / "python3"
    python.parent.mkdir(parents=True)
    python.symlink_to(Path(sys.executable).resolve())
    shutil.copy(Path(sys.prefix, "pyvenv.cfg"), venv)
    (venv / "lib").symlink_to(Path(sys.prefix, "lib"))
    words = ("run", "own", "1", "--task", "hello", "--task-path", str(mine))
    mlbench(home, *words, python=str(python), PATH=str(tmp_path / "none"))
    assert str(python) in mlbench(home, "logs", "own-1")


def test_what_is_wrong_with_a_folder_is_named(tmp_path: Path, packages: Path) -> None:
    home, folder = tmp_path / "home", tmp_path / "empty"
    folder.mkdir()
    assert "holds no task" in mlbench(home, "tasks", "--task-path", str(folder), code=2)
    (folder / "catalog.json").write_text("[")
    assert "is not a catalog of tasks" in mlbench(home, "tasks", "--task-path", str(folder), code=2)
    shutil.copy(packages / "greetings" / "tasks" / "catalog.json", folder / "catalog.json")
    words = mlbench(home, "tasks", MLBENCH_TASK_PATH=str(folder), PYTHONPATH=str(packages), code=2)
    assert 'Two tasks are called "hello"' in words
    assert "greetings 1.2" in words
    assert str(folder) in words
