"""Archives full of hostile text, read by every command that shows archives: through a pipe on GitHub, on a terminal.

A marker stands behind each hostile character. What is counted: markers at the beginning of a line, commands that
GitHub's runner would obey, and control or bidirectional characters that reach the output as they are.
"""

import os
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from mlbench_cli.app import run
from mlbench_cli.model.run import Outcome, RunState
from mlbench_cli.results.archive.files import pack
from mlbench_cli.results.archive.record import write_run_document
from mlbench_cli.results.archive.seal import seal
from mlbench_cli.storage.store import Store
from tests import NIGHTLY
from tests.contract.terminal import Terminal
from tests.unit.results.runs import event, new_run, observation_of, result_event, spec, training_log

MARK = "HOSTILE"
# What stands before the marker: each text tries to put it at column 0, to start a command, or to move the cursor.
PREFIXES = {
    "line end": "a\n",
    "carriage return": "a\r",
    "workflow command": "a\n::error file=x::",
    "indented workflow command": "a\n   ::add-mask::",
    "old workflow command": "a ##[add-matcher]",
    "first in the line": "::stop-commands::",
    "title of a terminal": "a\x1b]0;",
    "cleared screen": "a\x1b[2J\x1b[H",
    "C1 control": "a\x9b2J",
    "bell": "a\x07",
    "right to left": "a\u202e",
    "isolate": "a\u2066",
    "zero width": "a\u200b\ufeff",
    "line separator": "a\u2028",
    "next line": "a\x85",
    "vertical tab": "a\x0b",
}
TEXTS = {name: prefix + MARK for name, prefix in PREFIXES.items()}
ALL = " ".join(TEXTS.values())
RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")
OBEYED = re.compile(r"^\s*::\S+?.*?::|##\[(add-matcher|add-mask|error|command|group)", re.MULTILINE)

