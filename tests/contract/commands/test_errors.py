"""Every wrong command line: the right exit code, one paragraph or one document, a next step, and never a traceback."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mlbench_cli import commands
from mlbench_cli.app import run
from mlbench_cli.model.run import Outcome, RunState
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.runs.request import OPTIONS, flag
from mlbench_cli.storage.store import Store
from mlbench_cli.util import gone

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store with two finished runs, without results."""
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "home").mkdir()
    store = Store(tmp_path / "home")
    for name in ("demo-1", "demo-2"):
        spec = RunSpec(name, "local", "local", "custom", "custom", ("true",), "gloo", 1)
        store.advance(store.record_run(spec), RunState.FINISHED, Outcome.FAILED)
    store.close()
    return tmp_path / "home"


TASK = ["--task", "digits_resnet"]
WRONG: list[tuple[list[str], int, str]] = [
    (["stauts"], 2, 'Did you mean "status"?'),
    (["--verion"], 2, "--verion"),
    (["status", "--metrc", "x"], 2, "--metrc"),
    (["reproduce", "x.zip", "--within", "1_0%"], 2, "is not between 0 and 100 %"),
    (["status", "demo-3"], 4, 'Did you mean "demo-'),
    (["status", "-m", "Prec@1"], 2, "--metric and --watch need one run."),
    (["logs", "demo"], 4, 'There is no run or experiment "demo"'),
    (["logs", "demo-1", "--rank", "1"], 4, "only 0 to 0"),
    (["logs", "demo-1", "--rank", "x"], 2, "'x' is not a whole number"),
    (["logs"], 2, "No run given"),
    (["wait", "nope"], 4, 'There is no run or experiment "nope"'),
    (["wait", "demo-1", "--timeout", "soon"], 2, "is not a duration"),
    (["delete", "nope", "--yes"], 4, 'There is no run or experiment "nope"'),
    (["delete", "demo-1"], 2, "no terminal to ask on"),
    (["verify"], 2, "Missing argument"),
    (["verify", ""], 2, 'after "verify" is empty'),  # and not this folder
    (["run", "x", "1", "--from="], 2, "--from has no value"),
    (["verify", "nope.zip"], 4, "no archive nope.zip"),
    (["charts", "out"], 4, "no finished run"),
    (["charts", "out", "--filter", "x"], 4, 'with "x" in its name'),
    (["charts", "out", "demo-1"], 2, "no results yet"),
    (["charts", "out", "nope.zip"], 4, "no archive nope.zip"),
    (["charts", "nope.zip"], 2, "is an archive, not a folder for figures"),
    (["charts", "demo-1"], 2, '"demo-1" is a run, not a folder for figures'),
    (["compare", "./demo-1", "demo-2"], 4, "no archive ./demo-1"),
    (["download", "demo-1", "--output", "json"], 2, '"json" is a format'),
    (["download", "demo-1", "-o", "jsn"], 2, "is not a format; use text or json"),
    (["download", "demo-1", "--to", "a.zip", "--output", "b.zip"], 2, "Two files are named"),
    (["logs", "demo-1", "--tail", "-1"], 2, "--tail"),
    (["compare", "demo-1", "demo-2"], 2, "no results yet"),
    (["tasks", "digit_resnet"], 4, 'Did you mean "digits_resnet"?'),
    (["methods", "DDP"], 4, 'Did you mean "ddp"?'),
    (["set-cluster", "lokal"], 4, 'Did you mean "local"?'),
    (["set-cluster", "gcloud", "local"], 2, '"local" is a local cluster, not gcloud'),
    (["set-cluster", "a", "b", "c"], 2, "3 words"),
    (["get-dashbord-url"], 2, "There is no command"),
    (["help", "clusers"], 2, 'Did you mean "clusters"?'),
    (["status", "--state", "faild"], 2, 'There is no state "faild". Did you mean "failed"?'),
    (["status", "--since", "soon"], 2, "is not a duration"),
    (["status", "--cluster", "local", "--task", "custom"], 2, "select runs"),
    (["run"], 2, "No name, no number of workers, no task or command given"),
    (["run", "x"], 2, "No number of workers, no task or command given, and there is no terminal"),
    (["run", *TASK], 2, "No name, no number of workers given"),
    (["run", "x", "1"], 2, "No task or command given, and there is no terminal to prompt on."),
    (["run", "x", "1", "--yes"], 2, "No task or command given."),
    (["run", "x", "-1", *TASK], 2, "-1 is not a valid number here"),
    (["run", "2", *TASK], 2, "NAME comes before the numbers"),
    (["run", "x", "1", "--task", "imagenet_resnet"], 4, "data of the task"),
    (["run", "x", "1", "--task", "epsilon_logistic_regression", "--data-dir", "."], 4, "epsilon_normalized.t (or"),
    (["run", "x", "two", *TASK], 2, '"two" is not a number of workers'),
    (["run", "x", "1,2", "--command", "true"], 2, "is not a number of workers. Several are written with spaces: 1 2 4"),
    (["run", "x", "9" * 5000, "--command", "true"], 2, "workers: the number must be from 1 to 4096"),
    (["run", "x", "1", "--command", "python", "train.py"], 2, '"train.py" is not a number of workers'),
    (["run", "demo", "1", *TASK], 2, 'already a run "demo-1"'),
    (["run", "x", "1", "--task", "digits"], 4, 'Did you mean "digits_resnet"?'),
    (["run", "x", "1", *TASK, "--set", "epochs"], 2, "not of the form KEY=VALUE"),
    (["run", "x", "1", *TASK, "--set", "epochs=1", "--set", "epochs=2"], 2, "twice"),
    (["run", "x", "1", *TASK, "--backend", "mip"], 2, 'Did you mean "mpi"?'),
    (["run", "x", "1", *TASK, "--cluster", "loca"], 4, 'Did you mean "local"?'),
    (["run", "x", "1", *TASK, "--data-dir", "nope"], 4, "the folder nope does not exist"),
    (["run", "x", "1", "--image", "me/train"], 2, "no terminal to prompt on"),
    (["run", "-f", "nope.yaml"], 4, "no file nope.yaml"),
]
if not any(Path("/dev").glob("nvidia[0-9]*")):
    WRONG.append((["run", "x", "1", *TASK, "--gpu"], 2, "this machine has no GPU"))


