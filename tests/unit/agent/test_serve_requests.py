"""More of what a machine answers to a channel: facts, Pythons, programs, the processes of runs, and bad requests."""

import hashlib
import io
import os
import shutil
import socket
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlbench_cli.agent import processes, serve
from mlbench_cli.agent.serve import answer
from tests.fakes.clock import Clock


def ask(do: str, data: bytes = b"", **fields: Any) -> Any:
    """The document of an answer."""
    return answer({"do": do, **fields}, data)[0]


# --- facts ----------------------------------------------------------------------------------------------------------


def test_a_machine_says_what_a_client_must_know_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("SSH_CONNECTION", "192.0.2.1 5000 192.0.2.2 22")
    monkeypatch.setattr("mlbench_cli.agent.serve.time", SimpleNamespace(time=lambda: 5000.5))
    monkeypatch.setattr(serve, "interface_addresses", lambda: [("eth0", "192.0.2.2", "255.255.255.0")])
    asked: list[str] = []

    def disk_usage(path: str) -> Any:
        asked.append(path)
        return SimpleNamespace(free=700, total=900, used=200)

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    monkeypatch.setattr(os, "access", lambda path, mode: (path, mode) == (str(tmp_path), os.W_OK))
    assert ask("hello", base=str(tmp_path / "none/yet")) == {
        "home": "/home/me",
        "time": 5000.5,
        "free_bytes": 700,
        "writable": True,
        "addresses": [{"interface": "eth0", "address": "192.0.2.2", "mask": "255.255.255.0"}],
        "connection": "192.0.2.1 5000 192.0.2.2 22",
    }
    assert asked == [str(tmp_path)]  # of the nearest folder that is there
    monkeypatch.delenv("SSH_CONNECTION")
    assert ask("hello", base=str(tmp_path / "file"))["connection"] == ""


