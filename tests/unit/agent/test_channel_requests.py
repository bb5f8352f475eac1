"""What a channel writes to the process at its other end, and what it makes of the answers, without a process."""

import contextlib
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from mlbench_cli.agent import channel
from mlbench_cli.agent.channel import BOOT, Channel, ChannelRequest, RemoteError, Target, check_login, explain_failure
from mlbench_cli.agent.serve import MARKER
from mlbench_cli.errors import CredentialError, UnreachableError, UsageError


class Process:
    """In place of the other end: `replies` are there to be read from the start, and `read` is what it was told."""

    def __init__(self, replies: bytes, *, is_over: bool) -> None:
        told, stdin = os.pipe()
        stdout, writer = os.pipe()
        os.set_blocking(told, False)
        self.stdin, self.stdout = os.fdopen(stdin, "wb", buffering=0), os.fdopen(stdout, "rb", buffering=0)
        self._told, self._writer = told, writer
        os.write(writer, replies)
        if is_over:
            self.end()
        self.code: int | None = None
        self.is_stubborn = False
        self.signals: list[str] = []

    def end(self) -> None:
        if self._writer >= 0:
            os.close(self._writer)
        self._writer = -1

    def read(self) -> bytes:
        data = b""
        with contextlib.suppress(BlockingIOError):
            while piece := os.read(self._told, 1 << 16):
                data += piece
        return data

    def poll(self) -> int | None:
        return self.code

    def wait(self, timeout: float | None = None) -> int:
        if self.is_stubborn and timeout is not None:
            raise subprocess.TimeoutExpired("ssh", timeout)
        return self.code or 0

    def kill(self) -> None:
        self.signals.append("kill")

    def close(self) -> None:
        self.end()
        os.close(self._told)
        for stream in (self.stdin, self.stdout):
            stream.close()


def reply(document: object, data: bytes = b"") -> bytes:
    text = json.dumps(document).encode()
    return b"%d %d\n" % (len(text), len(data)) + text + data


class Lab:
    """Channels whose processes give these replies, one list for each connection."""

    def __init__(self) -> None:
        self.processes: list[Process] = []
        self.started: list[Any] = []
        self.replies: list[bytes] = []
        self.errors = b""
        self.is_over = True
        self.code: int | None = None

    def start(self, words: list[str], **more: Any) -> Process:
        self.started.append((words, more))
        os.write(more["stderr"].fileno(), self.errors)
        process = Process(self.replies[len(self.processes)], is_over=self.is_over)
        process.code = self.code
        self.processes.append(process)
        return process


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    made = Lab()
    monkeypatch.setattr(subprocess, "Popen", made.start)
    monkeypatch.setattr(shutil, "which", lambda command: f"/bin/{command}")
    monkeypatch.setattr(channel, "pack_server", lambda: b"SOURCE")
    yield made
    for process in made.processes:
        process.close()


# --- requests -------------------------------------------------------------------------------------------------------


def test_a_request_follows_the_program_that_answers_it(lab: Lab) -> None:
    lab.replies = [b"Welcome!\n" + MARKER + reply({"size": 4}, b"data")]
    found = Channel(Target("me@m1"))
    assert found.exchange("get", b"123", path="~/x", size=4) == ({"size": 4}, b"data")
    request = b'{"do": "get", "path": "~/x", "size": 4}'
    assert lab.processes[0].read() == b"6\nSOURCE" + b"%d 3\n" % len(request) + request + b"123"
    ((words, more),) = lab.started
    assert words == Target("me@m1").command()
    assert (more["stdin"], more["stdout"], more["start_new_session"]) == (subprocess.PIPE, subprocess.PIPE, True)


def test_one_connection_serves_all_requests(lab: Lab) -> None:
    lab.replies = [MARKER + reply({"a": 1}) + reply({"b": 2}, b"x\ny")]
    found = Channel(Target(None))
    assert found.call("first") == {"a": 1}
    assert found.exchange("second") == ({"b": 2}, b"x\ny")
    assert len(lab.started) == 1


def test_a_lost_connection_is_made_again_by_the_next_request(lab: Lab) -> None:
    lab.replies = [MARKER + reply({"a": 1}), MARKER + reply({"b": 2})]
    found = Channel(Target(None))
    found.call("first")
    lab.processes[0].code = 255
    assert found.call("second") == {"b": 2}
    assert len(lab.started) == 2


