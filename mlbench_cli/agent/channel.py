"""A channel to one machine: a child process here or behind ssh that answers the requests of `serve`.

OpenSSH itself makes the connection, with the user's own configuration. Host keys are always checked, nothing is ever
asked, and no argument of a request appears on a command line.
"""

import contextlib
import math
import os
import random
import re
import selectors
import shlex
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any

import mlbench_cli
from mlbench_cli.agent import wire
from mlbench_cli.agent.serve import MARKER
from mlbench_cli.errors import CredentialError, MlbenchError, RemoteError, UnreachableError, UsageError

CONNECT_SECONDS = 10
DROPPED_SECONDS = 20.0  # in which a connection is tried again that a server has dropped
ASK_SECONDS = 3.0  # in which ssh says which options it knows
CALL_SECONDS = 40.0
BLOCK = 1 << 20
MAX_GREETING = 1 << 20  # bytes that a login may print before our program answers
MAX_ANSWER_LINE, MAX_ANSWER = 1 << 26, 1 << 34
# How much is asked for at once: half as much after a connection was lost, twice as much after an answer has come.
LEAST_PIECE, LARGEST_PIECE = 1 << 16, 8 << 20
SSH_OPTIONS = (
    *("-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes", "-o", f"ConnectTimeout={CONNECT_SECONDS}"),
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3", "-o", "LogLevel=ERROR"),
    *("-o", "ForwardAgent=no", "-o", "ForwardX11=no", "-o", "RequestTTY=no"),
    # What a person's configuration has for sessions of their own, as scp and sftp switch it off.
    *("-o", "RemoteCommand=none", "-o", "ClearAllForwardings=yes", "-o", "PermitLocalCommand=no"),
)
# The same for what came with OpenSSH 8.7, which older ones reject.
NEWER_SSH_OPTIONS = ("-o", "SessionType=default", "-o", "StdinNull=no", "-o", "ForkAfterAuthentication=no")
# Read by whatever Python is there: an older one ends as a shell does that cannot run a program.
BOOT = (
    "import sys; sys.version_info < (3, 9) and "
    "(sys.stderr.write('it is Python %d.%d' % sys.version_info[:2]), sys.exit(126)); b = sys.stdin.buffer; "
    "exec(compile(b.read(int(b.readline())), 'mlbench-serve', 'exec'), {'__name__': '__main__'})"
)
SERVER_PACKAGES = ("mlbench_cli", "mlbench_cli.util", "mlbench_cli.agent")
SERVER_MODULES = (  # each after those that it imports
    *("mlbench_cli.util.files", "mlbench_cli.agent.processes", "mlbench_cli.agent.wire"),
    *("mlbench_cli.agent.interfaces", "mlbench_cli.agent.serve"),
)
# Lines of ssh that only follow from what it has said before, e.g. why a ProxyJump has failed.
CONSEQUENCES = re.compile(
    r"kex_exchange_identification: |Connection (?:closed|reset) by |Disconnected from |percent_expand: |"
    r"stdio forwarding failed|.*: terminating, \d"
)
# Why ssh itself ends (ssh.c, readconf.c, sshconnect2.c of OpenSSH): its configuration, or the server's refusal.
BAD_CONFIGURATION = re.compile(
    r"line \d+: (?:bad|missing|no argument|keyword|invalid|unsupported|empty) ?|bad owner or permissions on|"
    r"can't open user config file|controlpath too long|too long for unix domain socket|percent_expand: unknown key"
)
REFUSED_LOGIN = re.compile(
    r"permission denied|too many authentication failures|no more authentication methods|"
    r"no supported authentication methods|(?:password|account) has expired|access denied"
)
# Why ssh did not use a key, in a line before the refusal.
UNUSED_KEY = re.compile(r"^(?:Load key .*|sign_and_send_pubkey: .*)", re.MULTILINE)
CHANGED_KEY = re.compile(r"^Offending .*key in (\S+):(\d+)", re.MULTILINE)
LOADER = """import sys, types
def load(name, text):
    global module
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = []
    exec(compile(text, name, "exec"), vars(module))
"""
Document = Mapping[str, Any]


class _Dropped(UnreachableError):
    """A server has closed a connection before it said its version, as a jump host does at random while more logins
    begin than its MaxStartups (sshd_config(5): from 10 on)."""


@dataclass(frozen=True)
class Target:
    """A machine as ssh knows it; `login` None is this machine. `python` runs there."""

    login: str | None
    python: str = "python3"
    ssh_config: str | None = None

    @property
    def name(self) -> str:
        """The login, or "this machine"."""
        return self.login or "this machine"

    def trial(self) -> str:
        """A command by which a person can try the connection."""
        config = f"-F {shlex.quote(self.ssh_config)} " if self.ssh_config else ""
        return f"ssh {config}{self.login} true" if self.login else f"{self.python} --version"

    def command(self) -> list[str]:
        """The words that start the other end of a channel, through ssh unless it is this machine."""
        words = [self.python, "-I", "-S", "-u", "-c", BOOT]
        if self.login is None:
            return words
        config = ["-F", self.ssh_config] if self.ssh_config else []
        return ["ssh", *config, *_options_of(shutil.which("ssh")), "-T", "--", self.login, "exec " + shlex.join(words)]


