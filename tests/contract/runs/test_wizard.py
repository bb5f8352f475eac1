"""The questions of `mlbench run` as a person meets them: keys, defaults, memory, missing data, other terminals."""

import json
import os
import signal
from pathlib import Path

import pytest

from mlbench_cli.model.run import Cluster
from mlbench_cli.storage.store import Store
from mlbench_cli.tasks.catalog import load_catalog
from tests.contract.terminal import Terminal

# Those that this machine can run, and that are no command of their own.
TASKS = [name for name in load_catalog() if name not in ("certify", "cifar10_resnet20_tensorflow")]
UP, DOWN, LEFT, RIGHT, HOME_KEY, END, DELETE = "\x1b[A", "\x1bOB", "\x1b[D", "\x1b[C", "\x1b[H", "\x1b[F", "\x1b[3~"
ESC = "\x1b"
NAME, SIZES = "Name of the run [my-run]: ", "Numbers of workers, one run each [1]: "
CLUSTER, TASK, PRESET, BACKEND = "Cluster:", "Task:", "Preset:", "Backend:"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def same_command(person: Terminal) -> str:
    """The command line that is printed after the questions."""
    person.expect("The same without prompts: ")
    return person.expect("\r\n\r\n").replace("\\\r\n  ", "").replace("\r\n", "")


def test_run_alone_asks_for_everything(home: Path) -> None:
    person = Terminal("run", "--dry-run", home=home, columns=200)
    person.answer(NAME, "mine")
    person.answer(CLUSTER, "")
    person.expect("Cluster: local")
    menu = person.answer(TASK, "digits") + person.seen
    person.expect("Task: digits_resnet")
    person.answer(PRESET, "tiny")
    person.expect("Preset: tiny")
    person.answer(SIZES, "1, 2")
    person.answer(BACKEND, "")
    assert same_command(person) == "mlbench run mine 1 2 --task digits_resnet --preset tiny --backend gloo"
    code, printed = person.finish()
    assert code == 0
    assert "name: mine-2" in printed
    assert "Device" not in menu + printed  # there is no GPU to choose


def test_without_a_cluster_one_can_be_created_for_the_runs(home: Path) -> None:
    person = Terminal("run", "--dry-run", home=home, columns=200)
    person.answer(NAME, "")
    person.answer(CLUSTER, "new gke")
    person.answer("empty: none: ", "l4")
    person.answer(TASK, "digits")
    person.answer(PRESET, "tiny")
    person.answer("Device:", "gpu")
    person.answer(SIZES, "2")
    person.answer(BACKEND, "nccl")
    said = same_command(person)
    options = "--preset tiny --backend nccl --gpu --create gke --gpu-type l4"
    assert said == f"mlbench run my-run 2 --task digits_resnet {options}"
    code, printed = person.finish()  # there are no credentials: a sketch of the plan, and what would be submitted
    assert code == 0
    assert "GKE control plane" in printed
    assert "mirror.gcr.io/pytorch/pytorch" in printed


def test_arrow_keys_choose(home: Path) -> None:
    person = Terminal("run", "x", "1", "--dry-run", home=home)
    person.expect(TASK)
    person.type(HOME_KEY + DOWN + UP + UP + UP + "\r")  # round over the first one to the task before "custom"
    person.expect(f"Task: {TASKS[-1]}")
    person.expect(PRESET)
    person.type("\x1b[6~\x1b[5~\r")
    person.expect("Preset: spec")
    person.answer(BACKEND, "mpi")
    assert "--backend mpi" in same_command(person)
    assert person.finish()[0] == 0


