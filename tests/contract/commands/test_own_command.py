"""A command of the user: whose Python runs it, what it sees, what is refused, and which runs of it are repeats."""

import json
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.app import run
from tests import NIGHTLY
from tests.contract import clients
from tests.contract.local_runs import until
from tests.needs import missing


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return folder


def mlbench(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return clients.finish(*words, environment={**os.environ, **environment})


def folder_of(name: str) -> Path:
    for path in Path(os.environ["MLBENCH_HOME"], "runs").iterdir():
        if json.loads((path / "run.json").read_bytes())["name"] == name:
            return path
    raise AssertionError(f"there is no run {name}")


def provenance_of(name: str) -> Any:
    return json.loads((folder_of(name) / "run.json").read_bytes())["provenance"]


def log_of(name: str) -> str:
    return (folder_of(name) / "logs/rank-0.log").read_text()


def findings_of(name: str) -> dict[str, str]:
    path = folder_of(name) / "findings.json"
    return {item["code"]: item["summary"] for item in json.loads(path.read_bytes())["findings"]}


@pytest.mark.parametrize("command", ["python3 who.py", "sh -c 'python who.py'", "./who.py"])
def test_the_python_is_that_of_the_users_path(project: Path, tmp_path: Path, command: str) -> None:
    venv.create(tmp_path / "mine", with_pip=False)
    (project / "who.py").write_text("#!/usr/bin/env python\nimport sys\nprint('prefix', sys.prefix)\n")
    (project / "who.py").chmod(0o755)
    path = f"{tmp_path / 'mine' / 'bin'}:{os.environ['PATH']}"
    done = mlbench("run", "who", "1", "--command", command, PATH=path, VIRTUAL_ENV=str(tmp_path / "mine"))
    assert done.returncode == 0, done.stderr
    assert f"prefix {tmp_path / 'mine'}" in log_of("who-1")
    if command.startswith("python"):
        program = str(tmp_path / "mine" / "bin" / command.split()[0])
        assert f"Interpreter: {program}" in done.stderr
        assert provenance_of("who-1")["command"]["interpreter"] == program
        assert provenance_of("who-1")["packages"] == {}  # of that environment, not of mlbench's


def test_runs_with_another_framework_are_not_repeats(project: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "mine", with_pip=False)
    (packages,) = (tmp_path / "mine").glob("lib/python3*/site-packages")
    (project / "train.py").write_text("print(1)\n")
    path = f"{tmp_path / 'mine' / 'bin'}:{os.environ['PATH']}"
    for name, version in (("old", "2.9.0"), ("new", "2.10.0")):
        (packages / f"torch-{version}.dist-info").mkdir()
        assert mlbench("run", name, "1", "--command", "python train.py", PATH=path).returncode == 0
        (packages / f"torch-{version}.dist-info").rmdir()
    done = mlbench("compare", "old", "new")
    assert "versions of the framework differ: torch 2.9.0 and torch 2.10.0" in done.stdout + done.stderr


# One of each character, and of each word, that only a shell knows.
FOR_A_SHELL = [
    *("python a.py && echo b", "python a.py | tee log", "python a.py > log", "python a.py < in", "python a.py;ls"),
    *("FOO=1 python a.py", "python a.py --lr $LR", 'python a.py "$LR"', "python a.py ~/data", "python a.py *.txt"),
    *("(python a.py)", "python a.py $(date)", "python a.py `date`", "python who.p?", "python who.[pq]y"),
    *("nohup python a &", "python a.py # fast", "source v/bin/activate", "cd /tmp", "export A=1", "module load cuda"),
    *('python a.py "$@"', "python a.py $?", "python a.py --id $$", 'python a.py "`date`"', "python a.py --sep $'\\t'"),
]
QUOTED = [
    *('env A=1 sh -c "echo $A"', "timeout 60 bash -c 'echo $RANK'"),
    *("python -c 'print(1); print(2 > 1)'", "sh -c 'echo $RANK | cat'", 'sh -c "echo $RANK"', "echo '*' '~' a=b"),
    *("echo \\&\\& \\$HOME", 'echo "a|b" "100$"', "echo lr=[0.1,0.2] x?"),
]


def test_what_only_a_shell_understands_is_refused_with_the_way_out_and_quoted_words_are_not(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "who.py").touch()
    for command in FOR_A_SHELL:
        assert run(["run", "x", "1", "--command", command]) == 2, command
        said = capsys.readouterr().err
        assert "--command is not run by a shell" in said
        if command.endswith(" &"):  # which a run would end at once
            assert "--detach" in said
        else:
            assert ("bash -o pipefail -c" if "|" in command else "bash -c") in said
    for command in QUOTED:
        assert run(["run", "x", "1", "--command", command, "--dry-run"]) == 0, command


def test_a_command_may_have_several_lines_and_a_pipe_that_hides_failures_is_told(project: Path) -> None:
    """As people copy it from a README, and as YAML keeps a block."""
    done = mlbench("run", "lines", "1", "--command", "echo one \\\n  two\n")
    assert (done.returncode, log_of("lines-1")) == (0, "one two\n")
    assert "pipefail" not in done.stderr
    (project / "train.sh").write_text("false | tee log\n")
    assert "a failed training counts as completed" in mlbench("run", "tee", "1", "--command", "sh train.sh").stderr
    (project / "run.sh").write_text("sleep 1 &\necho $! &\n")
    assert "a run ends with its command" in mlbench("run", "early", "1", "--command", "sh run.sh").stderr
    (project / "run.sh").write_text("sleep 1 &\nwait\n")
    assert "a run ends with its command" not in mlbench("run", "waits", "1", "--command", "sh run.sh").stderr


def test_torchrun_for_one_node_is_told_to_train_on_each_worker_separately(project: Path) -> None:
    (project / "train.sh").write_text("true || python -m torch.distributed.run train.py\n")
    for name, size, command, is_told in (
        ("a", "2", "echo torchrun --nproc-per-node 2 train.py", True),
        ("b", "2", "sh train.sh", True),
        ("c", "1", "sh train.sh", False),
        ("d", "2", "echo torchrun --nnodes=2 train.py", False),
        ("e", "2", "echo torchrun --nnodes 1:4 train.py", False),
        ("f", "2", "echo torchrun --nnodes=1 train.py", True),
    ):
        done = mlbench("run", name, size, "--command", command)
        assert (done.returncode, "trains on each worker separately" in done.stderr) == (0, is_told), command


def test_the_end_of_a_log_tells_why_a_program_failed(project: Path) -> None:
    (project / "port.py").write_text(
        "import socket\none = socket.create_server(('127.0.0.1', 0))\n"
        "print('~~~^^^')\nsocket.create_server(one.getsockname())\n"
    )
    done = mlbench("run", "port", "1", "--command", "python port.py")
    assert done.returncode == 7
    assert "Rank 0 could not listen on a port, which another process uses." in done.stderr
    assert "MASTER_PORT" in done.stderr
    assert "OSError: [Errno 98]" in done.stderr
    assert "^^^" not in done.stderr


# What torchrun of torch 2.9 and accelerate 1.15 write when rank 1 fails, shortened.
TORCHRUN = """[rank1]: Traceback (most recent call last):
[rank1]:   File "/w/train.py", line 3, in <module>
[rank1]:     raise ValueError("bad batch")
[rank1]:     ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
[rank1]: ValueError: bad batch
[rank0]: RuntimeError: [gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:3992
W1130 08:49:32.155000 29555 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 3 closing signal
E1130 08:49:32.220000 29555 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1) local_rank: 1
Traceback (most recent call last):
  File "/e/bin/torchrun", line 6, in <module>
    sys.exit(main())
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-30_08:49:32
  rank      : 1 (local_rank: 1)
  exitcode  : 1 (pid: 30194)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================
"""
ACCELERATE = """Traceback (most recent call last):
  File "/w/train.py", line 3, in <module>
    raise ValueError("bad batch")
ValueError: bad batch
Traceback (most recent call last):
  File "/e/bin/accelerate", line 8, in <module>
    sys.exit(main())
subprocess.CalledProcessError: Command '['python', 'train.py']' returned non-zero exit status 1.
"""


def test_the_error_of_a_rank_is_shown_and_not_the_report_of_its_launcher(project: Path) -> None:
    killed = TORCHRUN[TORCHRUN.index("W1130") :].replace(": 1 (pid", ": -9 (pid").replace("To enable", "Signal 9")
    for name, text, last in (
        ("torchrun", TORCHRUN, "[rank1]: ValueError: bad batch"),
        ("accelerate", ACCELERATE, "ValueError: bad batch"),
        ("killed", killed, "traceback : Signal 9"),
        (
            "own",
            ACCELERATE[ACCELERATE.index("bad batch\n") + 10 :].replace("subprocess.Called", "Other"),
            "OtherProcessError",
        ),
    ):
        (project / "log.txt").write_text(text)
        done = mlbench("run", name, "1", "--command", "sh -c 'cat log.txt; exit 1'")
        shown = [line.strip() for line in done.stderr.splitlines() if line.strip().startswith("| ")]
        assert shown[-1].startswith(f"| {last}"), done.stderr


def test_a_traceback_behind_exit_code_0_is_told(project: Path) -> None:
    (project / "train.sh").write_text("python -c 'raise ValueError(1)'\necho finished\n")
    done = mlbench("run", "hidden", "2", "--command", "sh -c '[ $RANK = 0 ] || sh train.sh'")
    assert done.returncode == 0
    assert "Rank 1 exited with 0 although its log ends with a traceback: a script without set -e" in done.stderr
    (project / "fine.sh").write_text("python -c 'raise ValueError(1)' || true\nseq 100\n")
    assert "exited with 0" not in mlbench("run", "fine", "1", "--command", "sh fine.sh").stderr


def test_a_run_is_repeated_only_where_the_files_of_its_command_are(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "train.py").write_text("print(1)\n")
    assert run(["run", "here", "1", "--command", "python train.py"]) == 0
    assert run(["run", "again", "--from", "here-1"]) == 0
    (project / "elsewhere").mkdir()
    monkeypatch.chdir(project / "elsewhere")
    capsys.readouterr()
    for words in (["run", "third", "--from", "here-1"], ["reproduce", "here-1", "--repeat", "2"]):
        assert run(words) == 2
        assert "this folder has no train.py, which its command names" in capsys.readouterr().err


def test_how_to_report_a_metric_is_told_however_a_script_is_started(project: Path) -> None:
    (project / "train.py").write_text("print('loss 1')\n")
    (project / "train.sh").write_text("python train.py\n")
    for command, is_told in (("python -m train", True), ("sh train.sh", True), ("echo loss 1", False)):
        done = mlbench("run", "x", "1", "--command", command)
        assert ("from mlbench import emit" in done.stderr) == is_told, command
        assert mlbench("delete", "x", "--yes").returncode == 0


def test_scripts_that_no_system_can_start_are_named(project: Path) -> None:
    (project / "crlf.sh").write_bytes(b"#!/bin/sh\r\necho hi\r\n")
    (project / "lost.sh").write_bytes(b"#!/no/such/interpreter\necho hi\n")
    (project / "unmarked.py").write_bytes(b"print(1)\n")
    (project / "mark.sh").write_bytes(b"\xef\xbb\xbf#!/bin/sh\necho hi\n")
    for name in ("crlf.sh", "lost.sh", "unmarked.py", "mark.sh"):
        (project / name).chmod(0o755)
    for command, words in (
        ("./crlf.sh", "Windows line ends"),
        ("sh crlf.sh", "Windows line ends"),
        ("./lost.sh", "/no/such/interpreter"),
        ("pyton train.py", 'There is no program "pyton" on the PATH'),
        ("./plain.sh", "chmod +x ./plain.sh"),
        ("unmarked.py --lr 1", "--command './unmarked.py --lr 1'"),
        ("./unmarked.py", "--command 'python ./unmarked.py'"),
        ("./mark.sh", "byte order mark"),
    ):
        (project / "plain.sh").touch(mode=0o644)
        done = mlbench("run", "x", "1", "--command", command)
        assert (done.returncode, words in done.stderr) == (2, True), done.stderr


def test_variables_of_other_launchers_do_not_reach_the_ranks(project: Path) -> None:
    foreign = {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "x",
        "GROUP_RANK": "3",
        "ROLE_RANK": "3",
        "SLURM_PROCID": "7",
        "SLURM_NTASKS": "8",
        "SLURM_STEP_ID": "1",
        "PMI_RANK": "2",
        "PMIX_RANK": "2",
        "OMPI_COMM_WORLD_RANK": "5",
        "HOROVOD_RANK": "1",
        "HYDI_CONTROL_FD": "5",
        "PET_NNODES": "4",
        "TF_CONFIG": '{"cluster": {"worker": ["elsewhere:1"]}}',
        "RANK": "9",
        "WORLD_SIZE": "99",
        "MASTER_ADDR": "elsewhere",
    }
    kept = {"SLURM_JOB_ID": "77", "MY_VARIABLE": "1", "NCCL_DEBUG": "INFO", "HYDRA_FULL_ERROR": "1"}
    script = "import os, json; print('env', json.dumps(dict(os.environ)), 'port', '{master_port}')"
    done = mlbench("run", "x", "2", "--command", f'python -c "{script}"', **foreign, **kept)
    assert done.returncode == 0, done.stderr
    text = log_of("x-2").splitlines()[-1]
    found = json.loads(text.removeprefix("env ").rpartition(" port ")[0])
    assert (found["RANK"], found["WORLD_SIZE"], found["MASTER_ADDR"]) == ("0", "2", "127.0.0.1")
    assert text.rpartition(" port ")[2] == found["MASTER_PORT"]
    own = ("RANK", "WORLD_SIZE", "MASTER_ADDR")
    assert not [name for name in foreign if name in found and name not in own]
    assert kept.items() <= found.items()


def test_options_without_effect_are_refused(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "train.py").write_text("print('training')\n")
    for options, words in (
        (["--set", "lr=0.1"], "--set lr has no effect"),
        (["--light"], "--light has no effect"),
        (["--set", "run.detect=10s"], "--set run.detect has no effect"),
        (["--set", "run.budget=1h"], "run.budget works only with tasks"),
    ):
        assert run(["run", "x", "1", "--command", "python train.py", *options]) == 2
        assert words in capsys.readouterr().err


def test_settings_are_put_into_the_command_or_read_by_the_program(project: Path) -> None:
    done = mlbench("run", "a", "1", "--command", "echo lr={lr}", "--matrix", "set.lr=0.1,0.2")
    assert done.returncode == 0, done.stderr
    paths = Path(os.environ["MLBENCH_HOME"], "runs").glob("*/logs/rank-0.log")
    assert sorted(path.read_text().strip() for path in paths) == ["lr=0.1", "lr=0.2"]
    (project / "reads.py").write_text("import os\nprint(os.environ['MLBENCH_PARAMETERS'])\n")
    assert mlbench("run", "b", "1", "--command", "python reads.py", "--set", "lr=0.3").returncode == 0
    assert json.loads(log_of("b-1")) == {"lr": 0.3}


REPORTS = """
import sys
from mlbench import emit
import helper
emit("metric", name="accuracy", value=helper.VALUE)
"""


def test_two_versions_of_a_script_are_not_repeats_of_each_other(project: Path) -> None:
    (project / "train.py").write_text(REPORTS)
    (project / "helper.py").write_text("VALUE = 1\n")
    assert mlbench("run", "old", "1", "--repeat", "2", "--command", "python train.py").returncode == 0
    (project / "unrelated.py").write_text("VALUE = 3\n")
    assert mlbench("run", "same", "1", "--command", "python train.py").returncode == 0
    (project / "helper.py").write_text("VALUE = 2\n")  # only a module that the script imports
    assert mlbench("run", "new", "1", "--command", "python train.py").returncode == 0
    runs = {name: folder_of(name) for name in ("old-1-r1", "old-1-r2", "same-1", "new-1")}
    codes = {name: provenance_of(name)["command"] for name in runs}
    digests = [codes[name]["digest"] for name in runs]
    assert digests[0] == digests[1] == digests[2] != digests[3]
    assert codes["old-1-r1"]["files"] == ["helper.py", "train.py"]
    assert (runs["new-1"] / "code/helper.py").read_text() == "VALUE = 2\n"
    assert "code/train.py" in (runs["new-1"] / "SHA256SUMS").read_text()
    assert mlbench("verify", str(runs["new-1"])).returncode == 0
    done = mlbench("compare", "old-1-r1", "new-1")
    assert f"{digests[0][:16]}  {digests[3][:16]}" in done.stdout
    assert digests[0][:16] not in mlbench("compare", "old-1-r1", "same-1").stdout
    assert mlbench("report", "r.md", "old-1-r1", "old-1-r2", "new-1").returncode == 0
    report = (project / "r.md").read_text()
    assert digests[0][:16] in report
    assert digests[3][:16] in report


WAYS = [
    "./train",
    "python -m pack.deep.start",
    "bash -c 'cd pack && sh ../run.sh'",
    "env DEBUG=1 python src/first.py",
    "python -c 'import starts' settings.yaml",
    *("sh -c 'cd src && python first.py'", "env -C src python first.py", "python link.py", "python starts.py"),
    *("python -m pack.train", "python pack", f"python ../project/pack/ {'x' * 300}"),
    *("sh run.sh", "./run.sh --fast", "sh inside.sh", "cat train.ipynb"),
]


@pytest.mark.slow
@pytest.mark.parametrize("command", WAYS if NIGHTLY else WAYS[:4])
def test_code_is_known_however_a_command_reaches_it(
    command: str, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The change of one module that only other files lead to is another version of the program."""
    monkeypatch.setenv("PYTHONPATH", str(project / "src"))
    files = {
        "pack/__init__.py": "",
        "pack/__main__.py": "from deep import model\n",
        "pack/train.py": "from .deep.model import VALUE\n",
        "pack/deep/__init__.py": "",
        "pack/deep/start.py": "from .model import VALUE\n",
        "pack/deep/model.py": "from work import VALUE\n",
        "src/work.py": "VALUE = 1\n",
        "src/first.py": "import work\n",
        "run.sh": '#!/bin/sh\nset -e\nHERE=$(dirname "$0")\npython3 "$HERE/src/first.py" "$@" | cat  # as always\n',
        "inside.sh": "cd src\npython3 first.py&&true\n",
        "train": "#!/usr/bin/env -S python3 -u\nimport first\n",
        "train.ipynb": json.dumps({"cells": [{"cell_type": "code", "source": ["import os\n", "import first"]}]}),
    }
    for name, text in files.items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(text)
    (project / "run.sh").chmod(0o755)
    (project / "train").chmod(0o755)
    (project / "link.py").symlink_to("src/first.py")
    (project / "starts.py").write_text("import runpy\nrunpy.run_path('src/first.py')\n")
    digests = []
    for name, value in (("old", 1), ("same", 1), ("new", 2)):
        (project / "src/work.py").write_text(f"VALUE = {value}\n")
        done = mlbench("run", name, "1", "--command", command, "--share-machine", "--yes")
        assert done.returncode == 0, done.stderr
        code = provenance_of(f"{name}-1")["command"]
        assert "src/work.py" in code["files"]
        digests.append(code["digest"])
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize(
    "command",
    [
        "timeout 60 bash -ec 'python train.py | tee log'",
        "env A=1 python -c 'import train' --out log --env-file .env",
        "bash run.sh",
    ],
)
def test_what_a_command_writes_and_its_secrets_are_not_its_code(project: Path, command: str) -> None:
    """Otherwise the second run of a script would be of other code than the first, whose log is now there."""
    (project / "train.py").write_text("print(open('.env').read())\n")
    (project / ".env").write_text("TOKEN=secret\n")
    (project / "run.sh").write_text('source .env\nset -o pipefail\npython train.py 2>&1 | tee -a "log" > log2\n')
    for name in ("first", "second"):
        assert mlbench("run", name, "1", "--command", command).returncode == 0
        (project / "log").write_text(name)
    first, second = (provenance_of(f"{name}-1")["command"] for name in ("first", "second"))
    assert first["digest"] == second["digest"]
    assert second["files"] == ["run.sh"] * ("run.sh" in command) + ["train.py"]
    assert not [
        path for path in folder_of("second-1").glob("code/**/*") if path.is_file() and b"secret" in path.read_bytes()
    ]


def test_a_script_elsewhere_has_the_same_code_for_every_process(project: Path, tmp_path: Path) -> None:
    """With folders, since packages have files of equal names."""
    for name in ("a", "b", "c"):
        (tmp_path / "elsewhere" / name).mkdir(parents=True)
        (tmp_path / "elsewhere" / name / "__init__.py").write_text(f"NAME = '{name}'\n")
    (tmp_path / "elsewhere" / "train.py").write_text("import a, b, c\n")
    for seed in ("1", "2"):
        command = f"python {tmp_path}/elsewhere/train.py"
        assert mlbench("run", f"s{seed}", "1", "--command", command, PYTHONHASHSEED=seed).returncode == 0
    first, second = (provenance_of(f"s{seed}-1")["command"] for seed in ("1", "2"))
    assert first == second
    assert first["files"] == ["a/__init__.py", "b/__init__.py", "c/__init__.py", "train.py"]


def test_runs_of_unknown_code_are_repeats_only_within_their_experiment(project: Path) -> None:
    (project / "a.yaml").write_text("lr: 1\n")
    command = f"{sys.executable} -c pass a.yaml"  # only settings
    for name in ("one", "two"):
        assert mlbench("run", name, "1", "--repeat", "2", "--command", command).returncode == 0
    within = mlbench("compare", "one-1-r1", "one-1-r2")
    across = mlbench("compare", "one-1-r1", "two-1-r1")
    assert "digests of the code" not in within.stdout + within.stderr
    assert "names no file of its code" in across.stdout + across.stderr


def test_further_files_belong_to_the_code_and_travel(project: Path) -> None:
    (project / "train.py").write_text("print(open('settings.txt').read())\n")
    (project / "settings.txt").write_text("a\n")
    words = ("--command", "python train.py", "--include", "settings.txt")
    assert mlbench("run", "a", "1", *words).returncode == 0
    (project / "settings.txt").write_text("b\n")
    assert mlbench("run", "b", "1", *words).returncode == 0
    assert len({provenance_of(name)["command"]["digest"] for name in ("a-1", "b-1")}) == 2
    assert [(folder_of(name) / "code/settings.txt").read_text() for name in ("a-1", "b-1")] == ["a\n", "b\n"]
    assert mlbench("run", "c", "1", "--command", "python train.py", "--include", "lost.txt").returncode == 4


HANGS = """
import threading, time
def wait_for_the_others():
    threading.Event().wait()
wait_for_the_others()
"""


def test_the_stacks_of_a_run_that_hangs_are_shown(project: Path) -> None:
    (project / "hangs.py").write_text(HANGS)
    assert mlbench("run", "h", "2", "--detach", "--command", "sh -c 'python hangs.py; true'").returncode == 0
    shown = until(lambda: (said := mlbench("status", "h-2", "--stacks").stdout).count("in wait_for") == 2 and said)
    assert "Rank 0:" in shown
    assert "Rank 1:" in shown
    assert mlbench("cancel", "h-2").returncode == 0
    assert log_of("h-2").count("in wait_for_the_others") >= 1


def emitting(*records: str) -> str:
    start = '@mlbench {"v":1,"event":"metric","rank":0,"time":1700000000,"name":'
    return "".join(f"print('''{start}{record}}}''')\n" for record in records)


MILLISECONDS = """
import json, time
for name, value, moment in (("acc", 0.5, int(1000 * time.time())), ("loss", 0.25, time.time_ns())):
    event = {"v": 1, "event": "metric", "rank": 0, "time": moment, "name": name, "value": value}
    print("@mlbench " + json.dumps(event))
"""


def test_diverged_metrics_and_ignored_events_are_seen(project: Path) -> None:
    values = ('"loss","value":1.9', '"loss","value":NaN', '"only","value":Infinity', '"loss","value":"12 ms"')
    script = emitting(*values, '"text","value":"NaN"', '"low","value":"-Infinity"')
    (project / "report.py").write_text(script + "print('@mlbench {broken')\n")
    assert mlbench("run", "nan", "1", "--command", "python report.py").returncode == 0
    shown = json.loads(mlbench("status", "nan-1", "-o", "json").stdout)
    assert shown["metrics"] == {"loss": "nan", "only": "inf", "text": "nan", "low": "-inf"}
    assert "nan" in mlbench("status", "nan-1").stdout
    rows = (folder_of("nan-1") / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["value"] for row in rows] == [1.9, "nan", "inf", "nan", "-inf"]
    assert (
        '2 events of rank 0 were ignored. The first: the value of loss is "12 ms"'
        in findings_of("nan-1")["event_ignored"]
    )
    (project / "report.py").write_text(MILLISECONDS)
    assert mlbench("run", "ms", "1", "--command", "python report.py").returncode == 0
    assert json.loads(mlbench("status", "ms-1", "-o", "json").stdout)["metrics"] == {"acc": 0.5, "loss": 0.25}
    assert findings_of("ms-1") == {}
    result = '@mlbench {"v":1,"event":"result","rank":0,"time":1700000000,"outcome":"completed","wall_seconds":%g}'
    (project / "report.py").write_text("".join(f"print({result % seconds!r})\n" for seconds in (0.5, 0.0001)))
    assert mlbench("run", "two", "1", "--command", "python report.py").returncode == 0
    assert "a result that differs from the last one" in findings_of("two-1")["event_ignored"]
    (project / "report.py").write_text(f"print({result % -3.5!r})\n")
    assert mlbench("run", "back", "1", "--command", "python report.py").returncode == 0
    assert "wall_seconds of the result is -3.5" in findings_of("back-1")["event_ignored"]


MIXED = r"""
import os, time
start = '@mlbench {"v":1,"event":"metric","rank":%s,"time":%f,"name":' % (RANK, time.time())
print("\033[32m" + start + '"a","value":1}\033[0m')
print(start + '"b","value":2}\r 40%|####      | 2/5 [00:01<00:02]', start + '"c","value":3}' + start + '"d","value":4}')
print(start + '"flops","value":%d}' % 10**22)
"""
ARRAY = """
from types import SimpleNamespace
from mlbench import emit
emit("metric", name="share", value=SimpleNamespace(item=lambda: 0.5))  # as numpy's and torch's numbers
"""


def test_an_event_ends_where_its_object_ends_whatever_follows_it(project: Path) -> None:
    """Progress bars, colors and other processes write to the same line. torchrun may start further ranks."""
    (project / "report.py").write_text(MIXED.replace("RANK", "0") + ARRAY)
    assert mlbench("run", "mixed", "1", "--command", "python report.py").returncode == 0
    shown = json.loads(mlbench("status", "mixed-1", "-o", "json").stdout)
    assert shown["metrics"] == {"a": 1, "b": 2, "c": 3, "d": 4, "flops": 1e22, "share": 0.5}
    assert findings_of("mixed-1") == {}
    (project / "report.py").write_text(MIXED.replace("RANK", "2 * int(os.environ['RANK'])"))
    assert mlbench("run", "more", "2", "--command", "python report.py").returncode == 0
    assert findings_of("more-2") == {}
    assert mlbench("verify", "mixed-1", "more-2").returncode == 0


HISTORY = """
import json, time
end = time.time()
for name in ("loss", "accuracy"):
    for seconds in (4, 0, -4):
        event = {"v": 1, "event": "metric", "rank": 0, "time": end - seconds, "name": name, "value": seconds}
        print("@mlbench " + json.dumps(event))
"""


def test_a_history_may_be_reported_metric_by_metric_after_the_training(project: Path) -> None:
    (project / "train.py").write_text(HISTORY)
    assert mlbench("run", "keras", "1", "--command", "python train.py").returncode == 0
    assert findings_of("keras-1") == {}


def test_a_command_that_never_reports_the_metric_of_its_goal_says_so(project: Path) -> None:
    (project / "train.py").write_text(emitting('"accuracy","value":99'))
    done = mlbench("run", "open", "1", "--task", "digits_resnet", "--command", "python train.py")
    assert done.returncode == 0, done.stderr
    summary = findings_of("open-1")["goal_never_reported"]
    assert "never reported val_global_Prec@1" in summary
    assert "accuracy" in summary


@pytest.mark.slow
def test_a_preloaded_library_is_recorded_shown_and_kept_apart(project: Path) -> None:
    """Such a library may slow the clock that times are taken from."""
    if shutil.which("cc") is None:
        missing("needs a C compiler")
    (project / "nothing.c").write_text("int mlbench_test_nothing;\n")
    subprocess.run(["cc", "-shared", "-o", "nothing.so", "nothing.c"], check=True)
    (project / "train.py").write_text("print(1)\n")
    words = ("1", "--repeat", "3", "--command", "python train.py", "--share-machine", "--yes")
    assert mlbench("run", "plain", *words).returncode == 0
    done = mlbench("run", "loaded", *words, LD_PRELOAD=str(project / "nothing.so"))
    assert done.returncode == 0
    said = f"preloaded: LD_PRELOAD={project / 'nothing.so'} may replace clocks"
    assert said in done.stderr
    assert said in mlbench("status", "loaded-1-r1").stdout
    checked = mlbench("verify", "plain", "loaded").stdout
    assert checked.count("ok (integrity, derivation)") == 6
    assert checked.count(said) == 3
    compared = mlbench("compare", "plain-1", "loaded-1")
    assert "search paths of libraries and modules differ: none and LD_PRELOAD=" in compared.stdout
    assert "--across libraries" in compared.stderr
    assert "shared, preloaded." in compared.stderr  # the conditions of one side
    assert mlbench("delete", "plain-1-r3", "--yes").returncode == 0
    assert "plain-1: 2 of the 3 runs that were asked for are here" in mlbench("report", "r.md", "plain").stderr


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_a_wrong_interface_of_gloo_is_diagnosed(project: Path) -> None:
    words = ["run", "g", "2", "--task", "digits_resnet", "--preset", "tiny", "--yes"]
    done = mlbench(*words, GLOO_SOCKET_IFNAME="^lo,docker")
    assert done.returncode == 7
    assert 'no network interface "^lo", which GLOO_SOCKET_IFNAME names' in done.stderr


# Ranks that end themselves; by night also some that wait until the deadline.
UNREACHABLE = [(3, 7), (600, 124)]


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "code"), UNREACHABLE if NIGHTLY else UNREACHABLE[:1])
def test_ranks_that_cannot_reach_each_other_are_told_so(project: Path, seconds: int, code: int) -> None:
    """With the address that does not answer."""
    own = "import datetime, os, time\nif os.environ['RANK'] == '0': time.sleep(600)\n"  # without torch, which is slow
    own += "import torch.distributed as dist\nos.environ['MASTER_ADDR'] = '127.0.0.2'\n"
    # Nobody listens there: rank 0 is not told to serve the store.
    own += f"dist.TCPStore('127.0.0.2', 1, 2, False, datetime.timedelta(seconds={seconds}))\n"
    (project / "far.py").write_text(own)
    words = ("--share-machine", "--yes", "--timeout", "60s" if code == 124 else "250s")
    done = mlbench("run", "far", "2", *words, "--command", f"{sys.executable} far.py")
    assert done.returncode == code
    assert "cannot reach the other ranks at 127.0.0.2:1." in done.stderr
    assert "GLOO_SOCKET_IFNAME" in done.stderr


@pytest.mark.slow
def test_a_program_that_counts_its_ranks_itself_is_told_where_to_say_how_many(project: Path) -> None:
    program = "import os, time, torch.distributed as dist\nos.environ['WORLD_SIZE'] = '1'\n"
    (project / "one.py").write_text(program + "dist.init_process_group('gloo')\ntime.sleep(600)\n")
    done = mlbench("run", "one", "2", "--share-machine", "--yes", "--command", f"{sys.executable} one.py")
    assert done.returncode == 7
    assert "Rank 1 joined a world of 1 rank: its program counts processes itself" in done.stderr
    assert "num_nodes" in done.stderr


def test_ranks_that_join_no_process_group_are_told_to_train_separately(project: Path) -> None:
    """Also if each has one of its own, and behind a shell, a child or a loader that forks; not those that have left
    their group, or run no torch."""
    (project / "alone.py").write_text(
        "import torch\nprint(*torch.utils.data.DataLoader([1, 2], num_workers=1), end='')\n"
    )
    (project / "joined.py").write_text(
        "import os\nimport torch.distributed as dist\nrank = int(os.environ['RANK'])\n"
        "store = dist.TCPStore(os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']), 2, rank == 0)\n"
        "dist.init_process_group('gloo', store=store, rank=rank, world_size=2)\n"
        "dist.barrier()\ndist.destroy_process_group()\n"
    )
    (project / "parent.py").write_text("import torch, subprocess, sys\nsubprocess.run([sys.executable, 'joined.py'])\n")
    (project / "small.py").write_text(
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
    )
    (project / "left.py").write_text((project / "small.py").read_text() + "dist.destroy_process_group()\n")
    commands = {
        "alone": "sh -c 'PYTHON alone.py'",
        "small": "PYTHON small.py",
        "left": "PYTHON left.py",
        "parent": "PYTHON parent.py",
        "none": "PYTHON -c 'print(1)'",
    }
    commands["failed"] = "PYTHON -c 'import torch; exit(5)'"  # perhaps before it would have joined
    for name, command in commands.items():
        own = command.replace("PYTHON", sys.executable)
        done = mlbench("run", name, "2", "--share-machine", "--yes", "--command", own)
        assert done.returncode == (7 if name == "failed" else 0), done.stderr
        told = "so each of the 2 ranks trains separately"
        assert (told in done.stdout + done.stderr) == (name in ("alone", "small", "left"))
        assert ("trained_separately" in findings_of(f"{name}-2")) == (name in ("alone", "small", "left"))


@pytest.mark.slow
def test_ranks_that_wait_for_each_other_are_told_from_slow_ones(project: Path) -> None:
    """The deadline says that they hung, who left them, and where to look, not to wait longer."""
    (project / "hang.py").write_text("import os, time\nif os.environ['RANK'] == '0':\n    time.sleep(600)\n")
    done = mlbench("run", "idle", "2", "--command", "python hang.py", "--timeout", "50s", "--share-machine", "--yes")
    assert done.returncode == 124
    assert re.search(r"No rank had used CPU for [1-5]\d s", done.stdout + done.stderr)
    assert "for -" not in done.stdout + done.stderr
    assert "Rank 1 has already ended, with exit code 0." in done.stdout + done.stderr
    assert "longer --timeout" not in done.stdout + done.stderr
    assert 'hang.py", line 3' in log_of("idle-2")
