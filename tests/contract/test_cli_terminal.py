"""The tool as a person meets it: questions on a terminal, Ctrl-C, signals, and a client that is killed."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from mlbench_cli.catalog import load_catalog
from mlbench_cli.store import Store
from tests.contract.terminal import LIMIT, MLBENCH, Terminal

TASKS = list(load_catalog())
CUSTOM = len(TASKS)  # the last number of the menu


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


# --- the wizard ------------------------------------------------------------------------------------------------------


def test_the_questions_come_in_the_original_order(home: Path) -> None:
    person = Terminal("run", "mine", "1", home=home)
    menu = person.answer("Selection [0]: ", str(CUSTOM))
    assert [f"[{number}]" in menu for number in range(CUSTOM + 1)] == [True] * (CUSTOM + 1)
    assert all(task in menu for task in TASKS)
    person.answer("Command: ", "sh -c 'echo $MLBENCH_BACKEND of {rank}'")
    backends = person.answer("Selection [0]: ", "2")
    assert backends.index("gloo") < backends.index("mpi") < backends.index("another one")
    person.answer("Name of the backend: ", "ucc")
    person.answer("(otherwise on the first only) [y/N]: ", "y")
    person.expect("The same without questions: ")
    command = person.expect("\r\n\r\n").replace("\r\n", "")
    assert command == (
        "mlbench run mine 1 --command 'sh -c '\"'\"'echo $MLBENCH_BACKEND of {rank}'\"'\"'' "
        "--custom-backend ucc --run-on-all --yes"
    )
    code, rest = person.finish()
    assert code == 0
    assert "completed" in rest
    spec = Store(home).run("mine-1").run.spec
    assert (spec.backend, spec.run_on_all, spec.argv[2]) == ("ucc", True, "echo $MLBENCH_BACKEND of {rank}")


def test_answers_are_remembered_by_name(home: Path) -> None:
    person = Terminal("run", "first", "1", "--dry-run", home=home)
    person.answer("Selection [0]: ", "digits_resnet")
    person.answer("Selection [0]: ", "gloo")
    assert person.finish()[0] == 0
    memory = json.loads((home / "answers.json").read_text())
    assert memory == {"task": "digits_resnet", "backend": "gloo"}

    number = TASKS.index("digits_resnet")
    person = Terminal("run", "second", "1", "--dry-run", home=home)
    person.answer(f"Selection [{number}]: ", "")
    person.answer("Selection [0]: ", "")
    code, printed = person.finish()
    assert code == 0
    assert "task_images.digits_resnet" in printed


@pytest.mark.parametrize("damaged", [b"", b"{", b"[1]", b'{"task": 3, "command": [], "run_on_all": "x"}', b"\xff"])
def test_a_damaged_memory_is_no_obstacle(home: Path, damaged: bytes) -> None:
    home.mkdir()
    (home / "answers.json").write_bytes(damaged)
    person = Terminal("run", "x", "1", "--dry-run", home=home)
    person.answer("Selection [0]: ", "custom")
    person.answer("Command: ", "true")
    person.answer("Selection [0]: ", "0")
    assert person.finish()[0] == 0
    assert json.loads((home / "answers.json").read_text())["command"] == "true"


def test_wrong_answers_are_asked_again(home: Path) -> None:
    person = Terminal("run", "x", "1", "--dry-run", home=home)
    for wrong in ("99", "-1", "nothing", "²"):
        person.answer("Selection [0]: ", wrong)
        person.expect(f"Answer with a number from 0 to {CUSTOM}.")
    person.answer("Selection [0]: ", "custom")
    person.answer("Command: ", "")
    person.expect("An answer is needed.")
    person.answer("Command: ", "true")
    person.answer("Selection [0]: ", "")
    assert person.finish()[0] == 0


def test_flags_answer_questions(home: Path) -> None:
    person = Terminal("run", "x", "1", "--backend", "gloo", "--light", "--dry-run", home=home)
    person.answer("Selection [0]: ", "digits_resnet")
    code, printed = person.finish()
    assert code == 0
    assert "MLBENCH_GOAL: light" in printed
    assert "Backend" not in printed


def test_nothing_is_asked_where_names_are_wrong(home: Path) -> None:
    code, printed = Terminal("run", "Wrong", "1", home=home).finish()
    assert code == 2
    assert "not a DNS label" in printed


def test_leaving_the_wizard(home: Path) -> None:
    person = Terminal("run", "x", "1", home=home)
    person.expect("Selection [0]: ")
    person.type("\x04")
    code, printed = person.finish()
    assert code == 130
    assert "No answer was given; nothing was done." in printed
    person = Terminal("run", "x", "1", home=home)
    person.expect("Selection [0]: ")
    person.type("\x03")
    code, printed = person.finish()
    assert code == 130
    assert printed.endswith("\x1b[31mError:\x1b[0m Interrupted.\n")
    assert Store(home).runs() == []


def test_sixty_columns(home: Path) -> None:
    person = Terminal("run", "x", "1", "--dry-run", home=home, columns=60)
    menu = person.answer("Selection [0]: ", "\x04").replace("\r\n", "\n")
    assert max(map(len, menu.splitlines())) <= 60
    os.kill(person.pid, signal.SIGKILL)
    person.finish()


# --- other questions -------------------------------------------------------------------------------------------------


def finished(home: Path, *names: str) -> None:
    for name in names:
        command = [*MLBENCH, "run", name, "1", "--command", "true"]
        subprocess.run(command, env={**os.environ, "MLBENCH_HOME": str(home)}, check=True, capture_output=True)


def test_delete_asks_first(home: Path) -> None:
    finished(home, "a")
    person = Terminal("delete", "a-1", home=home)
    person.answer("[y/N] ", "")
    code, printed = person.finish()
    assert code == 130
    assert "Not confirmed; nothing was done." in printed
    assert Store(home).run("a-1")
    person = Terminal("delete", "a-1", home=home)
    person.answer("[y/N] ", "y")
    assert person.finish()[0] == 0
    assert Store(home).runs() == []


def test_charts_asks_which_runs(home: Path, tmp_path: Path) -> None:
    finished(home, "a", "b", "c")
    person = Terminal("charts", str(tmp_path / "figures"), home=home)
    person.answer("[all]: ", "7")
    person.answer("[all]: ", "0 2")
    assert person.finish()[0] == 0
    rows = (tmp_path / "figures" / "summary.csv").read_text()
    assert "total_time.png" in os.listdir(tmp_path / "figures")
    assert rows.count("\n") >= 1


def test_tables_fit_the_terminal(home: Path) -> None:
    finished(home, "a-rather-long-name-of-a-run")
    for columns in (60, 140):
        _, printed = Terminal("status", home=home, columns=columns).finish()
        assert max(map(len, printed.splitlines())) <= columns + len("\x1b[32m\x1b[0m")
        assert ("CREATED" in printed) == (columns == 140)


# --- interrupts ------------------------------------------------------------------------------------------------------

SLEEPER = ["--command", "sh -c 'echo begun; echo $$ > pid; exec sleep 60'"]


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def gone(pid: int) -> bool:
    """Whether the process ends, sooner or later."""
    end = time.monotonic() + LIMIT
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not alive(pid)


def rank_pid(folder: Path) -> int:
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        if (folder / "pid").exists() and (text := (folder / "pid").read_text().strip()):
            return int(text)
        time.sleep(0.02)
    raise AssertionError("the rank did not start")


def test_ctrl_c_cancels_and_keeps(home: Path, tmp_path: Path) -> None:
    person = Terminal("run", "a", "1", "2", *SLEEPER, home=home, cwd=tmp_path)
    person.expect("Ctrl-C cancels it and keeps what there is.")
    pid = rank_pid(tmp_path)
    person.type("\x03")
    code, printed = person.finish()
    assert code == 130
    assert 'The run "a-1" was cancelled' in printed
    assert "Not started: a-2." in printed
    assert gone(pid)
    rows = Store(home).runs()
    assert [(row.run.name, row.outcome) for row in rows] == [("a-1", "cancelled")]
    assert (rows[0].run.folder / "logs" / "rank-0.log").read_text() == "begun\n"
    assert (rows[0].run.folder / "SHA256SUMS").exists()


def start(home: Path, folder: Path, *argv: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*MLBENCH, *argv],
        env={**os.environ, "MLBENCH_HOME": str(home)},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_sigterm_cancels_and_keeps(home: Path, tmp_path: Path) -> None:
    client = start(home, tmp_path, "run", "a", "1", *SLEEPER, "-o", "json")
    pid = rank_pid(tmp_path)
    client.send_signal(signal.SIGTERM)
    out, err = client.communicate(timeout=LIMIT)
    assert client.returncode == 143
    assert json.loads(out)["error"]["code"] == "terminated"
    assert "Traceback" not in err
    assert gone(pid)
    assert Store(home).run("a-1").outcome == "cancelled"


def test_a_killed_client_takes_its_ranks_along(home: Path, tmp_path: Path) -> None:
    client = start(home, tmp_path, "run", "a", "1", *SLEEPER)
    pid = rank_pid(tmp_path)
    client.kill()
    client.communicate(timeout=LIMIT)
    assert gone(pid)
    code, printed = Terminal("wait", "a-1", home=home).finish()
    assert code == 7
    assert "cancelled" in printed


def test_ctrl_c_ends_only_the_waiting(home: Path, tmp_path: Path) -> None:
    assert start(home, tmp_path, "run", "a", "1", "--detach", *SLEEPER).wait(LIMIT) == 0
    pid = rank_pid(tmp_path)
    for command in (["wait", "a-1"], ["status", "a-1", "--watch"], ["logs", "a-1", "--follow"]):
        person = Terminal(*command, home=home)
        person.expect("begun" if command[0] == "logs" else "a-1: 1 running")
        person.type("\x03")
        assert person.finish()[0] == 130
    assert alive(pid)
    assert start(home, tmp_path, "cancel", "a-1").wait(LIMIT) == 0
    assert gone(pid)


def test_progress_is_one_line_on_a_terminal(home: Path, tmp_path: Path) -> None:
    person = Terminal("run", "a", "1", "--command", "sleep 2.2", home=home, columns=60, cwd=tmp_path)
    code, printed = person.finish()
    assert code == 0
    shown = [part for part in printed.split("\r") if part.startswith("a-1: 1 running")]
    assert len(shown) >= 2
    assert max(map(len, shown)) < 60