@pytest.mark.parametrize(("argv", "code", "words"), WRONG, ids=[" ".join(argv)[:60] for argv, _, _ in WRONG])
def test_wrong_command_lines(argv: list[str], code: int, words: str, capsys: Captured) -> None:
    assert run(argv) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("Error: ")
    assert words in err
    assert "Traceback" not in err
    # Where the message itself says what is allowed, there is nothing to add.
    assert "\nNext: " in err or argv[0] in ("run", "logs", "charts", "set-cluster")
    assert [run.run.name for run in Store().runs()] == ["demo-1", "demo-2"]
    if argv[0] in ("stauts", "--verion", "get-dashbord-url", "download", "help"):
        return  # no command, or one whose -o may also name a file
    assert run([*argv, "-o", "json"]) == code
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert err == ""
    assert words in document["error"]["message"]
    assert document["schema_version"] == 1
    assert set(document["error"]) == {"code", "message", "hint", "details"}


@pytest.mark.parametrize("flag", ["-ojson", "-yo json", "-yojson", "-fo json", "--output json", "--output=json"])
def test_every_spelling_asks_for_json(flag: str, capsys: Captured) -> None:
    assert run(["delete", "demo-9", *flag.split()]) in (2, 4)
    assert json.loads(capsys.readouterr().out)["error"]["message"]


def test_json_behind_two_dashes_is_no_option(capsys: Captured) -> None:
    assert run(["logs", "--", "-o", "json"]) == 4  # two names of runs
    assert capsys.readouterr().err.startswith("Error: ")


def test_a_spec_file_is_named_where_it_is_wrong(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "spec.yaml").write_text("name: x\nworkers: 1\ntask: digits_resnet\nepochs: 3\n")
    assert run(["run", "-f", "spec.yaml"]) == 2
    assert 'spec.yaml: Unknown key "epochs".' in capsys.readouterr().err


