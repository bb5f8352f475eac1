"""The server at the other end of a channel: answers requests about files and processes of one machine.

A client starts it with `python -c` (through ssh, or as a child process) and sends this text and that of the modules
which it imports on standard input (see `channel`), so nothing has to be installed, and no argument shows in a list of
processes. It ends with its standard input. Standard library only, of Python 3.10 or later.

Requests and answers are messages (see `wire`). A request is {"do": NAME, ...}; the answer has "error" if it failed.
Paths may begin with "~/".
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import tarfile
import time
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

from mlbench_cli.agent import interfaces, processes, wire
from mlbench_cli.util.files import read_object, remove_folder, write_atomically

Answer = tuple[Mapping[str, Any], bytes]

MARKER = b"\n@mlbench-serve 1\n"  # before it, a login script may print what it likes
BLOCK = 1 << 20
MAX_REQUEST = 1 << 30
LOGIN_SECONDS = 20.0  # which a login shell may take to start
# Defines `packages`, what backends of tasks need; importing them would take seconds.
PACKAGES = (
    "import sys; sys.path[:] = [path for path in sys.path if path]\n"  # -P, which Python 3.10 lacks: not from here
    "import glob\n"
    "from importlib.util import find_spec\n"
    "packages = [name for name in ('torch', 'mpi4py', 'tensorflow') if find_spec(name)]\n"
    "places = list(find_spec('torch').submodule_search_locations or ()) if 'torch' in packages else []\n"
    "is_for_gpus = any(glob.glob(place + '/lib/libtorch_[ch][ui][dp]*.so') for place in places)\n"
    "packages += ['torch for GPUs'] * is_for_gpus\n"
)
PROBE = PACKAGES + (
    "import json\n"
    "try:\n import torch; v, g = torch.__version__, torch.cuda.device_count()\n"
    "except Exception: v, g = None, 0\n"
    "print(json.dumps({'python': sys.version.split()[0], 'torch': v, 'gpus': g, 'packages': packages}))"
)


class Refused(Exception):
    """A request that is understood and not done; the text is the reason."""


def expand(path: str) -> str:
    """An absolute path, with "~" as this user's home."""
    return os.path.abspath(os.path.expanduser(path))


# --- requests -------------------------------------------------------------------------------------------------------


def hello(base: str = "~") -> Answer:
    """Facts of this machine that cost nothing to find."""
    folder = expand(base)
    parent = folder
    while not os.path.lexists(parent):
        parent = os.path.dirname(parent)
    return {
        "home": expand("~"),
        "time": time.time(),
        "free_bytes": shutil.disk_usage(parent).free,
        "writable": os.path.isdir(parent) and os.access(parent, os.W_OK | os.X_OK),
        "addresses": [
            {"interface": name, "address": own, "mask": mask} for name, own, mask in interfaces.interface_addresses()
        ],
        "connection": os.environ.get("SSH_CONNECTION", ""),
        "boot_id": processes.boot_id(),
        "node": os.uname().nodename,
    }, b""


def probe(python: str, setup: str = "") -> Answer:
    """Version of the Python that will run the ranks, and of its torch. It takes as long as importing torch does."""
    command = [python, "-c", PROBE]
    if setup:
        command = ["bash", "-c", setup + '\nexec "$@"', "setup", *command]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=120, check=False)
    lines = done.stdout.decode("utf-8", "replace").strip().splitlines()
    try:
        return json.loads(lines[-1]), b""
    except (ValueError, IndexError):
        raise Refused(processes.last_line(done.stderr) or f"{python} gives no answer") from None


@functools.cache
def slurm_variables() -> Mapping[str, str]:
    """Where Slurm's commands are. Many sites say so in login shells only, and ssh starts none."""
    if shutil.which("sbatch"):
        return {}
    words = ["/bin/bash", "-lc", 'printf "\\n%s\\n%s\\n" "$PATH" "$SLURM_CONF"']
    try:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=LOGIN_SECONDS, check=False)
        path, configuration = done.stdout.decode("utf-8", "replace").split("\n")[-3:-1]
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return {}
    own = os.environ.get("PATH", os.defpath)
    return {"PATH": f"{own}{os.pathsep}{path}", **({"SLURM_CONF": configuration} if configuration else {})}


