"""A person at a terminal: the tool on a pseudo-terminal of its own, read and typed into."""

import os
import pty
import select
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from tests.contract.clients import become, mlbench, prepare_fork

LIMIT = 180.0  # seconds until a text that does not come is given up


class Terminal:
    """One command of the tool on a terminal. `seen` is all that it has written so far.

    It is a fork of this process (clients.py), unless it `starts_anew`: gRPC allows no forks that use it.
    """

    def __init__(
        self,
        *arguments: str,
        home: Path,
        columns: int = 80,
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
        starts_anew: bool = False,
    ) -> None:
        own = {"MLBENCH_HOME": str(home), "COLUMNS": str(columns), "TERM": "xterm"}
        inherited = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
        variables = {**inherited, **own, **(environment or {})}
        self.seen = ""
        prepare_fork()
        self.pid, self._terminal = pty.fork()
        if self.pid == 0:
            if cwd is not None:
                os.chdir(cwd)
            if starts_anew:
                os.execve(sys.executable, [sys.executable, "-m", "mlbench_cli", *arguments], variables)
            become(partial(mlbench, arguments), variables)

    def expect(self, text: str) -> str:
        """Wait until `text` is written; what came before it."""
        end = time.monotonic() + LIMIT
        while text not in self.seen:
            if not self._read(end - time.monotonic()):
                raise AssertionError(f"{text!r} did not come, but: {self.seen!r}")
        before, _, self.seen = self.seen.partition(text)
        return before

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def answer(self, question: str, text: str) -> str:
        """Wait for the question, type the answer; what came before the question."""
        before = self.expect(question)
        self.type(text + "\n")
        return before

    def finish(self) -> tuple[int, str]:
        """Wait for the end; exit code and all that was written since the last `expect`."""
        end = time.monotonic() + LIMIT
        while self._read(end - time.monotonic()):
            pass
        _, status = os.waitpid(self.pid, 0)
        os.close(self._terminal)
        return os.waitstatus_to_exitcode(status), self.seen.replace("\r\n", "\n")

    def _read(self, seconds: float) -> bool:
        ready, _, _ = select.select([self._terminal], [], [], max(0.0, seconds))
        if not ready:
            raise AssertionError(f"nothing more came after: {self.seen!r}")
        try:
            data = os.read(self._terminal, 65536)
        except OSError:  # Linux's way to say that the other end is closed
            return False
        self.seen += data.decode("utf-8", "replace")
        return bool(data)
