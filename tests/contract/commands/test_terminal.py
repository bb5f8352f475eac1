"""The tool as a person meets it: questions on a terminal, Ctrl-C, signals, and a client that is killed."""

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from mlbench_cli.app import run
from mlbench_cli.storage.store import Store
from tests.contract import clients
from tests.contract.local_runs import until
from tests.contract.terminal import LIMIT, Terminal


def plain(text: str) -> str:
    """What a terminal shows of a text with escape sequences."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_delete_asks_first(home: Path) -> None:
    assert run(["run", "a", "1", "--command", "true"]) == 0
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


@pytest.mark.slow
def test_charts_asks_which_runs(home: Path, tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        assert run(["run", name, "1", "--command", "true"]) == 0
    person = Terminal("charts", str(tmp_path / "figures"), home=home)
    person.answer("[all]: ", "7")
    person.answer("[all]: ", "0 2")
    assert person.finish()[0] == 0
    rows = (tmp_path / "figures" / "summary.csv").read_text()
    assert "total_time.png" in os.listdir(tmp_path / "figures")
    assert rows.count("\n") >= 1


# --- interrupts ------------------------------------------------------------------------------------------------------

SLEEPER = ["--command", "sh -c 'echo begun; echo $$ > pid; exec sleep 60'"]


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def rank_pid(folder: Path) -> int:
    return int(until(lambda: (folder / "pid").exists() and (folder / "pid").read_text().strip()))


def test_ctrl_c_cancels_and_keeps(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    person = Terminal("run", "a", "1", "2", "3", *SLEEPER, home=home, cwd=tmp_path)
    person.expect("Ctrl-C cancels the run and keeps partial results.")
    pid = rank_pid(tmp_path)
    person.type("\x03")
    code, printed = person.finish()
    assert code == 130
    assert 'Canceled the run "a-1"' in printed
    assert "Not started: a-2, a-3; to resume: mlbench run a" in printed
    until(lambda: not alive(pid))
    rows = Store(home).runs()
    assert [(row.run.name, row.outcome) for row in rows] == [("a-1", "canceled"), ("a-2", None), ("a-3", None)]
    assert (rows[0].run.folder / "logs" / "rank-0.log").read_text() == "begun\n"
    assert run(["report", "a.md", "a"]) == 0
    assert "2 of 3 runs of a have no results yet and are omitted." in capsys.readouterr().err


def test_sigterm_cancels_and_keeps(home: Path, tmp_path: Path) -> None:
    client = clients.start("run", "a", "1", *SLEEPER, "-o", "json", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    pid = rank_pid(tmp_path)
    client.send_signal(signal.SIGTERM)
    out, err = client.communicate(timeout=LIMIT)
    assert client.returncode == 143, out + err
    assert json.loads(out)["error"]["code"] == "terminated"
    assert "Traceback" not in err
    until(lambda: not alive(pid))
    assert Store(home).run("a-1").outcome == "canceled"


def test_ctrl_c_ends_only_the_waiting(home: Path, tmp_path: Path) -> None:
    assert run(["run", "a", "1", "--detach", *SLEEPER]) == 0
    pid = rank_pid(tmp_path)
    for command in (["wait", "a-1"], ["status", "a-1", "--watch"], ["logs", "a-1", "--follow"]):
        person = Terminal(*command, home=home)
        person.expect("begun" if command[0] == "logs" else " 1 running")
        person.type("\x03")
        assert person.finish()[0] == 130
    assert alive(pid)
    assert run(["cancel", "a-1"]) == 0
    until(lambda: not alive(pid))


def test_a_progress_bar_is_shown_while_its_line_has_no_end(home: Path, tmp_path: Path) -> None:
    bar = r"printf 'begun\n 10\045|#   |\r\033[31m 20\045|██日本 |'; sleep 6"
    (tmp_path / "bar.sh").write_text(bar)
    code, printed = Terminal("run", "a", "1", "--command", "sh bar.sh", home=home, columns=80, cwd=tmp_path).finish()
    assert code == 0
    shown = [plain(part) for part in printed.split("\r") if "a-1: 1 running" in plain(part)]
    assert "last line: 20%|██日本 |" in shown[-1]
    assert "10%" not in "".join(shown)
    assert len(shown) >= 2
    assert re.search(r"elapsed \d s", shown[0])
    assert max(map(len, shown)) < 80


def test_the_log_of_rank_0_is_shown_above_the_progress(home: Path, tmp_path: Path) -> None:
    command = "sh -c 'echo first of {rank}; sleep 1.2; printf last'"
    code, printed = Terminal("run", "a", "2", "--logs", "--command", command, home=home, cwd=tmp_path).finish()
    assert code == 0
    lines = [plain(line).split("\r")[-1] for line in printed.splitlines()]
    assert "first of 0" in lines
    assert "last" in lines
    assert "first of 1" not in printed


def test_a_pipe_gets_the_log_of_rank_0_on_stderr(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["run", "a", "1", "--logs", "--command", "sh -c 'echo begun; sleep 1; echo done'"]) == 0
    out, err = capsys.readouterr()
    assert "\nbegun\n" in err
    assert "\ndone\n" in err
    assert "begun" not in out