def test_requests_in_sequence_go_as_one_with_their_data_in_order(lab: Lab) -> None:
    lab.replies = [MARKER + reply({"answers": [{"written": True}, {"written": False}]})]
    requests = [ChannelRequest("put", {"path": "a"}, b"12"), ChannelRequest("put", {"path": "b", "new": True}, b"345")]
    found = Channel(Target(None)).call_in_sequence(requests)
    assert found == [{"written": True}, {"written": False}]
    _, _, told = lab.processes[0].read().partition(b"SOURCE")
    sizes, _, rest = told.partition(b"\n")
    text, data = (int(size) for size in sizes.split())
    assert json.loads(rest[:text]) == {
        "do": "sequence",
        "requests": [{"do": "put", "size": 2, "path": "a"}, {"do": "put", "size": 3, "path": "b", "new": True}],
    }
    assert (data, rest[text:]) == (5, b"12345")


@pytest.mark.parametrize(
    ("login", "message"), [("me@m1", "me@m1: it is there already."), (None, "this machine: it is there already.")]
)
def test_a_request_that_a_machine_refuses_is_an_error_and_the_connection_stays(
    lab: Lab, login: str | None, message: str
) -> None:
    lab.replies = [MARKER + reply({"error": "it is there already", "kind": "refused"}) + reply({})]
    found = Channel(Target(login))
    with pytest.raises(RemoteError) as caught:
        found.call("put")
    assert (caught.value.message, caught.value.text, caught.value.kind) == (message, "it is there already", "refused")
    assert found.call("get") == {}
    assert len(lab.started) == 1


def test_the_last_answer_of_a_sequence_may_be_its_error(lab: Lab) -> None:
    lab.replies = [MARKER + reply({"answers": [{}, {"error": "No space left on device", "kind": "system"}]})]
    with pytest.raises(RemoteError) as caught:
        Channel(Target(None)).call_in_sequence([ChannelRequest("put", {})] * 3)
    assert caught.value.kind == "system"


# --- no answer ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "replies", [b"", b"Welcome!\n", MARKER, MARKER + b"10 0", MARKER + b"10 0\n{}", MARKER + b"2 5\n{}ab"]
)
def test_a_connection_that_ends_in_the_middle_is_no_answer(lab: Lab, replies: bytes) -> None:
    lab.replies = [replies, MARKER + reply({"a": 1})]
    found = Channel(Target("m1"))
    with pytest.raises(UnreachableError) as caught:
        found.call("get")
    assert caught.value.message == "m1 does not answer: the connection was closed"
    assert caught.value.hint == "Try: ssh m1 true"
    assert found.call("get") == {"a": 1}  # over another connection


def test_an_answer_that_does_not_come_in_time_ends_the_connection(lab: Lab) -> None:
    lab.replies, lab.is_over = [MARKER + b"10 0\n{}"], False
    found = Channel(Target("m1"))
    with pytest.raises(UnreachableError) as caught:
        found.call("get", seconds=0.02)
    assert caught.value.message == "m1 does not answer: no answer in time"
    assert lab.processes[0].stdin.closed


def test_a_machine_that_takes_no_more_data_does_not_answer(lab: Lab) -> None:
    lab.replies, lab.is_over = [MARKER], False
    with pytest.raises(UnreachableError, match="no answer"):
        Channel(Target("m1")).call("put", bytes(1 << 20), seconds=0.05)


def test_what_the_other_end_wrote_last_is_the_reason(lab: Lab) -> None:
    lab.replies, lab.code, lab.errors = [b""], 255, b"first\nPermission denied (publickey).\n"
    with pytest.raises(CredentialError) as caught:
        Channel(Target("m1")).call("get")
    assert caught.value.message == "m1 refuses the login: Permission denied (publickey)."
    assert caught.value.hint == "mlbench does not ask for passwords; try: ssh m1 true"


def test_a_program_that_is_missing_here_is_named(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda command: None)
    with pytest.raises(UsageError) as caught:
        Channel(Target("m1")).call("get")
    assert caught.value.message == "ssh is not on the path of this machine."
    assert (caught.value.hint, lab.started) == ("Install it, or use --python.", [])


