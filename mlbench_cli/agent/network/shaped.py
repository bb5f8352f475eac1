"""The shaped network of a run as its agent has it: made before the ranks, probed, entered by them, probed again.

It is never weaker than what was asked for without saying so: if the probe finds another network, the run does not start
and the reason is a ShapingError.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
from collections.abc import Mapping
from operator import sub
from typing import TypedDict, cast

from mlbench_cli.agent.network.hub import PACKET, SetupDocument
from mlbench_cli.agent.network.namespaces import NEW_NETWORK, NEW_USER, ShapingError, become_user_again, enter
from mlbench_cli.isolation import isolated_command
from mlbench_cli.model.network import NetworkShape, find_deviations, worker_address

SETUP_SECONDS = 30.0
PROBE_SECONDS = 90.0
ATTEMPTS = 3  # of each probe: a busy moment of the machine is no property of the network
MAX_LATE_SHARE = 0.05
PROBE_PORT = 7077
_HUB = "mlbench_cli.agent.network.hub"
_PROBE = "mlbench_cli.agent.network.probe"


class SwitchDocument(TypedDict):
    """The switch's counters over the task; empty if the kernel delays packets itself."""

    switch: Mapping[str, float] | None
    sent_bytes: list[int]


class ShapingDocument(TypedDict):
    """shaping.json: evidence of what was made and measured. `probes` are the reports of probe.py."""

    schema_version: int
    asked: str
    method: str
    setup: SetupDocument
    attempts: int
    probes: list[Mapping[str, object]]
    task: SwitchDocument | None  # between the two probes
    notes: list[str]