def run(argv: list[str], timeout: float = 30.0, stdin: str = "", env: Mapping[str, str] | None = None) -> Answer:
    """Run one command with an environment that no setting of the user changes; `code` is None after a timeout."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SQUEUE_", "SBATCH_", "SINFO_", "SACCT_", "SCANCEL_", "SLURM_")) or name == "SLURM_CONF"
    }
    settings = {**kept, **slurm_variables(), "LC_ALL": "C", "SLURM_TIME_FORMAT": "%s", **(env or {})}
    try:
        done = subprocess.run(
            argv, input=stdin.encode(), capture_output=True, timeout=timeout, check=False, env=settings
        )
    except subprocess.TimeoutExpired:
        return {"code": None, "out": "", "err": f"no answer within {timeout:g} s"}, b""
    except OSError as error:
        return {"code": 127, "out": "", "err": f"{argv[0]}: {error.strerror}"}, b""
    text = [stream.decode("utf-8", "replace") for stream in (done.stdout, done.stderr)]
    return {"code": done.returncode, "out": text[0], "err": text[1]}, b""


def put(path: str, mode: int = 0o600, new: bool = False, durable: bool = True, *, data: bytes) -> Answer:
    """Write a file as a whole into a folder that is there. With `new` the folder (0700) is made, and a file that is
    already there stays; `written` is False then, as it is without the folder: somebody has deleted the run.

    With `durable` it survives a crash of the machine; without, it only is whole for every reader.
    """
    path = expand(path)
    if new:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    elif not os.path.isdir(os.path.dirname(path)):
        return {"written": False}, b""
    if not new:
        write_atomically(path, data, is_durable=durable, mode=mode)
        return {"written": True}, b""
    part = f"{path}.{os.getpid()}.part"
    write_atomically(part, data, is_durable=durable, mode=mode)
    try:
        os.link(part, path)
        return {"written": True}, b""
    except FileExistsError:
        return {"written": False}, b""
    finally:
        os.unlink(part)


def get(path: str, offset: int = 0, size: int = BLOCK) -> Answer:
    """A piece of a file; `size` is that of the whole file, None if there is none."""
    try:
        with open(expand(path), "rb") as file:
            file.seek(offset)
            return {"size": os.fstat(file.fileno()).st_size}, file.read(size)
    except FileNotFoundError:
        return {"size": None}, b""


def install(folder: str, sha256: str, *, data: bytes) -> Answer:
    """Unpack a tar of code into `folder`/SHA256, once; `installed` is False if it was there already."""
    target = os.path.join(expand(folder), sha256)
    if os.path.isdir(target):
        return {"folder": target, "installed": False}, b""
    if not data:
        return {"folder": None, "installed": False}, b""
    if hashlib.sha256(data).hexdigest() != sha256:
        raise Refused("the code arrived damaged")
    part = f"{target}.{socket.gethostname()}.{os.getpid()}"
    os.makedirs(part, mode=0o700)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        archive.extractall(part)
    try:
        os.rename(part, target)
    except OSError:  # another client has installed it meanwhile
        shutil.rmtree(part)
    return {"folder": target, "installed": True}, b""


def sync(folder: str, run: str, nodes: Mapping[str, Mapping[str, int]], limit: int = 8 * BLOCK) -> Answer:
    """What each node of a run has written: state, results, and its logs behind the given offsets. `run` is its id: the
    folder does not exist for it once another run has taken its name.

    `nodes` is node -> rank -> offset. The data are the pieces of logs, one after the other, in the order of `pieces`,
    at most `limit` bytes. `beat_age` is in seconds by the clock of the file system, which all nodes share; of a node
    that has a disk of its own, until its head last listened. `served`: the head that such nodes send to is running, or
    there is none.
    """
    folder = expand(folder)
    if not os.path.isdir(folder) or (read_object(f"{folder}/run.json") or {}).get("id", run) != run:
        return {"exists": False, "nodes": {}, "pieces": []}, b""
    clock, left = file_system_time(folder), limit
    listened = clock
    with contextlib.suppress(OSError):
        listened = min(clock, os.stat(f"{folder}/head.lock").st_mtime)
    reports, pieces, data = {}, [], []
    for node, offsets in nodes.items():
        place = os.path.join(folder, "nodes", node)
        state, results = read_object(f"{place}/.state/state.json"), read_object(f"{place}/.state/results.json")
        report: dict[str, Any] = {"state": state, "results": results, "alive": None, "beat_age": None}
        has_courier = os.path.exists(f"{place}/.state/courier")  # which reports the agent's end last
        with contextlib.suppress(OSError):
            os.listdir(f"{place}/.state")  # NFS: a listing asks the server again, a bare stat may not
            beat = os.stat(f"{place}/.state/beat").st_mtime
            report["beat_age"] = (listened if has_courier else clock) - beat
        if state is not None:
            is_gone = os.path.exists(f"{place}/.state/gone")
            report["alive"] = (False if is_gone else None) if has_courier else processes.is_alive(state)
            if report["alive"] is False:  # it may have ended since its state was read
                report["state"] = read_object(f"{place}/.state/state.json")
                report["results"] = read_object(f"{place}/.state/results.json")
        for rank, offset in offsets.items():
            if left <= 0:
                break
            piece = read_piece(f"{place}/logs/rank-{rank}.log", offset, left)
            if piece:
                left -= len(piece)
                pieces.append([int(rank), offset, len(piece)])
                data.append(piece)
        reports[node] = report
    answer = {
        "exists": True,
        "nodes": reports,
        "pieces": pieces,
        "limit": limit,
        "cancel": os.path.exists(f"{folder}/cancel"),
        "served": is_held(f"{folder}/head.lock"),
        "free_bytes": shutil.disk_usage(folder).free,
    }
    return answer, b"".join(data)


def await_file(path: str, timeout: float) -> Answer:
    """The text of a file as soon as it is there; None after `timeout` seconds."""
    path, end = expand(path), time.monotonic() + timeout
    while not os.path.exists(path):
        if time.monotonic() >= end:
            return {"text": None}, b""
        time.sleep(0.02)
    return {"text": read_text(path)}, b""


def lock(path: str, patience: float = 60.0) -> Answer:
    """Hold a lock until this channel ends, or `unlock`."""
    path = expand(path)
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    held = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    if not processes.try_lock(held, patience=patience):
        os.close(held)
        raise Refused(f"another client holds {path}")
    LOCKS[path] = held
    return {}, b""


LOCKS: dict[str, int] = {}


def unlock(path: str) -> Answer:
    """Release a lock that this connection holds; one that it does not hold is no error."""
    if (held := LOCKS.pop(expand(path), None)) is not None:
        os.close(held)
    return {}, b""


def spawn(argv: list[str], log: str, cwd: str = "~") -> Answer:
    """Start a program that outlives this channel, in a separate session."""
    argv = [expand(word) if word.startswith("~/") else word for word in argv]
    output = os.open(expand(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True, cwd=expand(cwd)
        )
    finally:
        os.close(output)
    return {"pid": process.pid}, b""


def end_processes(folder: str, patience: float = 5.0) -> Answer:
    """Kill every process of the run in `folder` on this machine: its agents, and what was given its variables."""
    killed, left = processes.kill_processes(nodes_of(folder), arguments=True, seconds=patience)
    return {"killed": killed, "left": left}, b""


def remove(folder: str, force: bool = False) -> Answer:
    """Remove the folder of a run; refused while a process of it runs on this machine, unless `force`."""
    folder = expand(folder)
    if not os.path.exists(os.path.join(folder, "run.json")) and os.path.isdir(folder) and os.listdir(folder):
        raise Refused(f"{folder} is not the folder of a run")
    if not force and processes.find_processes(nodes_of(folder), arguments=True):
        raise Refused("its processes are still running")
    remove_folder(folder)
    return {}, b""


def list_runs(base: str) -> Answer:
    """Every folder of a run below `base`, with what it says of itself, and the processes of its ranks on this machine.

    What hands over the results of ranks that have ended is none of them.
    """
    base, runs = expand(base), []
    with contextlib.suppress(FileNotFoundError):
        for name in sorted(os.listdir(base)):
            folder = os.path.join(base, name)
            if name.startswith(".") or not os.path.isdir(folder):
                continue
            runs.append(
                {
                    "name": name,
                    "run": read_object(os.path.join(folder, "run.json")),
                    "fetched": os.path.exists(os.path.join(folder, "fetched")),
                    "processes": processes.find_processes(nodes_of(folder)),
                    "supervised": any(
                        processes.is_alive(read_object(os.path.join(folder, "nodes", node, ".state", "state.json")))
                        for node in list_folder(os.path.join(folder, "nodes"))
                    ),
                }
            )
    return {"runs": runs}, b""


def listen() -> Answer:
    """A port of this machine to which others may connect, until the channel ends."""
    server = interfaces.listen()
    SERVERS.append(server)
    return {"port": server.getsockname()[1]}, b""


SERVERS: list[socket.socket] = []


def connect(address: str, port: int, patience: float = 5.0) -> Answer:
    """Whether this machine reaches a port of another one, and from which of its addresses."""
    try:
        with socket.create_connection((address, port), timeout=patience) as link:
            return {"reached": True, "own": link.getsockname()[0]}, b""
    except OSError as error:
        return {"reached": False, "problem": error.strerror or str(error)}, b""


# --- plumbing -------------------------------------------------------------------------------------------------------


def read_text(path: str) -> str:
    """The text of a file; empty if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def list_folder(path: str) -> list[str]:
    """The names in a folder, sorted; none if it cannot be read."""
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []


