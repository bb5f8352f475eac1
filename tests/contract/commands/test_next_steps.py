"""What commands say at their end: the lines to paste do what they say, and fit a terminal of 80 columns."""

import json
import os
import re
import shlex
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.contract import clients
from tests.contract.terminal import Terminal

LINE = re.compile(r"^(?:Next|Repeat): (.+)$", re.MULTILINE)


@pytest.fixture
def place(home: Path, tmp_path: Path) -> Path:
    Path("train.py").write_text(
        "import json, sys, time\n"
        "for step in (1, 2):\n"
        "    event = {'v': 1, 'event': 'metric', 'rank': 0, 'time': time.time(), 'name': 'loss', 'value': 1 / step}\n"
        "    print('@mlbench ' + json.dumps(event))\n"
        "sys.exit(len(sys.argv) - 1)\n"
    )
    return tmp_path


def mlbench(*words: str, code: int = 0, codes: tuple[int, ...] = ()) -> "subprocess.CompletedProcess[str]":
    done = clients.finish(*words)
    assert done.returncode in (codes or (code,)), (words, done.stdout, done.stderr)
    return done


def lines_of(done: "subprocess.CompletedProcess[str]") -> list[str]:
    return LINE.findall(done.stdout + done.stderr)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_line_to_paste_does_what_it_says(place: Path) -> None:
    demo = ("--command", "python train.py", "--share-machine", "--yes")
    said = {
        "run": mlbench("run", "demo", "1", "2", "--repeat", "2", *demo),
        "status": mlbench("status", "demo"),
        "wait": mlbench("wait", "demo"),
        "compare": mlbench("compare", "demo-1", "demo-2"),
        "report": mlbench("report", "out.html", "demo"),
        "download": mlbench("download", "demo", "--to", "demo.zip"),
        "verify": mlbench("verify", "demo.zip"),
        "gate": mlbench("gate", "demo-1", "--baseline", "demo-2", codes=(7, 9)),
        "detached": mlbench("run", "away", "1", "-d", *demo),
        "tasks": mlbench("tasks", "digits_resnet"),
        "twin": mlbench("run", "twin", "1", "--repeat", "1", *demo),
        "reproduce": mlbench("reproduce", "demo-1", "--with", "twin", "--receipt", "r.json", codes=(0, 7, 9)),
    }
    pasted = {line for done in said.values() for line in lines_of(done)}
    assert {"run", "download", "detached", "reproduce"} <= {name for name, done in said.items() if lines_of(done)}
    assert all(line.startswith("mlbench ") and "NAME" not in line for line in pasted), pasted
    kept = sorted(line for line in pasted if not line.startswith("mlbench run my-run"))
    assert len(kept) >= 8
    for line in sorted(kept, key=lambda line: "cancel" in line):
        mlbench(*shlex.split(line)[1:])
    again = [run["name"] for run in json.loads(mlbench("status", "-o", "json").stdout)["runs"]]
    assert {"demo-again-1-r1", "demo-again-2-r2", "away-again-1"} <= set(again)


def test_lines_about_a_folder_with_a_space_can_be_pasted(place: Path) -> None:
    mlbench("run", "demo", "1", "--command", "python train.py", "--share-machine", "--yes")
    [begin] = re.findall("mlbench .+", mlbench("gate", "demo", "--baseline", "base line", code=9).stderr)
    mlbench(*shlex.split(begin)[1:])
    [archive] = Path("base line").glob("*.zip")
    archive.write_bytes(b"damaged")
    [line] = lines_of(mlbench("report", "x.md", str(archive), code=2))
    assert "does not start like a zip" in mlbench(*shlex.split(line)[1:], code=2).stdout


def test_a_failed_run_names_a_log_that_can_be_shown(place: Path) -> None:
    done = mlbench("run", "bad", "1", "--command", "python train.py fail", "--share-machine", "--yes", code=7)
    logs = [line for line in lines_of(done) if line.startswith("mlbench logs")]
    assert logs
    mlbench(*shlex.split(logs[0])[1:])