def test_a_store_that_cannot_be_written(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    (home / "file").write_text("")
    monkeypatch.setenv("MLBENCH_HOME", str(home / "file"))
    for command in ("status", "list-clusters"):
        assert run([command]) == 2
    assert "Set MLBENCH_HOME to a folder that you may write to." in capsys.readouterr().err
    monkeypatch.setenv("MLBENCH_HOME", "~nobody-of-this-name/x")
    assert run(["status"]) == 2
    assert "there is no such home folder" in capsys.readouterr().err
    assert not Path("~nobody-of-this-name").exists()


def test_folders_of_runs_that_cannot_be_made_are_told_and_leave_no_experiment(home: Path, capsys: Captured) -> None:
    (home / "runs").symlink_to("/proc/sys")
    assert run(["run", "x", "1", "--command", "true", "--yes"]) == 2
    error = capsys.readouterr().err
    assert "cannot be recorded" in error
    assert "MLBENCH_HOME" in error
    assert Store(home).find_experiment("x") is None


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_store_without_permission(home: Path, capsys: Captured) -> None:
    home.chmod(0o500)
    assert run(["run", "x", "1", "--command", "true"]) == 2
    home.chmod(0o700)
    assert "cannot be used" in capsys.readouterr().err


NOBODY = """
import pwd, sys
def find_none(uid):
    raise KeyError(f"getpwuid(): uid not found: {uid}")
pwd.getpwuid = find_none  # as in a container that runs as a number, which no file of the image knows
from mlbench_cli.app import run
sys.exit(run(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["run", "x", "1", "--command", "true"], 2),
        (["create-cluster", "kind", "1", "x", "--dry-run"], 2),
        (["help", "defaults"], 2),
        (["tasks"], 0),  # needs no folder
    ],
)
def test_a_user_without_a_home_and_without_an_entry_in_passwd_is_told_what_to_set(
    tmp_path: Path, argv: list[str], code: int
) -> None:
    words = [sys.executable, "-c", NOBODY, *argv]
    bare = {"PATH": os.environ["PATH"]}
    done = subprocess.run(words, env=bare, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert ("no home folder" in done.stderr and "Next: Set MLBENCH_HOME" in done.stderr) is (code == 2)
    if argv[0] == "run":
        named = {**bare, "MLBENCH_HOME": str(tmp_path / "mine"), "MLBENCH_MACHINE_LOCK": "none"}
        done = subprocess.run(words, env=named, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("~*")) == []


# --- the boundary itself ----------------------------------------------------------------------------------------------

RAISING = """
import sys
from mlbench_cli import commands
from mlbench_cli.app import run
commands.PANELS["Test"] = {"fail": commands.Command("raising", "fail", "fails")}
sys.exit(run(sys.argv[1:]))
"""


def broken(tmp_path: Path, body: str, *argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The tool with one more command, whose body is given."""
    (tmp_path / "raising.py").write_text(f"def fail(output: str = 'text') -> int:\n    {body}\n")
    return subprocess.run(
        [sys.executable, "-c", RAISING, "fail", *argv],
        env={**os.environ, "PYTHONPATH": str(tmp_path), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_an_unexpected_exception(tmp_path: Path) -> None:
    done = broken(tmp_path, "raise ValueError('odd')")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("Error: Internal error: ValueError: odd\nNext: ")
    assert "Traceback" not in done.stderr
    assert "Traceback" in broken(tmp_path, "raise ValueError('odd')", MLBENCH_DEBUG="1").stderr
    document = json.loads(broken(tmp_path, "raise ValueError('odd')", "--output", "json").stdout)
    assert document["error"]["details"] == {"type": "ValueError"}


def test_the_exit_code_is_what_the_command_returns(tmp_path: Path) -> None:
    assert broken(tmp_path, "return 7").returncode == 7
    assert broken(tmp_path, "import typer; raise typer.Exit(5)").returncode == 5
    assert broken(tmp_path, "return None").returncode == 0


def test_interrupts(tmp_path: Path) -> None:
    done = broken(tmp_path, "raise KeyboardInterrupt")
    assert (done.returncode, done.stderr) == (130, "Interrupted.\n")
    done = broken(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGTERM)")
    assert (done.returncode, done.stderr) == (143, "Terminated (SIGTERM).\n")


def test_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "raising.py").write_text("def fail() -> None:\n    for _ in range(100000): print('x' * 80)\n")
    with subprocess.Popen(
        [sys.executable, "-c", RAISING, "fail"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 141


def test_a_run_is_not_canceled_because_nobody_reads_about_it(tmp_path: Path) -> None:
    """mlbench run ... 2>&1 | head -1"""
    environment = {**os.environ, "MLBENCH_HOME": str(tmp_path), "MLBENCH_MACHINE_LOCK": "none"}
    words = ["run", "x", "1", "--command", "sh -c 'until test -e go; do sleep 0.02; done'"]
    with subprocess.Popen(
        [sys.executable, "-m", "mlbench_cli", *words], cwd=tmp_path, env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline()
        process.stdout.close()
        (tmp_path / "go").touch()
        assert process.wait() == 141
    (run,) = Store(tmp_path).runs()
    assert run.outcome == "completed"


def test_another_broken_pipe_is_one(tmp_path: Path) -> None:
    done = broken(tmp_path, "raise BrokenPipeError(32, 'Broken pipe')")
    assert (done.returncode, done.stderr) == (1, "Error: Operating system error: [Errno 32] Broken pipe.\n")


@pytest.mark.slow
@pytest.mark.parametrize("command", [["--version"], ["status", "-o", "json"], ["run"]])
def test_a_full_disk_behind_stdout(command: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "mlbench_cli", *command], stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == (2 if command == ["run"] else 5)
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("closed", ["<&-", ">&-", "<&- >&- 2>&-"])
def test_closed_streams(closed: str) -> None:
    for command, code in (("tasks", 0), ("run x 1", 2)):
        done = subprocess.run(
            ["sh", "-c", f'exec "$0" -m mlbench_cli {command} {closed}', sys.executable], capture_output=True, text=True
        )
        assert (done.returncode, "Traceback" in done.stderr) == (code, False)


# --- help ------------------------------------------------------------------------------------------------------------


def test_help_lists_everyday_commands_and_topics(capsys: Captured) -> None:
    assert run(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in commands.EVERYDAY)
    assert all(f"mlbench help {topic} " in text for topic in commands.TOPICS)
    for same in ([], ["help"]):
        assert run(same) == 0
        assert capsys.readouterr().out == text


def test_topics_list_every_command_and_exit_code(capsys: Captured) -> None:
    shown = ""
    for topic in commands.TOPICS:
        assert run(["help", topic]) == 0
        shown += capsys.readouterr().out
    assert all(f"  {name} " in shown for name in commands.names())
    assert all(f"{code}  {meaning}" in shown for code, meaning in commands.EXIT_CODES.items())
    assert max(len(line) for line in shown.splitlines() if not line.startswith("Config file: ")) <= 80


@pytest.mark.parametrize("name", ["logs", "images"])
def test_help_of_a_command_is_its_own(name: str, capsys: Captured) -> None:
    assert run(["help", name]) == 0
    shown = capsys.readouterr().out
    assert run([name, "--help"]) == 0
    assert capsys.readouterr().out == shown


def test_run_help_shows_common_options_and_help_all_every_option(capsys: Captured) -> None:
    assert run(["run", "--help"]) == 0
    short = capsys.readouterr().out
    assert "--method" in short
    assert "mlbench run --help-all" in short
    assert "--node-selector" not in short
    own = {word for word in re.findall(r"^  (?:-\w, )?(--[a-z-]+)", short, re.MULTILINE) if "help" not in word}
    assert len(own) == 12
    assert run(["run", "--help-all"]) == 0
    full = capsys.readouterr().out
    assert len(re.findall(r"^  (?:-\w, )?--[a-z-]+", full, re.MULTILINE)) <= 61  # with --help
    assert run(["help", "run-settings"]) == 0
    alike = {"custom_backend": "--backend", "include_files": "--include"}
    full += capsys.readouterr().out
    assert all(alike.get(item.name) or flag(item.name).removeprefix("--set ") in full for item in OPTIONS)
    for option, instead in gone.OPTIONS.items():
        if instead.startswith("--set run."):
            assert run(["run", "x", "1", "--command", "true", option, "1"]) == 2
            assert f"Next: {instead}" in capsys.readouterr().err


def test_every_command_has_help_that_names_the_values_of_options(capsys: Captured) -> None:
    kinds = [["create-cluster", kind] for kind in ("kind", "gke", "eks", "aks")]
    for words in (*([name] for name in commands.names()), ["run", "--help-all"], ["data", "prepare"], *kinds):
        assert run([*words, "--help"]) == 0
        out, err = capsys.readouterr()
        assert out.startswith(f"Usage: mlbench {' '.join(word for word in words if not word.startswith('-'))}")
        assert not re.search("<(str|int|float|path)", out)
        assert err == ""