def is_held(path: str) -> bool:
    """Whether a process holds a lock, or there is no such file."""
    try:
        return processes.is_locked(path)
    except OSError:
        return True


def nodes_of(folder: str) -> str:
    """The folder of a run's nodes, below which its ranks write."""
    return f"{expand(folder)}/nodes"


def read_piece(path: str, offset: int, size: int) -> bytes:
    """At most `size` bytes from `offset`; fewer at the end of the file, none if it cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            return file.read(size)
    except OSError:
        return b""


def file_system_time(folder: str) -> float:
    """Seconds since 1970 by the clock of the folder's file server, which may differ from this machine's."""
    path = os.path.join(folder, ".clock")
    try:
        with open(path, "wb") as file:
            file.write(b"1")
        return os.stat(path).st_mtime
    except OSError:
        return time.time()


DO: dict[str, Callable[..., Answer]] = {
    action.__name__: action
    for action in (
        *(hello, probe, run, put, get, install, sync, lock, unlock, spawn, end_processes, remove, list_runs),
        *(listen, connect, await_file),
    )
}
WITH_DATA = ("put", "install")


def sequence(requests: list[dict[str, Any]], *, data: bytes) -> Answer:
    """Several requests in one exchange, each done only if those before it were: `answers` has one for each done.

    `size` of a request is that of its part of the data. Answers with data are not given here.
    """
    answers, position = [], 0
    for request in requests:
        size = request.pop("size")
        document, _ = answer(request, data[position : position + size])
        position += size
        answers.append(document)
        if "error" in document:
            break
    return {"answers": answers}, b""


def answer(request: dict[str, Any], data: bytes) -> Answer:
    """Carry out one request: a document and bytes.

    A refusal, a passed deadline or an error of the system is a document, too.
    """
    action = request.pop("do")
    if action == "sequence":
        return sequence(**request, data=data)
    try:
        return DO[action](**request, data=data) if action in WITH_DATA else DO[action](**request)
    except Refused as error:
        return {"error": str(error), "kind": "refused"}, b""
    except subprocess.TimeoutExpired as error:
        return {"error": f"no answer within {error.timeout:g} s", "kind": "timeout"}, b""
    except OSError as error:
        problem = f"{error.strerror or error}: {error.filename}" if error.filename else str(error.strerror or error)
        return {"error": problem, "kind": "system", "errno": error.errno}, b""


def serve(source: io.BufferedReader, sink: BinaryIO) -> None:
    """Answer requests until the client closes the connection."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    sink.write(MARKER)
    sink.flush()
    decoder = wire.Decoder(MAX_REQUEST, MAX_REQUEST)
    while piece := source.read1(BLOCK):
        decoder.feed(piece)
        while (found := decoder.take()) is not None:
            sink.write(wire.encode(*answer(*found)))
            sink.flush()