class Programs:
    """In place of programs: notes how they are run, and gives their ends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[Any] = []
        self.out, self.err, self.code = b"", b"", 0
        self.end: Exception | None = None
        monkeypatch.setattr(subprocess, "run", self.run)

    def run(self, words: list[str], **more: Any) -> Any:
        self.asked.append((words, more))
        if self.end is not None:
            raise self.end
        return SimpleNamespace(stdout=self.out, stderr=self.err, returncode=self.code)


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Programs:
    return Programs(monkeypatch)


def test_a_python_is_asked_for_its_version_and_its_torch(programs: Programs) -> None:
    programs.out = b'torch says hello\n{"python": "3.12.1", "torch": "2.9.0", "gpus": 8}\n\n'
    assert ask("probe", python="/opt/python") == {"python": "3.12.1", "torch": "2.9.0", "gpus": 8}
    ((words, more),) = programs.asked
    assert words[:2] == ["/opt/python", "-c"]
    assert (more["stdin"], more["timeout"], more["check"]) == (subprocess.DEVNULL, 120, False)


def test_a_python_is_asked_after_what_sets_it_up(programs: Programs) -> None:
    programs.out = b"{}"
    ask("probe", python="python3", setup="module load python")
    ((words, _),) = programs.asked
    assert words[:4] == ["bash", "-c", 'module load python\nexec "$@"', "setup"]
    assert words[4:6] == ["python3", "-c"]


@pytest.mark.parametrize(
    ("out", "err", "problem"),
    [
        (b"", b"", "py gives no answer"),
        (b"nonsense", b"", "py gives no answer"),
        (b"{}\nnonsense", b"a\n  \nlast \xff word\n\n", "last \ufffd word"),
    ],
)
def test_a_python_without_an_answer_is_refused(programs: Programs, out: bytes, err: bytes, problem: str) -> None:
    programs.out, programs.err = out, err
    assert ask("probe", python="py") == {"error": problem, "kind": "refused"}


def test_a_python_that_takes_too_long_has_no_answer(programs: Programs) -> None:
    programs.end = subprocess.TimeoutExpired("py", 120)
    assert ask("probe", python="py") == {"error": "no answer within 120 s", "kind": "timeout"}


def test_a_program_has_half_a_minute_unless_told_otherwise(programs: Programs) -> None:
    programs.out, programs.err, programs.code = b"\xff", b"e", 3
    assert ask("run", argv=["squeue", "-h"], stdin="words") == {"code": 3, "out": "\ufffd", "err": "e"}
    ask("run", argv=["squeue"], timeout=5.0)
    assert [(words, more["timeout"], more["input"]) for words, more in programs.asked] == [
        (["squeue", "-h"], 30.0, b"words"),
        (["squeue"], 5.0, b""),
    ]
    programs.end = subprocess.TimeoutExpired("squeue", 30.0)
    assert ask("run", argv=["squeue"]) == {"code": None, "out": "", "err": "no answer within 30 s"}
    programs.end = PermissionError(13, "Permission denied")
    assert ask("run", argv=["squeue"]) == {"code": 127, "out": "", "err": "squeue: Permission denied"}


def test_what_a_client_sets_outweighs_what_makes_answers_readable(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SINFO_FORMAT", "SACCT_FORMAT", "SCANCEL_VERBOSE", "SLURM_CONF", "XSLURM_"):
        monkeypatch.setenv(name, "users")
    ask("run", argv=["sinfo"], env={"LC_ALL": "de"})
    environment = programs.asked[0][1]["env"]
    assert (environment["LC_ALL"], environment["SLURM_CONF"], environment["XSLURM_"]) == ("de", "users", "users")
    assert not {"SINFO_FORMAT", "SACCT_FORMAT", "SCANCEL_VERBOSE"} & environment.keys()


# --- programs that stay ---------------------------------------------------------------------------------------------


def test_a_program_outlives_the_channel_and_writes_into_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []

    def start(words: list[str], **more: Any) -> Any:
        os.write(more["stdout"], b"more\n")
        started.append((words, more))
        return SimpleNamespace(pid=4711)

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(subprocess, "Popen", start)
    (tmp_path / "log").write_text("before\n")
    (tmp_path / "log").chmod(0o600)
    assert ask("spawn", argv=["~/bin/python", "~x", "a~/b"], log="~/log") == {"pid": 4711}
    ((words, more),) = started
    assert words == [f"{tmp_path}/bin/python", "~x", "a~/b"]
    assert (more["start_new_session"], more["cwd"], more["stdin"]) == (True, str(tmp_path), subprocess.DEVNULL)
    assert more["stdout"] == more["stderr"]
    assert (tmp_path / "log").read_text() == "before\nmore\n"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(more["stdout"])


def test_the_log_of_a_program_is_for_its_owner_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(words: list[str], **more: Any) -> Any:
        raise FileNotFoundError(2, "No such file or directory", "python9")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    found = ask("spawn", argv=["python9"], log=str(tmp_path / "log"), cwd=str(tmp_path))
    assert found == {"error": "No such file or directory: python9", "kind": "system", "errno": 2}
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600


# --- runs -----------------------------------------------------------------------------------------------------------


def test_all_processes_below_the_nodes_of_a_run_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def kill(folder: str, *, arguments: bool, seconds: float) -> tuple[list[int], list[int]]:
        asked.append((folder, arguments, seconds))
        return [11, 12], [12]

    monkeypatch.setattr(processes, "kill_processes", kill)
    assert ask("end_processes", folder=str(tmp_path)) == {"killed": [11, 12], "left": [12]}
    ask("end_processes", folder=str(tmp_path), patience=60.0)
    assert asked == [(f"{tmp_path}/nodes", True, 5.0), (f"{tmp_path}/nodes", True, 60.0)]


def test_agents_count_as_processes_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def find(folder: str, *, arguments: bool) -> list[int]:
        asked.append((folder, arguments))
        return [11]

    monkeypatch.setattr(processes, "find_processes", find)
    (tmp_path / "run.json").touch()
    assert ask("remove", folder=str(tmp_path))["kind"] == "refused"
    assert asked == [(f"{tmp_path}/nodes", True)]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run whose node 0 has a log."""
    (tmp_path / "nodes/0/.state").mkdir(parents=True)
    (tmp_path / "nodes/0/logs").mkdir()
    (tmp_path / "nodes/0/logs/rank-0.log").write_bytes(b"0123456789")
    return tmp_path