@cache
def _options_of(ssh: str | None) -> tuple[str, ...]:
    """The options of a connection that this program knows."""
    silent: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    try:
        knows = subprocess.run([ssh or "ssh", *NEWER_SSH_OPTIONS, "-V"], timeout=ASK_SECONDS, **silent).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        knows = False
    return (*SSH_OPTIONS, *NEWER_SSH_OPTIONS) if knows else SSH_OPTIONS


@cache
def pack_server() -> bytes:
    """One program of `serve` and the modules that it imports, which the other end need not have."""
    root = Path(mlbench_cli.__file__).parents[1]
    texts = {name: (root / f"{name.replace('.', '/')}.py").read_text("utf-8") for name in SERVER_MODULES}
    lines = [f"load({name!r}, {text!r})" for name, text in {**dict.fromkeys(SERVER_PACKAGES, ""), **texts}.items()]
    return "\n".join([LOADER, *lines, "module.serve(sys.stdin.buffer, sys.stdout.buffer)"]).encode()


def check_login(login: str) -> str:
    """`login` as [USER@]HOST. Raises UsageError for what ssh could take for an option, or a shell for a command."""
    if not login or login.startswith("-") or not all(letter.isalnum() or letter in "@._-:[]%" for letter in login):
        raise UsageError(f'"{login[:80]}" is not a host: write HOST or USER@HOST.')
    return login


@dataclass(frozen=True)
class ChannelRequest:
    """One request of `serve`: its name, arguments and data."""

    do: str
    arguments: Mapping[str, object]
    data: bytes = b""


class Channel:
    """Requests to one machine, one at a time. It connects when it is first used, and again after a lost connection.

    `piece` is how many bytes of a file to ask for at once: connections that are cut again and again (by a proxy, or a
    load balancer) let smaller answers through.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._greeting: bytearray | None = None  # what is printed there until our program answers
        self._lock = threading.RLock()
        self._decoder = wire.Decoder(MAX_ANSWER_LINE, MAX_ANSWER)
        self.piece = LARGEST_PIECE

    def call(self, do: str, data: bytes = b"", *, seconds: float = CALL_SECONDS, **arguments: Any) -> Document:
        """The answer's document. Raises UnreachableError or CredentialError without a connection, RemoteError."""
        return self.exchange(do, data, seconds=seconds, **arguments)[0]

    def call_in_sequence(self, requests: Sequence[ChannelRequest], *, seconds: float = CALL_SECONDS) -> list[Document]:
        """The answers of requests that are done one after the other in one exchange; errors as `call`.

        A request that fails keeps those after it from being done.
        """
        documents = [{"do": item.do, "size": len(item.data), **item.arguments} for item in requests]
        data = b"".join(item.data for item in requests)
        answers: list[Document] = self.call("sequence", data, seconds=seconds, requests=documents)["answers"]
        self._raise_error(answers[-1])
        return answers

    def exchange(
        self,
        do: str,
        data: bytes = b"",
        *,
        seconds: float = CALL_SECONDS,
        quiet_seconds: float = math.inf,
        **arguments: Any,
    ) -> tuple[Document, bytes]:
        """The answer's document and its data; errors as `call`. A request is not repeated after a lost connection.

        `seconds` for all of it, and `quiet_seconds` until the next bytes of the answer.
        """
        request = wire.encode({"do": do, **arguments}, data)
        with self._lock:
            end = time.monotonic() + seconds
            try:
                self._connect(end)
                self._send(request, end)
                document, received = self._read_answer(end, quiet_seconds)
            except BaseException as error:
                self.close()
                if isinstance(error, UnreachableError):
                    self.piece = max(LEAST_PIECE, self.piece // 2)
                raise
            if received:
                self.piece = min(LARGEST_PIECE, self.piece * 2)
        self._raise_error(document)
        return document, received

    def _read_answer(self, end: float, quiet_seconds: float) -> tuple[Document, bytes]:
        """One answer of `serve`. Raises UnreachableError for anything else."""
        try:
            while (found := self._decoder.take()) is None:
                self._decoder.feed(self._receive(min(end, time.monotonic() + quiet_seconds)))
        except ValueError as error:
            raise UnreachableError(
                f"{self.target.name} does not answer as mlbench's program does: {error}.",
                hint=f"Something there prints into the connection; try: {self.target.trial()}",
            ) from None
        return found

    def _raise_error(self, document: Document) -> None:
        if "error" in document:
            raise RemoteError(self.target.name, str(document["error"]), str(document.get("kind")))

    def close(self) -> None:
        """End the process at the other end. A later request connects again."""
        with self._lock:
            process, self._process = self._process, None
            if process is None:
                return
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()
            try:
                process.wait(timeout=0.5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if self._errors is not None:
                self._errors.close()

    def _connect(self, end: float) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        until = min(end, time.monotonic() + DROPPED_SECONDS)
        while True:
            self.close()
            try:
                self._start(end)
                break
            except _Dropped:
                if time.monotonic() >= until:
                    raise
            time.sleep(random.uniform(0.2, 1.0))

    def _start(self, end: float) -> None:
        words = self.target.command()
        if shutil.which(words[0]) is None:
            raise UsageError(f"{words[0]} is not on the path of this machine.", hint="Install it, or use --python.")
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the channel)
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, start_new_session=True
        )
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        self._start_server(end)

    def _start_server(self, end: float) -> None:
        """Give the program that answers to the one that waits for it at the other end (`BOOT`)."""
        source = pack_server()
        self._greeting = said = bytearray()
        self._send(b"%d\n" % len(source) + source, end)
        while (place := said.find(MARKER)) < 0:
            if len(said) > MAX_GREETING:
                raise self._problem(f"it prints without end: {bytes(said[:40])!r}")
            said += self._receive(end)
        self._decoder = wire.Decoder(MAX_ANSWER_LINE, MAX_ANSWER)
        self._decoder.feed(bytes(said[place + len(MARKER) :]))
        self._greeting = None

    def _send(self, data: bytes, end: float) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        descriptor, view = self._process.stdin.fileno(), memoryview(data)
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_WRITE)
            while view:
                if not selector.select(max(0.0, end - time.monotonic())):
                    raise self._problem("no answer")
                try:
                    view = view[os.write(descriptor, view[:BLOCK]) :]
                except BlockingIOError:
                    continue
                except BrokenPipeError:
                    raise self._problem("the connection was closed") from None

    def _receive(self, end: float) -> bytes:
        """The next bytes that come; errors as `call`."""
        assert self._process is not None
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            if time.monotonic() >= end or not selector.select(max(0.0, end - time.monotonic())):
                raise self._problem("no answer in time")
        piece = os.read(descriptor, BLOCK)
        if not piece:
            raise self._problem("the connection was closed")
        return piece

    def _problem(self, what: str) -> MlbenchError:
        """The error that explains why nothing comes, from what ssh or Python has written."""
        code, text = None, ""
        if self._process is not None:
            try:
                code = self._process.wait(timeout=0.5)
            except subprocess.TimeoutExpired:
                code = None
        if self._errors is not None and not self._errors.closed:
            self._errors.seek(0)
            text = self._errors.read().decode("utf-8", "replace")
        # Some shells print on standard output why they let nobody in.
        if not text.strip() and code is not None and self._greeting is not None:
            assert self._process is not None
            assert self._process.stdout is not None
            os.set_blocking(self._process.stdout.fileno(), False)
            with contextlib.suppress(BlockingIOError):
                self._greeting += os.read(self._process.stdout.fileno(), BLOCK)
            text = self._greeting.decode("utf-8", "replace")
        return explain_failure(self.target, what, code, text)


