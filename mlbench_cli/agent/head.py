"""The head of a run whose nodes have disks of their own: receives their files, and passes notes on to them.

It is started as `main([RUN])` on the machine whose folder RUN the client reads, or in a pod (pod.py). Each node has a
courier (courier.py) that connects to it and sends the node's files as they grow; here they have the places that they
would have in a folder which all nodes share:

    RUN/head.json       how to reach this process; the client gives a copy to each node
    RUN/here-TOKEN      only in this folder: a node that finds it shares the folder, and needs no courier
    RUN/head.lock       held by this process until it ends, and of the time until which it has listened to nodes
    RUN/cancel  rendezvous.json  stacks       passed on to all nodes when they appear or change
    RUN/nodes/K/logs/  .state/state.json  archive.tar  results.json       from the courier of node K
    RUN/nodes/K/.state/courier  beat  gone    node K has a courier, was heard of last, has no agent any more
    RUN/until  fetched                        until when results are kept (seconds since 1970); a client has them

A file is written at the offset that comes with it, so what is sent again after a cut changes nothing. A node keeps its
files until the head has confirmed their sizes. Standard library only.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import socketserver
import sys
import threading
import time
from collections.abc import Callable
from socket import socket
from typing import Any

from mlbench_cli.agent import link, machine, processes, wire
from mlbench_cli.agent.interfaces import list_addresses, listen
from mlbench_cli.util.files import allow_open_files, touch, write_at, write_atomically

LOOK_SECONDS = 0.2  # between two looks for what nodes must know
SILENT_SECONDS = 60.0  # without a message, until a connection is closed
IDLE_SECONDS = 3600.0  # without a message of any node, until the head ends
STILL_SECONDS = 5.0  # between two looks, from which on this process counts as having stood still
LINGER_SECONDS = 10.0  # after the last message, for a courier that did not hear that all has arrived
PASSED_ON = ("cancel", "rendezvous.json", "stacks")
GROWING = re.compile(r"logs/rank-\d{1,7}\.log|\.state/archive\.tar")
WHOLE = re.compile(r"\.state/(state|results)\.json")
MAX_OFFSET = 1 << 50
SPARE_FILES = 256  # besides two for each node: its connection, and a file that is written


class Head:
    """The run's folder, and what this process knows of its nodes."""

    def __init__(self, folder: str, count: int, token: str, idle_seconds: float, *, needs_all: bool = True) -> None:
        self.folder, self.count, self.token = folder, count, token
        self.needs_all = needs_all  # else nodes that never came are not waited for
        self.idle_seconds = idle_seconds  # without a message of any node, until the head ends
        self.heard = time.monotonic()  # when a message last came
        self.turn = (0.0, 0.0)  # when it last listened, by the monotonic and the wall clock
        self.notes: dict[str, bytes] = {}  # what is passed on, by name
        self.talks: dict[int, link.Link] = {}  # the last one of each node
        self._actions: dict[str, Callable[..., dict[str, Any] | None]] = {
            "append": self._append,
            "replace": self._replace,
            "beat": self._beat,
            "sizes": self._list_sizes,
            "gone": self._note_end,
        }

    def place(self, node: int) -> str:
        """The folder of a node."""
        return f"{self.folder}/nodes/{node}"

    def is_over(self) -> bool:
        """Whether nothing more will come: every node has handed over or is gone, or nobody has been heard of for long.

        Also if the run's folder was removed.
        """
        if not os.path.isdir(self.folder) or time.monotonic() > self.heard + self.idle_seconds:
            return True
        ends = ("results.json", "gone")
        return all(
            any(os.path.exists(f"{self.place(node)}/.state/{name}") for name in ends)
            or (node and not self.needs_all and not os.path.exists(f"{self.place(node)}/.state/courier"))
            for node in range(self.count)
        )

    def take_turn(self, lock: int) -> None:
        """Note in the lock's file that this process listens. If it did not since the last turn, because its machine
        stood still or was down, no node could give a sign of life: they have as long again."""
        turn = time.monotonic(), time.time()
        if max(turn[0] - self.turn[0], turn[1] - self.turn[1]) > STILL_SECONDS:
            for node in range(self.count):
                if os.path.exists(f"{self.place(node)}/.state/courier"):
                    touch(f"{self.place(node)}/.state/beat")
        self.turn = turn
        os.utime(lock)

    def look_for_notes(self) -> None:
        """Read what is to be passed on."""
        for name in PASSED_ON:
            if (content := machine.read_bytes(f"{self.folder}/{name}")) is not None:
                self.notes[name] = content

    def have(self, node: int, names: list[Any]) -> dict[str, int]:
        """The sizes of a node's growing files here."""
        sizes = {}
        for name in names:
            if isinstance(name, str) and GROWING.fullmatch(name):
                with contextlib.suppress(OSError):
                    sizes[name] = os.stat(f"{self.place(node)}/{name}").st_size
        return sizes

    def take(self, node: int, message: dict[str, Any], data: bytes) -> dict[str, Any] | None:
        """Do what a courier asks; the answer, if it expects one. Raises OSError, and KeyError, TypeError or ValueError
        for other requests."""
        self.heard = time.monotonic()
        answer: dict[str, Any] | None = wire.carry_out(self._actions, message, node, data)
        return answer

    def _append(self, node: int, data: bytes, name: str, offset: int) -> None:
        if not GROWING.fullmatch(name) or not 0 <= offset < MAX_OFFSET:
            raise ValueError(name)
        write_at(f"{self.place(node)}/{name}", offset, data)
        touch(f"{self.place(node)}/.state/beat")  # a large output takes minutes, and its node has no agent any more

    def _replace(self, node: int, data: bytes, name: str) -> None:
        if name == "rendezvous.json" and node == 0:
            write_atomically(f"{self.folder}/{name}", data, is_durable=False, mode=0o600)
        elif WHOLE.fullmatch(name):
            write_atomically(f"{self.place(node)}/{name}", data, is_durable=False)
        else:
            raise ValueError(name)

    def _beat(self, node: int, data: bytes) -> dict[str, Any]:
        touch(f"{self.place(node)}/.state/beat")
        return {"do": "beat"}

    def _list_sizes(self, node: int, data: bytes, names: list[Any]) -> dict[str, Any]:
        return {"do": "have", "sizes": self.have(node, names)}

    def _note_end(self, node: int, data: bytes) -> dict[str, Any]:
        touch(f"{self.place(node)}/.state/gone")
        return {"do": "gone"}

    def converse(self, connection: socket) -> None:
        """Serve one courier until its connection ends."""
        talk = link.Link(connection)
        try:
            first = talk.receive(SILENT_SECONDS)
            if first is None or not link.is_token(first[0].get("token"), self.token):
                return
            node, names = first[0]["node"], first[0]["names"]
            if not isinstance(node, int) or not 0 <= node < self.count or not isinstance(names, list):
                return
            for part in ("logs", ".state"):
                os.makedirs(f"{self.place(node)}/{part}", exist_ok=True)
            self.talks[node] = talk
            for name in ("courier", "beat"):
                touch(f"{self.place(node)}/.state/{name}")
            talk.send({"do": "have", "sizes": self.have(node, names)})
            passed_on: dict[str, bytes] = {}
            last = time.monotonic()
            while time.monotonic() < last + SILENT_SECONDS:
                for name, content in dict(self.notes).items():
                    if passed_on.get(name) != content:
                        talk.send({"do": "note", "name": name}, content)
                        passed_on[name] = content
                found = talk.receive(LOOK_SECONDS)
                if self.talks[node] is not talk:
                    return  # the courier has connected again since, and what it sent here may be out of date
                if found is not None:
                    last = time.monotonic()
                    if (answer := self.take(node, *found)) is not None:
                        talk.send(answer)
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            pass  # the courier connects again
        finally:
            talk.close()