@pytest.mark.parametrize("alive", [True, None])
def test_a_node_that_lives_or_that_cannot_be_seen_is_read_once(
    run: Path, monkeypatch: pytest.MonkeyPatch, alive: bool | None
) -> None:
    monkeypatch.setattr(processes, "is_alive", lambda state: alive)
    (run / "nodes/0/.state/state.json").write_text('{"ended": null}')
    (run / "nodes/0/.state/results.json").write_text("{half")
    report = ask("sync", folder=str(run), nodes={"0": {}})["nodes"]["0"]
    assert report == {"state": {"ended": None}, "results": None, "alive": alive, "beat_age": None}


def test_an_answer_carries_eight_mebibytes_of_logs_at_most(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def read(path: str, offset: int, size: int) -> bytes:
        asked.append((path, offset, size))
        return b"abc"

    monkeypatch.setattr(serve, "read_piece", read)
    ask("sync", folder=str(run), nodes={"0": {"0": 5, "1": 0}})
    assert asked == [(f"{run}/nodes/0/logs/rank-{rank}.log", 5 * (1 - rank), (8 << 20) - 3 * rank) for rank in (0, 1)]


def test_a_log_beyond_its_end_or_not_there_gives_no_piece(run: Path) -> None:
    document, data = answer({"do": "sync", "folder": str(run), "nodes": {"0": {"0": 10, "7": 0}}}, b"")
    assert (document["pieces"], data) == ([], b"")


def test_the_clock_of_a_folder_that_cannot_be_written_is_this_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlbench_cli.agent.serve.time", SimpleNamespace(time=lambda: 5000.5))
    assert serve.file_system_time("/proc/none") == 5000.5


def test_a_file_may_come_while_it_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Late(Clock):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            if self.now > 100.5:
                (tmp_path / "note").write_text("it is here")

    clock = Late(100.0)
    monkeypatch.setattr("mlbench_cli.agent.serve.time", clock)
    assert ask("await_file", path=str(tmp_path / "note"), timeout=1.0) == {"text": "it is here"}
    assert clock.now < 100.6
    assert ask("await_file", path=str(tmp_path / "other"), timeout=1.0) == {"text": None}
    assert 101.0 < clock.now < 101.6


# --- locks ----------------------------------------------------------------------------------------------------------


def test_a_lock_is_waited_for_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(100.0)
    monkeypatch.setattr("mlbench_cli.agent.serve.time", clock)

    def refuse(descriptor: int, operation: int) -> None:
        raise BlockingIOError

    monkeypatch.setattr("mlbench_cli.agent.serve.fcntl.flock", refuse)
    path = str(tmp_path / "locks/a")
    assert ask("lock", path=path) == {"error": f"another client holds {path}", "kind": "refused"}
    assert 160.0 <= clock.now < 160.2
    assert (tmp_path / "locks").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "locks/a").stat().st_mode & 0o777 == 0o600
    assert path not in serve.LOCKS


# --- files ----------------------------------------------------------------------------------------------------------


def test_a_piece_is_a_mebibyte_from_the_start_unless_told_otherwise(tmp_path: Path) -> None:
    content = bytes(range(256)) * 8192
    (tmp_path / "file").write_bytes(content)
    document, data = answer({"do": "get", "path": str(tmp_path / "file")}, b"")
    assert (document, data) == ({"size": 2 << 20}, content[: 1 << 20])


@pytest.mark.parametrize(("durable", "syncs"), [(None, 1), (True, 1), (False, 0)])
def test_a_file_survives_a_crash_unless_that_is_not_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool | None, syncs: int
) -> None:
    called: list[int] = []
    monkeypatch.setattr(os, "fsync", called.append)
    ask("put", b"1", path=str(tmp_path / "file"), **({} if durable is None else {"durable": durable}))
    assert len(called) == syncs