class ShapedNetwork:
    """The namespaces of all workers, kept alive by the hub process and by the descriptors here."""

    def __init__(self, shape: NetworkShape, workers: int) -> None:
        """Make the network. Raises ShapingError."""
        self.shape = shape
        self.workers = workers
        self._user, self._group = os.geteuid(), os.getegid()
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = [str(theirs.fileno()), str(workers), repr(shape.rate), repr(shape.delay)]
        try:
            self._hub = subprocess.Popen(
                [*isolated_command(_HUB), *words], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
            )
        finally:
            theirs.close()
        self.channel.settimeout(SETUP_SECONDS)
        try:
            message, descriptors, _, _ = socket.recv_fds(self.channel, 1 << 16, workers + 1)
        except OSError as error:
            self.close()
            raise ShapingError(f"it was not created within {SETUP_SECONDS:g} s: {error}") from None
        answer = json.loads(message or b'{"problem": "the process that makes it ended at once"}')
        if "problem" in answer:
            self.close()
            raise ShapingError(str(answer["problem"]))
        self.setup = cast(SetupDocument, answer)
        self._descriptors = descriptors
        self._before: SwitchDocument | None = None
        self.document: ShapingDocument = {
            "schema_version": 1,
            "asked": str(shape),
            "method": self.setup["method"],
            "setup": self.setup,
            "attempts": 0,
            "probes": [],
            "task": None,
            "notes": [],
        }

    def close(self) -> None:
        """End the hub; the kernel drops the network with its last process."""
        self.channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._hub.wait(5)
        self._hub.kill()
        self._hub.wait()
        for descriptor in getattr(self, "_descriptors", ()):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._descriptors = []

    def enter_worker(self, worker: int) -> None:
        """Move this process, a child with one thread, into a worker's network. Raises OSError."""
        if self.setup["user_namespace"]:
            enter(self._descriptors[0], NEW_USER)
        enter(self._descriptors[1 + worker], NEW_NETWORK)
        if self.setup["user_namespace"]:
            become_user_again(self._user, self._group)

    def verify(self) -> None:
        """Probe the network before the task. Raises ShapingError if it is not what was asked for."""
        report, problems = self._probe_until_it_fits("before")
        if problems:
            raise ShapingError(f"requested {self.shape}, but {'; '.join(problems)}{self._advice()}")
        self.document["probes"].append(report)
        self._before = self._count()

    def finish(self, path: str) -> None:
        """Probe the network again and write shaping.json. Problems are notes in it: the judge weighs them."""
        notes = self.document["notes"]
        try:
            after = self._count()
            task = _difference(self._before, after) if self._before else after
            self.document["task"] = task
            if (note := _find_lateness(task)) is not None:
                notes.append(note)
            self.document["probes"].append(self._probe_until_it_fits("after")[0])
        except (OSError, ValueError, ShapingError) as error:
            notes.append(f"after the task: {error}")
        self.close()
        with open(path, "w", encoding="utf-8") as file:
            file.write(json.dumps(self.document, indent=2) + "\n")

    def _probe_until_it_fits(self, stage: str) -> tuple[Mapping[str, object], list[str]]:
        """The first report that shows the network that was asked for, or the last one with its deviations."""
        for _ in range(ATTEMPTS):
            self.document["attempts"] += 1
            report = self.probe(stage)
            problems = find_deviations(self.shape, report)
            if not problems:
                break
        return report, problems

    def probe(self, stage: str) -> Mapping[str, object]:
        """The report of a probe among the workers. Raises ShapingError if there is no answer."""
        places = [f"{worker_address(worker)}:{PROBE_PORT}" for worker in range(self.workers)]
        token, started = secrets.token_hex(16), []
        try:
            for worker in range(self.workers):
                words = [*isolated_command(_PROBE), str(worker), stage, token, *places]
                started.append(self._start_in(worker, words))
            text, _ = started[0].communicate(timeout=PROBE_SECONDS)
            report = json.loads(text)
        except subprocess.TimeoutExpired:
            raise ShapingError(f"it is too slow to be measured within {PROBE_SECONDS:g} s") from None
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            raise ShapingError(f"the probe failed: {error}") from None
        finally:
            for process in started:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(2)
                process.kill()
                process.wait()
                if process.stdout:
                    process.stdout.close()
        return cast("Mapping[str, object]", report)

    def _start_in(self, worker: int, words: list[str]) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0"}
        return subprocess.Popen(
            words,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            preexec_fn=lambda: self.enter_worker(worker),
        )

    def _count(self) -> SwitchDocument:
        self.channel.send(b"count")
        return cast(SwitchDocument, json.loads(self.channel.recv(1 << 16)))

    def change_link(self, worker: int, rate: float | None = None, loss: float = 0.0) -> str | None:
        """Give a worker's link another rate (bits per second; 0: it is down; None: its own) and loss of packets, both
        ways. Returns why that cannot be done, or None."""
        order = {"link": worker, "rate": self.shape.rate if rate is None else rate, "loss": loss}
        try:
            self.channel.send(json.dumps(order).encode())
            answer = json.loads(self.channel.recv(1 << 16))
        except (OSError, ValueError) as error:
            return f"the process that creates the network does not answer: {error}"
        return cast("str | None", answer.get("problem"))

    def _advice(self) -> str:
        if self.setup["method"] != PACKET:
            return ""
        total = self.workers * self.shape.rate / 1e9
        return (
            f". {self.workers} workers need {total:.3g} Gbit/s of this machine, whose kernel has no netem: "
            "a switch in Python carries some 2 to 4 Gbit/s on idle cores"
        )


def _difference(before: SwitchDocument, after: SwitchDocument) -> SwitchDocument:
    """The counts between two readings; the worst lateness is that of the whole run."""
    if before["switch"] is None or after["switch"] is None:
        return after
    counts = {
        name: value if name == "worst_late_seconds" else round(value - before["switch"][name], 6)
        for name, value in after["switch"].items()
    }
    sent = list(map(sub, after["sent_bytes"], before["sent_bytes"]))
    return {"switch": counts, "sent_bytes": sent}


def _find_lateness(task: SwitchDocument) -> str | None:
    counts = task["switch"]
    if counts is None or not counts["packets"] or counts["late_packets"] <= MAX_LATE_SHARE * counts["packets"]:
        return None  # without packets of the task, a late one is the probe's
    share = min(100.0, 100 * counts["late_packets"] / counts["packets"])
    return f"the switch was late with {share:.0f} % of the packets: the machine was busy"