@pytest.mark.slow
def test_a_quiet_run_prints_where_its_archive_is_and_else_only_errors(place: Path) -> None:
    words = ("--quiet", "--share-machine", "--yes", "--command")
    done = mlbench("run", "still", "1", "2", *words, "python train.py")
    folders = done.stdout.splitlines()
    assert (len(folders), done.stderr) == (2, "")
    mlbench("verify", *folders)
    done = mlbench("run", "loud", "1", *words, "python train.py fail", code=7)
    mlbench("verify", *done.stdout.split())
    assert "loud-1 failed. Rank 0 exited with 1." in done.stderr
    assert "Next: mlbench logs loud-1 --rank 0" in done.stderr
    assert "Started" not in done.stderr


@pytest.mark.slow
def test_an_experiment_is_one_file_that_other_commands_read(place: Path) -> None:
    mlbench("run", "a", "1", "--repeat", "3", "--command", "python train.py", "--share-machine", "--yes", "--quiet")
    mlbench("run", "b", "1", "--repeat", "3", "--command", "python train.py", "--share-machine", "--yes", "--quiet")
    for name in ("a", "b"):
        mlbench("download", name, "--to", f"{name}.zip")
    assert "Add --force" in mlbench("download", "a", "--to", "a.zip", code=2).stderr
    os.environ["MLBENCH_HOME"] = str(place / "elsewhere")
    checked = json.loads(mlbench("verify", "a.zip", "-o", "json").stdout)["archives"]
    assert [(item["archive"], item["ok"]) for item in checked] == [(f"a.zip/a-1-r{n}.zip", True) for n in (1, 2, 3)]
    assert "3 and 3 runs" in mlbench("compare", "a.zip", "b.zip").stdout
    mlbench("report", "both.md", "a.zip", "b.zip")
    assert "6 runs" in mlbench("report", "both.html", "a.zip", "b.zip").stderr
    mlbench("charts", "charts", "a.zip")
    built = mlbench("site", "a.zip", "--to", "site", "-o", "json")
    assert json.loads(built.stdout)["archives"] == 3
    for words in (["verify", "a.zip", "--sign", "key"], ["run", "again", "--from", "a.zip"]):
        refused = mlbench(*words, code=2).stderr
        assert "a.zip holds the archives of 3 runs" in refused
        assert "-m zipfile -e a.zip FOLDER" in refused
    Path("class").mkdir()
    Path("class/a.zip").write_bytes(Path("a.zip").read_bytes())
    assert "class/a.zip/a-1-r1.zip: ok" in mlbench("verify", "class").stdout
    assert "class/a.zip holds the archives of 3 runs" in mlbench("verify", "class", "--sign", "key", code=2).stderr
    damaged = bytearray(Path("a.zip").read_bytes())
    damaged[len(damaged) // 2] ^= 1  # amid the second of three; near a third are headers that nobody reads
    Path("bad.zip").write_bytes(damaged)
    assert "bad.zip" in (done := mlbench("verify", "bad.zip", code=2)).stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(find_spec("tensorflow") is not None, reason="TensorFlow is installed here")
def test_a_backend_that_is_not_installed_is_refused_before_anything_is_queued(place: Path) -> None:
    done = mlbench("run", "j", "1", "--task", "allreduce", "--backend", "grpc", "--yes", code=2)
    assert "The backend grpc needs tensorflow, which this Python lacks" in done.stderr
    assert "pip install '/" in done.stderr  # the checkout that mlbench was installed from
    assert json.loads(mlbench("status", "-o", "json").stdout)["runs"] == []


@pytest.mark.slow
def test_lines_end_between_words_and_commands_can_still_be_pasted(place: Path) -> None:
    name = "a-run-with-a-long-name"
    words = ["run", name, "1", "2", "--command", "python train.py", "--share-machine", "--yes", "--repeat", "1"]
    code, shown = Terminal(*words, home=place / "home", columns=80).finish()
    assert code == 0
    lines = [re.sub(r"\x1b\[[0-9;]*[A-Za-z]|.*\r", "", line) for line in shown.splitlines()]
    assert max(len(line.rstrip()) for line in lines if "/" not in line) <= 80  # paths stay whole
    whole = shown.replace("\\\n", " ")
    (repeat,) = LINE.findall(whole)[-1:]
    assert shlex.split(repeat)[:5] == ["mlbench", "run", f"{name[:20].rstrip('-')}-again", "1", "2"]