def test_a_file_that_cannot_take_its_place_leaves_no_part(tmp_path: Path) -> None:
    (tmp_path / "place").mkdir()
    found = ask("put", b"1", path=str(tmp_path / "place"))
    assert (found["kind"], os.listdir(tmp_path)) == ("system", ["place"])


def test_code_is_for_its_owner_only_and_leaves_no_part(tmp_path: Path) -> None:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("module"))
    sha256 = hashlib.sha256(sink.getvalue()).hexdigest()
    assert ask("install", sink.getvalue(), folder=str(tmp_path), sha256=sha256)["installed"] is True
    assert os.listdir(tmp_path) == [sha256]
    assert (tmp_path / sha256).stat().st_mode & 0o777 == 0o700


# --- ports ----------------------------------------------------------------------------------------------------------


def test_an_address_is_tried_for_five_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def connect(address: tuple[str, int], timeout: float) -> Any:
        asked.append((address, timeout))
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", connect)
    assert ask("connect", address="192.0.2.9", port=4711) == {"reached": False, "problem": "timed out"}
    ask("connect", address="192.0.2.9", port=4711, patience=1.0)
    assert asked == [(("192.0.2.9", 4711), 5.0), (("192.0.2.9", 4711), 1.0)]


# --- requests -------------------------------------------------------------------------------------------------------


def raiser(error: Exception) -> Callable[..., Any]:
    def fail(**_: Any) -> Any:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "document"),
    [
        (OSError(28, "No space left on device"), {"error": "No space left on device", "errno": 28}),
        (OSError(13, "Permission denied", "/x"), {"error": "Permission denied: /x", "errno": 13}),
        (OSError("without a number"), {"error": "without a number", "errno": None}),
    ],
)
def test_an_error_of_the_system_is_told_with_its_number(
    monkeypatch: pytest.MonkeyPatch, error: Exception, document: dict[str, Any]
) -> None:
    monkeypatch.setitem(serve.DO, "listen", raiser(error))
    assert ask("listen") == {**document, "kind": "system"}


def test_a_sequence_that_is_empty_is_done(tmp_path: Path) -> None:
    assert ask("sequence", requests=[]) == {"answers": []}


@pytest.mark.parametrize(("text", "line"), [(b"", ""), (b"\n \n", ""), (b"a\nb\n\n", "b"), (b"  a  ", "a")])
def test_the_last_line_is_the_last_that_says_something(text: bytes, line: str) -> None:
    assert serve.last_line(text) == line


def test_paths_are_absolute_and_may_begin_with_the_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert [serve.expand(path) for path in ("~", "~/a/../b", "/x/")] == ["/home/me", "/home/me/b", "/x"]
    assert serve.expand("a") == f"{os.getcwd()}/a"
    assert serve.nodes_of("~/run") == "/home/me/run/nodes"


def test_folders_and_files_that_cannot_be_read_are_empty(tmp_path: Path) -> None:
    (tmp_path / "b").touch()
    (tmp_path / "a").write_bytes(b"\xff\n")
    assert serve.list_folder(str(tmp_path)) == ["a", "b"]
    assert serve.list_folder(str(tmp_path / "none")) == []
    assert (serve.read_text(str(tmp_path / "a")), serve.read_text(str(tmp_path / "none"))) == ("\ufffd\n", "")
    assert (serve.read_json(str(tmp_path / "a")), serve.read_json(str(tmp_path))) == (None, None)


def test_the_probe_is_a_program(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs under Pythons that have no torch, too."""
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(sys, "path", ["", "/somewhere"])
    exec(compile(serve.PROBE, "probe", "exec"), {})
    assert sys.path == ["/somewhere"]
    version = sys.version.split()[0]
    assert capsys.readouterr().out == f'{{"python": "{version}", "torch": null, "gpus": 0}}\n'
    cuda = SimpleNamespace(device_count=lambda: 2)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__version__="2.9.0", cuda=cuda))
    exec(compile(serve.PROBE, "probe", "exec"), {})
    assert capsys.readouterr().out == f'{{"python": "{version}", "torch": "2.9.0", "gpus": 2}}\n'
