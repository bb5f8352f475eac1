"""The courier of a node sends what its agent and ranks write to the run's head, and receives notes for all nodes from
it.

It is the parent of the agent, so that it outlives it and knows how it ended. It needs nothing but the files: after a
cut connection, or with another head, it asks how much of each is there and continues. It ends when the head has
confirmed the sizes of all files after the agent's end; until then the node's own files are the source. Standard library
only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

from mlbench_cli.agent import head, link, machine, wire
from mlbench_cli.util.files import write_atomically

PIECE = 1 << 18
PAUSE = 0.1  # seconds between two checks for new data
BEAT_SECONDS = 2.0
SILENT_SECONDS = 10.0  # without an answer to a beat, until the connection counts as cut
CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 30.0
ARCHIVE, RESULTS, STATE = ".state/archive.tar", ".state/results.json", ".state/state.json"


def main(
    place: str,
    node: int,
    ranks: Sequence[int],
    note: wire.Message,
    work: Callable[[], int],
    *,
    hold: float,
    echo: bool = False,
) -> int:
    """Run the agent (`work`) as a child, and send what it writes into `place`, RUN/nodes/K. Returns its exit code.

    After the agent's end it tries for `hold` seconds to reach a head that does not answer. With `echo` the ranks' logs
    also go to standard output.
    """
    parent = os.getpid()
    if (agent := os.fork()) == 0:
        code = 1
        try:
            # At TERM it would tell the other nodes that the run was canceled. Its results could not be sent anyway.
            machine.prctl(machine.PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == parent:
                code = work()
        finally:
            os._exit(code)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: _signal(agent))
    courier = Courier(place, node, ranks, note, agent, hold, echo)
    return courier.carry()


def _signal(agent: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(agent, signal.SIGTERM)


class Courier:
    """Sends one node's files to the head that `note` names."""

    def __init__(
        self, place: str, node: int, ranks: Sequence[int], note: wire.Message, agent: int, hold: float, echo: bool
    ) -> None:
        self.place, self.node, self.note, self.hold = place, node, note, hold
        self.run_folder = os.path.dirname(os.path.dirname(place))
        self.logs = [f"logs/rank-{rank}.log" for rank in ranks]
        self.agent: int | None = agent
        self.echoed = dict.fromkeys(self.logs, 0) if echo else {}
        self.code = 0
        self.is_delivered = False

    def carry(self) -> int:
        """Send until the head has confirmed everything; the agent's exit code."""
        ended = None
        while not self.is_delivered:
            self._echo()
            try:
                self._converse()
            except (OSError, ValueError, KeyError, TypeError, RecursionError):
                time.sleep(PAUSE if self._watch_agent() else 10 * PAUSE)
            if self.agent is None:
                ended = ended or time.monotonic()
                if time.monotonic() > ended + self.hold or not os.path.isdir(self.run_folder):
                    break
        return self.code

    def _watch_agent(self) -> bool:
        """Whether the agent still runs."""
        if self.agent is None:
            return False
        pid, status = os.waitpid(self.agent, os.WNOHANG)
        if pid:
            self.agent = None
            self.code = os.waitstatus_to_exitcode(status) if not os.WIFSIGNALED(status) else 128 + os.WTERMSIG(status)
        return self.agent is not None

    def _converse(self) -> None:
        talk = link.Link(link.connect(self.note["addresses"], self.note["port"], CONNECT_SECONDS))
        try:
            names = [*self.logs, ARCHIVE]
            talk.send({"do": "hello", "token": self.note["token"], "node": self.node, "names": names})
            self._send_all(talk, self._await(talk, "have")["sizes"])
        finally:
            talk.close()

    def _await(self, talk: link.Link, wanted: str) -> dict[str, Any]:
        """The answer of that kind; notes that come before it are written. Raises OSError if none comes."""
        end = time.monotonic() + ANSWER_SECONDS
        while (found := talk.receive(max(0.0, end - time.monotonic()))) is not None:
            if found[0]["do"] == wanted:
                return found[0]
            self._take(*found)
        raise TimeoutError(wanted)

    def _take(self, message: dict[str, Any], data: bytes) -> None:
        """Write a note from the head to the same file in this node's folder of the run; an answer to a beat is none."""
        if message["do"] == "note" and message["name"] in head.PASSED_ON:
            path = f"{self.run_folder}/{message['name']}"
            if machine.read_bytes(path) != data:
                write_atomically(path, data, is_durable=False, mode=0o600)

    def _send_all(self, talk: link.Link, have: dict[str, int]) -> None:
        """Send what the head lacks, until the agent has ended and the head has confirmed the sizes of all files."""
        offsets = {name: int(have.get(name, 0)) for name in [*self.logs, ARCHIVE]}
        sent: dict[str, bytes] = {}  # what was last sent of each file that is replaced as a whole
        next_beat, asked = 0.0, float("inf")  # asked: when the first beat was sent that is not answered
        while True:
            is_running = self._watch_agent()
            self._echo()
            is_news = self._send_whole(talk, STATE, sent)
            if self.node == 0:
                is_news |= self._send_whole(talk, "../../rendezvous.json", sent, "rendezvous.json")
            for name in self.logs:
                is_news |= self._send_growth(talk, name, offsets)
            if not is_running and os.path.exists(f"{self.place}/{RESULTS}"):
                is_news |= self._send_growth(talk, ARCHIVE, offsets)
            if is_running and time.monotonic() >= next_beat:
                next_beat = time.monotonic() + BEAT_SECONDS
                talk.send({"do": "beat"})
                asked = min(asked, time.monotonic())
            if not is_running and not is_news:
                talk.send({"do": "sizes", "names": list(offsets)})  # what was sent has not arrived yet
                arrived = self._await(talk, "have")["sizes"]
                if any(arrived.get(name, 0) != size for name, size in offsets.items()):
                    raise ConnectionError("not all has arrived")
                self._send_whole(talk, RESULTS, sent)
                talk.send({"do": "gone"})
                self._await(talk, "gone")
                self.is_delivered = True
                return
            while (found := talk.receive(0.0 if is_news else PAUSE)) is not None:
                self._take(*found)
                is_news, asked = True, float("inf")
            if time.monotonic() > asked + SILENT_SECONDS:
                # The head's machine is gone. TCP would accept more data, and repeat it for a quarter of an hour.
                raise TimeoutError("the head does not answer")

    def _echo(self) -> None:
        """Copy what logs have gained to standard output, for whoever looks at this container alone."""
        for name, offset in self.echoed.items():
            with contextlib.suppress(OSError), open(f"{self.place}/{name}", "rb") as file:
                file.seek(offset)
                data = file.read(1 << 22)
                self.echoed[name] += len(data)
                while data:
                    data = data[os.write(1, data) :]

    def _send_growth(self, talk: link.Link, name: str, offsets: dict[str, int]) -> bool:
        """Send what a file has gained; False if that is nothing."""
        is_news = False
        with contextlib.suppress(FileNotFoundError), open(f"{self.place}/{name}", "rb") as file:
            file.seek(offsets[name])
            for _ in range(16):  # then the others have their turn
                data = file.read(PIECE)
                if not data:
                    break
                talk.send({"do": "append", "name": name, "offset": offsets[name]}, data)
                offsets[name] += len(data)
                is_news = True
        return is_news

    def _send_whole(self, talk: link.Link, name: str, sent: dict[str, bytes], there: str | None = None) -> bool:
        """Send a file that is always replaced as a whole, if its content is another; False if not."""
        try:
            with open(f"{self.place}/{name}", "rb") as file:
                data = file.read()
        except FileNotFoundError:
            return False
        if data == sent.get(name):
            return False
        talk.send({"do": "replace", "name": there or name}, data)
        sent[name] = data
        return True
