"""The AWS double as a process, without loading it here: its models take 5 s of a core.

All workers of a session copy one double, which starts when the first of them connects.
"""

import atexit
import os
import select
import socket
import subprocess
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHARED = "DOUBLE_OF_AWS"  # a variable with its port, which workers inherit; tests remove those called AWS_...


def listen() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


def start(listener: socket.socket) -> "subprocess.Popen[bytes]":
    """A double that serves there. While it loads, requests wait."""
    with listener:
        command = [sys.executable, "-m", "tests.fakes.aws", str(listener.fileno())]
        return subprocess.Popen(command, cwd=ROOT, pass_fds=[listener.fileno()], stdin=subprocess.DEVNULL)


def share() -> None:
    listener = listen()
    os.environ[SHARED] = str(listener.getsockname()[1])
    threading.Thread(target=_start_when_asked, args=(listener,), daemon=True).start()


def _start_when_asked(listener: socket.socket) -> None:
    select.select([listener], [], [])
    atexit.register(start(listener).kill)