def test_esc_goes_back_to_the_question_before(home: Path) -> None:
    person = Terminal("run", "--dry-run", home=home, columns=200)
    person.expect(NAME)
    person.type(ESC)  # there is nothing before the first question, which is drawn again
    person.answer(NAME, "first")
    person.answer(CLUSTER, "local")
    person.expect(TASK)
    person.type("mnist\r")
    person.expect("Task: mnist")
    person.answer(PRESET, "tiny")
    person.expect(SIZES)
    person.type("4" + ESC)
    person.expect(PRESET)
    person.type(ESC)
    person.expect(TASK)
    person.type(ESC)
    person.expect(CLUSTER)
    person.type(ESC)
    person.expect("Name of the run [first]: ")  # earlier answers are the defaults
    person.type(ESC)
    person.answer("Name of the run [first]: ", "second")
    person.answer(CLUSTER, "")
    person.expect(TASK)
    person.type("\r")
    person.expect("Task: mnist")
    person.expect(PRESET)
    person.type("\r")
    person.expect("Preset: tiny")
    person.expect(SIZES)
    person.type(ESC)
    person.expect(PRESET)
    person.type(ESC)
    person.answer(TASK, "custom")
    person.expect("Command: ")
    person.type(ESC)
    person.expect("arrow keys")
    person.type("digits\r")
    person.expect("Task: digits_resnet")
    person.answer(PRESET, "tiny")
    person.answer(SIZES, "2")
    person.answer(BACKEND, "")
    assert same_command(person) == "mlbench run second 2 --task digits_resnet --preset tiny --backend gloo"
    assert person.finish()[0] == 0


def test_a_menu_shows_what_matches_and_marks_the_default(home: Path) -> None:
    person = Terminal("run", "x", "1", "--dry-run", home=home, columns=200)
    person.expect("allreduce")
    assert person.expect("bert_pretraining").count("(default)") == 1
    person.type("nonsense\r")
    person.expect('nothing matches "nonsense"')
    person.type("\x15handwritten\r")  # in the title of one task
    person.expect("Task: digits_resnet")
    person.expect(PRESET)
    assert "(default)" in person.expect("tiny")
    person.type("tiny\r")
    person.answer(BACKEND, "")
    assert person.finish()[0] == 0


def test_a_line_may_be_typed_ahead_and_edited_and_is_asked_again_if_it_is_wrong(home: Path) -> None:
    person = Terminal("run", "--task", "digits_resnet", "--dry-run", home=home)
    person.type("Wrong!\n")
    person.expect("is not a DNS label")
    person.expect(NAME)
    person.type("bXd" + LEFT + "\x7f" + HOME_KEY + "a" + RIGHT + "c" + END + "zz\x7f" + LEFT + DELETE + "\n")
    for wrong in ("0", "two", "-1", "5000", "²", "1 1"):
        person.answer(SIZES, wrong)
    person.expect(SIZES)
    person.type("7 7 7\x17\x17" + "\x15" + "3\n")
    assert same_command(person).startswith("mlbench run abcd 3 ")
    assert person.finish()[0] == 0


def test_an_own_command_and_an_own_backend(home: Path) -> None:
    person = Terminal("run", "mine", "1", home=home)
    person.answer(TASK, "custom")
    person.answer("Command: ", "")
    person.expect("Please enter a value.")
    person.answer("Command: ", "sh -c 'echo $MLBENCH_BACKEND of {rank}'")
    person.answer(BACKEND, "custom")
    person.answer("Name of the backend: ", "ucc")
    person.answer("(otherwise on the first only) [y/N]: ", "y")
    assert same_command(person) == (
        "mlbench run mine 1 --command 'sh -c '\"'\"'echo $MLBENCH_BACKEND of {rank}'\"'\"'' "
        "--backend custom:ucc --set run.run_on_all=yes"
    )
    code, rest = person.finish()
    assert code == 0
    assert "completed" in rest
    assert rest.count("Repeat: mlbench run mine") == 1
    spec = Store(home).run("mine-1").run.spec
    assert (spec.backend, spec.run_on_all, spec.argv[2]) == ("ucc", True, "echo $MLBENCH_BACKEND of {rank}")