# Every command that shows archives, logs or the runs of the store; A and B are archives, RUN a run of the store.
COMMANDS: dict[str, list[str]] = {
    "status": ["status"],
    "status RUN": ["status", "RUN", "--verbose"],
    "status --metric": ["status", "RUN", "--metric", TEXTS["line end"]],
    "wait": ["wait", "RUN"],
    "logs": ["logs", "RUN"],
    "logs --tail": ["logs", "RUN", "--tail", "1000"],
    "verify": ["verify", "A", "B", "DAMAGED"],
    "compare": ["compare", "A", "B"],
    "report md": ["report", "out.md", "A", "B"],
    "report html": ["report", "out.html", "A", "B"],
    "charts": ["charts", "figures", "A", "B"],
    "gate": ["gate", "A", "--baseline", "B", "--junit", "gate.xml"],
    "export csv": ["export", "csv", "all.csv", "A"],
    "export nccl": ["export", "nccl", "nccl", "A"],
    "predict": ["predict", "A"],
    "plan": ["plan", "cifar10_resnet20", "--from", "A"],
    "download": ["download", "RUN", "--to", "copy.zip"],
    "sign": ["verify", "A", "--sign", "key", "--force"],
    "run --from": ["run", "y", "--from", "A", "--dry-run"],
    "reproduce --dry-run": ["reproduce", "A", "--dry-run"],
    "reproduce --with": ["reproduce", "A", "--with", "B"],
    "site": ["site", "."],
    "doctor": ["doctor"],
    "list-clusters": ["list-clusters"],
    "cancel": ["cancel", "RUN"],
    "delete": ["delete", "RUN", "--yes"],
}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a store that has one hostile run, two hostile archives, and a damaged one."""
    folder = tmp_path_factory.mktemp("lab")
    (folder / "home").mkdir()
    store = Store(folder / "home")
    for number, name in enumerate(("x-1", "y-1")):
        recorded = store.record_run(
            spec(name, 1, backend=ALL, preset=ALL, parameters={"batch_size": 8 + number, **TEXTS})
        )
        lines = [*ALL.splitlines(), *TEXTS.values(), *training_log(0, environment={"framework": ALL})[:-1]]
        lines += [event("environment", at=1, device_name=ALL, packages=dict.fromkeys(TEXTS.values(), ALL))]
        lines += [
            event("metric", at=2, name=text, value=1.0, unit=ALL, epoch=0, seconds=2.0) for text in TEXTS.values()
        ]
        lines += [event("phase", at=3, phase=ALL, epoch=0, epochs=1)]
        lines += [result_event(9.0 + number, data=ALL, details={"best": 80.5, **TEXTS})]
        new_run(recorded.folder, recorded.spec, {0: lines})
        write_run_document(recorded)
        seal(recorded, observation_of(1, 12.0))
        store.advance(recorded, RunState.FINISHED, Outcome.GOAL_REACHED)
        pack(recorded.folder, folder / f"{'AB'[number]}.zip")
        if name == "y-1":
            shutil.copytree(recorded.folder, folder / "DAMAGED")
            (folder / "DAMAGED" / f"{ALL.replace('/', ' ')[:100]}").write_text("")
            store.forget_run(recorded)
    store.close()
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", "key"], cwd=folder, check=True)
    return folder


def count_hostile(output: str) -> dict[str, int]:
    """How many hostile strings are raw in an output, by what they would do."""
    lines = re.split("\r\n|\n", output)
    return {
        "at column 0": sum(line.startswith(MARK) for line in lines),
        "obeyed by a runner": len(OBEYED.findall(output)),
        "raw characters": sum(len(RAW.findall(line)) for line in lines),
    }


def prepare(lab: Path, folder: Path, words: Sequence[str]) -> list[str]:
    """A copy of the lab for one command, and its words."""
    shutil.copytree(lab, folder, dirs_exist_ok=True)
    # The store remembers where each run is: a command that deletes one must not delete that of all other tests.
    with closing(sqlite3.connect(folder / "home" / "mlbench.sqlite")) as store, store:
        store.execute("UPDATE runs SET folder = replace(folder, ?, ?)", (str(lab), str(folder)))
    names = {"A": "A.zip", "B": "B.zip", "RUN": "x-1"}
    return [names.get(word, word) for word in words]


# `doctor` shows nothing of archives or runs, and asks torch. Figures are drawn below.
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in COMMANDS if NIGHTLY or name not in ("doctor", "charts")])
def test_nothing_hostile_comes_through_a_pipe(
    lab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    words = prepare(lab, tmp_path, COMMANDS[name])
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.chdir(tmp_path)
    run(words)
    out, err = capsys.readouterr()
    assert "Internal error" not in err
    assert out or err
    counts = count_hostile(out + err)
    if name.startswith("logs"):  # through a pipe, a log is what the task printed, but for commands
        assert out.count(MARK) > len(TEXTS)
        counts |= {"at column 0": 0, "raw characters": 0}
    if name == "gate":
        counts["obeyed by a runner"] -= 1  # mlbench's own annotation
    print(f"{name}: {counts}")
    assert counts == dict.fromkeys(counts, 0), out + err


# Those that show what they have read in a form of their own: tables, progress, cards, logs, lists of problems.
ON_TERMINALS = (
    "status",
    "status RUN",
    "wait",
    "logs",
    "verify",
    "compare",
    "report md",
    "gate",
    "plan",
    "run --from",
)


@pytest.mark.parametrize("name", COMMANDS if NIGHTLY else ON_TERMINALS)
def test_nothing_hostile_reaches_a_terminal(lab: Path, tmp_path: Path, name: str) -> None:
    words = prepare(lab, tmp_path, COMMANDS[name])
    terminal = Terminal(*words, home=tmp_path / "home", cwd=tmp_path, columns=200)
    _, seen = terminal.finish()
    own = re.sub("\x1b\\[[0-9;]*[mJK]|\r", "", seen)  # colors and the line of progress are mlbench's
    assert "Internal error" not in seen
    assert "\x1b[2J" not in seen
    counts = count_hostile(own)
    if name.startswith("logs"):
        counts["at column 0"] = 0  # the task printed these lines
    counts["obeyed by a runner"] = 0
    print(f"{name}: {counts}")
    assert counts == dict.fromkeys(counts, 0), seen


@pytest.mark.slow
def test_files_for_people_have_nothing_raw(lab: Path, tmp_path: Path) -> None:
    prepare(lab, tmp_path, [])
    environment = {**os.environ, "MLBENCH_HOME": str(tmp_path / "home"), "GITHUB_ACTIONS": "true"}
    for words in (["report", "out.md", "A.zip"], ["report", "out.html", "A.zip"], ["charts", "figures", "A.zip"]):
        done = subprocess.run(
            [sys.executable, "-m", "mlbench_cli", *words], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert "site-packages" not in done.stderr  # matplotlib's warnings about glyphs name paths
        assert count_hostile(done.stdout + done.stderr) == dict.fromkeys(count_hostile(""), 0), done.stderr
    for path in (tmp_path / "out.md", *(tmp_path / "out-data").glob("*.csv"), tmp_path / "figures" / "summary.csv"):
        assert count_hostile(path.read_text())["raw characters"] == 0, path
        assert not re.search(f"^{MARK}", path.read_text(), re.MULTILINE), path