class Server(socketserver.ThreadingTCPServer):
    """A thread for each node's courier."""

    daemon_threads = True
    head: Head

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        self.head.converse(request)  # never raises

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of a connection: the courier connects again."""


def open_server(folder: str, head: Head, port: int) -> Server:
    """Listen, and say in the run's folder how to reach this process."""
    threading.stack_size(1 << 18)
    server = Server(("", port), None, bind_and_activate=False)  # type: ignore[arg-type]
    server.socket.close()
    server.socket = listen(port)
    server.head = head
    with open(_mark(folder, head.token), "w", encoding="ascii"):
        pass
    return server


def shares_folder(folder: str, note: wire.Message) -> bool:
    """Whether the head that a note names serves this very folder."""
    return os.path.exists(_mark(folder, str(note["token"])))


def _mark(folder: str, token: str) -> str:
    return f"{folder}/here-{hashlib.sha256(token.encode()).hexdigest()[:16]}"


def main(arguments: list[str]) -> int:
    """Serve the folder of a run until all of its nodes have handed over. Ends at once if another head serves it."""
    return serve(os.path.abspath(arguments[0]))


def serve(folder: str, *, idle_seconds: float = IDLE_SECONDS, keep_seconds: float = 0.0) -> int:
    """Like `main`; then keep what has arrived for `keep_seconds`, or until a client confirms that it has fetched it."""
    machine.keep_only()
    with open(f"{folder}/plan.json", encoding="utf-8") as file:
        plan = json.load(file)
    with open(f"{folder}/head.lock", "ab") as lock:
        if not processes.try_lock(lock.fileno()):
            return 0
        known = link.read_note(folder, link.HEAD)  # of a head that was killed: couriers look for it there
        token = str(known["token"]) if known else link.new_token()
        head = Head(folder, len(plan["nodes"]), token, idle_seconds, needs_all=plan.get("absent_seconds") is None)
        allow_open_files(SPARE_FILES + 2 * head.count)
        server = open_server(folder, head, int(known["port"]) if known else 0)
        own = plan["nodes"][0]["address"]
        addresses = [own] if own else list_addresses(plan["interface"]) or ["127.0.0.1"]
        link.write_note(folder, link.HEAD, addresses, server.socket.getsockname()[1], token)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        while not head.is_over():
            with contextlib.suppress(OSError):  # the folder has just been removed
                head.take_turn(lock.fileno())
            head.look_for_notes()
            time.sleep(LOOK_SECONDS)
        if keep_seconds and os.path.isdir(folder):
            keep(folder, keep_seconds)
        while os.path.isdir(folder) and time.monotonic() < head.heard + LINGER_SECONDS:
            time.sleep(LOOK_SECONDS)
    return 0


def keep(folder: str, seconds: float) -> None:
    """Wait until a client has fetched everything, or the time is up."""
    write_atomically(f"{folder}/until", str(time.time() + seconds).encode(), is_durable=False)
    end = time.monotonic() + seconds
    while time.monotonic() < end and not os.path.exists(f"{folder}/fetched"):
        time.sleep(LOOK_SECONDS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