# --- the end --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("is_stubborn", "signals"), [(False, []), (True, ["kill"])])
def test_a_channel_that_is_closed_ends_its_process(lab: Lab, is_stubborn: bool, signals: list[str]) -> None:
    lab.replies = [MARKER + reply({}) + b"left over", MARKER + reply({"a": 1})]
    found = Channel(Target("m1"))
    found.close()  # nothing is open yet
    found.call("get")
    lab.processes[0].is_stubborn = is_stubborn
    errors = found._errors
    channel.close_all([found])
    assert errors is not None
    assert errors.closed
    assert (lab.processes[0].stdin.closed, lab.processes[0].stdout.closed) == (True, True)
    assert lab.processes[0].signals == signals
    assert found.call("get") == {"a": 1}


# --- machines -------------------------------------------------------------------------------------------------------


def test_this_machine_needs_no_ssh() -> None:
    assert Target(None, "/opt/python").command() == ["/opt/python", "-I", "-S", "-u", "-c", BOOT]
    assert (Target(None).name, Target("m1").name, Target("m1").python) == ("this machine", "m1", "python3")


def test_ssh_asks_nothing_notices_silence_and_forwards_nothing() -> None:
    """The options by their names in ssh_config(5)."""
    words = Target("me@m1", "/a b/python").command()
    assert words[0] == "ssh"
    options = dict(word.split("=", 1) for option, word in itertools.pairwise(words) if option == "-o")
    assert options == {
        "BatchMode": "yes",
        "StrictHostKeyChecking": "yes",
        "ConnectTimeout": "10",
        "ServerAliveInterval": "5",
        "ServerAliveCountMax": "3",
        "LogLevel": "ERROR",
        "ForwardAgent": "no",
        "ForwardX11": "no",
        "RequestTTY": "no",
    }
    assert words[-4:-1] == ["-T", "--", "me@m1"]
    assert words[-1].startswith("exec '/a b/python' -I -S -u -c ")


def test_the_program_for_the_other_end_loads_modules_after_those_that_they_import() -> None:
    channel.pack_server.cache_clear()
    lines = channel.pack_server().decode().splitlines()
    names = [line.split("'")[1] for line in lines if line.startswith("load('")]
    assert names == [
        "mlbench_cli",
        "mlbench_cli.util",
        "mlbench_cli.agent",
        "mlbench_cli.util.files",
        "mlbench_cli.agent.processes",
        "mlbench_cli.agent.interfaces",
        "mlbench_cli.agent.serve",
    ]
    assert lines[-1] == "module.serve(sys.stdin.buffer, sys.stdout.buffer)"


def test_a_login_that_is_none_is_quoted_in_part() -> None:
    with pytest.raises(UsageError) as caught:
        check_login("a b" * 50)
    assert caught.value.message == f'"{("a b" * 50)[:80]}" is not a host: write HOST or USER@HOST.'


@pytest.mark.parametrize(
    ("text", "code", "hint"),
    [
        (
            "Host key verification failed.",
            255,
            "Compare the key with the machine's owner; then ssh m1 true asks whether to accept it.",
        ),
        (
            "IDENTIFICATION HAS CHANGED",
            1,
            "Compare the key with the machine's owner; then ssh m1 true asks whether to accept it.",
        ),
        ("python9: not found", 127, "Name a Python 3.10 or later there: --python"),
        ("python9: not executable", 126, "Name a Python 3.10 or later there: --python"),
        ("python9: not found", 125, "Try: ssh m1 true"),
        ("Permission denied", 1, "Try: ssh m1 true"),
        ("", 128, "Try: ssh m1 true"),
    ],
)
def test_each_failure_says_what_to_do(text: str, code: int, hint: str) -> None:
    assert explain_failure(Target("m1"), "no answer", code, text).hint == hint


def test_this_machine_is_not_reached_by_ssh_but_by_its_python() -> None:
    error = explain_failure(Target(None, "/opt/python"), "the connection was closed", None, "")
    assert error.message == "this machine does not answer: the connection was closed"
    assert error.hint == "Try: /opt/python --version"