def test_missing_data_is_named_and_asked_for(home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sets" / "imagenet"
    for part in ("train", "val"):
        (folder / part).mkdir(parents=True)
    person = Terminal("run", "x", "1", "--dry-run", home=home, columns=160, environment={"HOME": str(tmp_path)})
    person.expect(TASK)
    person.type("imagenet")
    person.expect("imagenet_resnet")
    person.expect("data missing")
    person.type("\n")
    person.answer(PRESET, "spec")
    person.answer("Folder with the data: ", str(tmp_path / "nowhere"))
    person.expect("There is no train (or ILSVRC2012_img_train.tar) in")
    person.answer("Folder with the data: ", str(tmp_path / "sets"))
    person.answer(BACKEND, "")
    assert f"--data-dir {tmp_path}/sets" in same_command(person)
    assert person.finish()[0] == 0


def test_the_cluster_is_asked_for_if_there_are_several(home: Path) -> None:
    home.mkdir()
    Store(home).record_cluster(Cluster("far", "kind", "ready", "", {"nodes": 2}))
    person = Terminal("run", "x", "1", "--dry-run", home=home)
    person.answer("Cluster:", "far")
    person.answer(TASK, "digits_resnet")
    person.answer(PRESET, "tiny")
    person.answer(BACKEND, "")
    assert "--cluster far" in same_command(person)
    assert person.finish()[0] == 0


def test_answers_are_remembered_by_name(home: Path) -> None:
    person = Terminal("run", "first", "1", "--dry-run", home=home)
    person.answer(TASK, "digits_resnet")
    person.answer(PRESET, "tiny")
    person.answer(BACKEND, "mpi")
    assert person.finish()[0] == 0
    memory = json.loads((home / "answers.json").read_text())
    assert memory == {"task": "digits_resnet", "preset": "tiny", "backend": "mpi"}
    person = Terminal("run", "second", "1", "--dry-run", home=home)
    for question in (TASK, PRESET, BACKEND):
        person.answer(question, "")
    assert same_command(person).endswith("--task digits_resnet --preset tiny --backend mpi")
    assert person.finish()[0] == 0


@pytest.mark.parametrize("damaged", [b"", b"{", b"[1]", b'{"task": 3, "command": [], "preset": {}}', b"\xff"])
def test_a_damaged_memory_is_no_obstacle(home: Path, damaged: bytes) -> None:
    home.mkdir()
    (home / "answers.json").write_bytes(damaged)
    person = Terminal("run", "x", "1", "--dry-run", home=home)
    person.answer(TASK, "custom")
    person.answer("Command: ", "true")
    person.answer(BACKEND, "")
    assert person.finish()[0] == 0
    assert json.loads((home / "answers.json").read_text())["command"] == "true"


def test_flags_answer_questions(home: Path) -> None:
    person = Terminal("run", "x", "1", "--backend", "gloo", "--preset", "tiny", "--light", "--dry-run", home=home)
    person.answer(TASK, "digits_resnet")
    code, printed = person.finish()
    assert code == 0
    assert "MLBENCH_GOAL: light" in printed
    assert "Preset:" not in printed
    assert "Backend:" not in printed


def test_nothing_is_asked_if_the_name_is_wrong(home: Path) -> None:
    code, printed = Terminal("run", "Wrong", home=home).finish()
    assert code == 2
    assert "not a DNS label" in printed


@pytest.mark.parametrize(
    ("key", "words"), [("\x04", "No answer was given; nothing was done."), ("\x03", "Interrupted.")]
)
@pytest.mark.parametrize("arguments", [("run",), ("run", "x", "1")])
def test_leaving_is_no_error(home: Path, key: str, words: str, arguments: tuple[str, ...]) -> None:
    person = Terminal(*arguments, home=home)
    person.expect(NAME if len(arguments) == 1 else "mnist")
    person.type(key)
    code, printed = person.finish()
    assert code == 130
    assert words in printed
    assert "Error:" not in printed
    assert Store(home).runs() == []


def test_a_dumb_terminal_is_asked_by_number(home: Path) -> None:
    person = Terminal("run", "x", "1", "--dry-run", home=home, environment={"TERM": "dumb"})
    person.answer("Task [digits_resnet]: ", "99")
    person.expect(f"from 0 to {len(TASKS)}.")
    person.answer("Task [digits_resnet]: ", str(TASKS.index("digits_resnet")))
    person.answer("Preset [spec]: ", "tiny")
    person.answer("Backend [gloo]: ", "")
    assert "\x1b" not in same_command(person)
    assert person.finish()[0] == 0


@pytest.mark.parametrize("columns", [20, 60])
def test_a_narrow_terminal(home: Path, columns: int) -> None:
    person = Terminal("run", "x", "1", home=home, columns=columns)
    menu = person.expect("mnist") if columns == 60 else person.expect("cust")
    lines = [line for line in menu.replace("\x1b[J", "").split("\r\n") if "\x1b" not in line]
    assert max(map(len, lines)) < columns + 2
    os.kill(person.pid, signal.SIGKILL)
    person.finish()
