"""What doubles of clouds share: a log of their requests, and the trouble that a test orders for one of them."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn


class CloudDouble:
    """A double whose requests are served one at a time, each logged by its words.

    `trouble` says, by a request's number or name, what befalls it: "KIND-before" its work, or "KIND-after".
    """

    lock: Any
    log: list[str]
    trouble: dict[int | str, str]
    pidfile: Path | None

    def serve_logged(self, name: str, words: str, work: Callable[[], Any]) -> Any:
        """Do the work of one request, which is logged, with the trouble that was ordered for it."""
        with self.lock:
            number = len(self.log)
            trouble = self.trouble.get(number) or self.trouble.get(name) or ""
            self.log.append(words)
            kind, _, when = trouble.rpartition("-")
            if when == "before":
                self.strike(kind)
            try:
                return work()
            finally:
                if when == "after":
                    self.strike(kind)

    def kill_client(self) -> None:
        """Kill the process of the pidfile, and give it the time to be gone."""
        assert self.pidfile is not None
        os.kill(int(self.pidfile.read_text()), signal.SIGKILL)
        time.sleep(0.05)

    def strike(self, kind: str) -> NoReturn:
        """Raise the error of this kind of trouble; "kill" kills the client first."""
        raise NotImplementedError