def explain_failure(target: Target, what: str, code: int | None, text: str) -> MlbenchError:
    """The error for a connection that failed with this exit code and error text. Pure."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not set(line.strip()) <= {"@"}]
    last = next((line for line in reversed(lines) if not CONSEQUENCES.match(line)), (lines or [what])[-1])
    lowered = text.lower()
    ssh = target.trial()
    if BAD_CONFIGURATION.search(lowered) and code == 255:
        return UsageError(f"ssh does not accept its configuration: {last}", hint=f"Try: {ssh}")
    if "host key verification failed" in lowered or "identification has changed" in lowered:
        compare = f"{ssh}   (compare the key that it shows with the machine's owner, then answer yes)"
        if "identification has changed" in lowered:
            place = CHANGED_KEY.search(text)
            forget = f"sed -i {place[2]}d {place[1]}" if place else f"ssh-keygen -R {target.name}"
            return CredentialError(
                f"The host key of {target.name} has changed: {last}",
                hint=f"Ask the machine's owner. If the change is expected: {forget}, then {compare}",
            )
        known = (
            "is unknown on this machine" if "no " in lowered and "host key is known" in lowered else "was not accepted"
        )
        return CredentialError(
            f"The host key of {target.name} {known}: {last}",
            hint=f"{compare}. If your configuration keeps no keys (UserKnownHostsFile /dev/null), name a file: "
            "ssh-keyscan HOST >> FILE",
        )
    if REFUSED_LOGIN.search(lowered) and code == 255:
        unused = UNUSED_KEY.search(text)
        return CredentialError(
            f"{target.name} refuses the login: {last}{f' ({unused[0].strip()})' if unused else ''}",
            hint=f"mlbench does not ask for passwords; try: {ssh}",
        )
    if code in (126, 127):  # of the shell there; ssh itself exits with 255
        return UsageError(
            f"On {target.name}, {target.python} cannot be run: {last}",
            hint="Name a Python 3.10 or later there: --python",
        )
    is_dropped = code == 255 and "kex_exchange_identification: " in text and all(map(CONSEQUENCES.match, lines))
    kind = _Dropped if is_dropped else UnreachableError
    return kind(f"{target.name} does not answer: {last}", hint=f"Try: {ssh}")


def close_all(channels: Sequence[Channel]) -> None:
    """Close each channel."""
    for channel in channels:
        channel.close()
