"""What the agent does with the process that creates its network, which is a stand-in here."""

import json
import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlbench_cli.agent.network import shaped
from mlbench_cli.agent.network.hub import PACKET
from mlbench_cli.agent.network.namespaces import NEW_NETWORK, NEW_USER, ShapingError
from mlbench_cli.agent.network.shaped import ATTEMPTS, ShapedNetwork, SwitchDocument, _difference, _find_lateness
from mlbench_cli.model.network import parse_network

SHAPE = "50mbit,20ms"


class Hub:
    """The process that creates networks. It answers once and passes on so many descriptors."""

    answer: bytes = json.dumps({"method": "netem", "user_namespace": False}).encode()
    is_stubborn = False  # it does not end with its channel

    def __init__(self, words: list[str], pass_fds: list[int], stdin: int) -> None:
        self.calls: list[str] = []
        self.words, self.passed, self.stdin = words, pass_fds, stdin
        self.end = socket.socket(fileno=os.dup(pass_fds[0]))
        passed = [os.open(os.devnull, os.O_RDONLY) for _ in range(3 if b"method" in self.answer else 0)]
        socket.send_fds(self.end, [self.answer], passed)
        for descriptor in passed:
            os.close(descriptor)

    def wait(self, timeout: float | None = None) -> None:
        self.calls.append(f"wait {timeout}")
        if timeout is not None and self.is_stubborn:
            raise subprocess.TimeoutExpired("hub", timeout)

    def kill(self) -> None:
        self.calls.append("kill")


Make = Callable[..., tuple[ShapedNetwork, Hub]]


@pytest.fixture
def hubs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Hub]]:
    """The hubs that networks have started, in order."""
    found: list[Hub] = []

    def start(*words: Any, **more: Any) -> Hub:
        found.append(Hub(*words, **more))
        return found[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    yield found
    for hub in found:
        hub.end.close()


@pytest.fixture
def make(hubs: list[Hub], monkeypatch: pytest.MonkeyPatch) -> Make:
    """Make a network of two workers whose hub answers as it is told."""

    def create(**answer: object) -> tuple[ShapedNetwork, Hub]:
        document = {"method": "netem", "user_namespace": False, **answer}
        monkeypatch.setattr(Hub, "answer", json.dumps(document).encode())
        return ShapedNetwork(parse_network(SHAPE), 2), hubs[-1]

    return create


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


# --- what is closed -------------------------------------------------------------------------------------------------


def test_a_network_that_is_closed_keeps_no_descriptor_that_keeps_it_alive(make: Make) -> None:
    """Each is a namespace, which the kernel drops with its last descriptor."""
    network, hub = make()
    descriptors = list(network._descriptors)
    assert [is_open(descriptor) for descriptor in descriptors] == [True] * 3
    network.close()
    assert [is_open(descriptor) for descriptor in descriptors] == [False] * 3
    assert network.channel.fileno() == -1
    assert hub.calls == ["wait 5", "kill", "wait None"]


def test_a_hub_that_does_not_end_with_its_channel_is_killed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hub, "is_stubborn", True)
    network, hub = make()
    network.close()
    assert hub.calls == ["wait 5", "kill", "wait None"]


def test_a_network_that_is_closed_twice_closes_no_descriptor_of_others(make: Make) -> None:
    network, _ = make()
    network.close()
    others = [os.open(os.devnull, os.O_RDONLY) for _ in range(10)]  # they have the numbers that were closed
    network.close()
    assert all(map(is_open, others))
    for other in others:
        os.close(other)


@pytest.mark.parametrize("answer", [b'{"problem": "no room for it"}', b""])
def test_a_hub_that_cannot_create_the_network_is_ended_and_its_reason_told(
    hubs: list[Hub], monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    monkeypatch.setattr(Hub, "answer", answer)
    if not answer:
        monkeypatch.setattr(socket, "recv_fds", lambda *_: (b"", [], 0, None))
    with pytest.raises(ShapingError, match="no room for it" if answer else "the process that makes it ended at once"):
        ShapedNetwork(parse_network(SHAPE), 2)
    assert hubs[-1].calls[-1] == "wait None"


def test_a_hub_that_says_nothing_is_given_up(hubs: list[Hub], monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(channel: socket.socket, *_: object) -> None:
        assert channel.gettimeout() == shaped.SETUP_SECONDS
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "recv_fds", wait)
    with pytest.raises(ShapingError, match=r"it was not created within 30 s: timed out"):
        ShapedNetwork(parse_network(SHAPE), 2)
    assert "kill" in hubs[-1].calls


# --- who enters what ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_user", [False, True])
def test_a_rank_enters_the_network_of_its_worker(make: Make, monkeypatch: pytest.MonkeyPatch, is_user: bool) -> None:
    entered: list[object] = []
    monkeypatch.setattr(shaped, "enter", lambda descriptor, kind: entered.append((descriptor, kind)))
    monkeypatch.setattr(shaped, "become_user_again", lambda user, group: entered.append((user, group)))
    network, _ = make(user_namespace=is_user)
    first, _, second = network._descriptors
    network.enter_worker(1)
    own = [(first, NEW_USER)] if is_user else []
    again = [(os.geteuid(), os.getegid())] if is_user else []
    assert entered == [*own, (second, NEW_NETWORK), *again]
    network.close()


# --- probes ---------------------------------------------------------------------------------------------------------


def count_probes(monkeypatch: pytest.MonkeyPatch, fits: list[bool]) -> list[str]:
    """Replace the probe by one that fits or not, time after time; the stages that were probed."""
    stages: list[str] = []

    def probe(self: ShapedNetwork, stage: str) -> dict[str, object]:
        stages.append(stage)
        return {"number": len(stages)}

    monkeypatch.setattr(ShapedNetwork, "probe", probe)
    monkeypatch.setattr(
        shaped, "find_deviations", lambda _, report: [] if fits[report["number"] - 1] else ["it is not"]
    )
    counted = {"switch": None, "sent_bytes": [1, 2]}
    monkeypatch.setattr(ShapedNetwork, "_count", lambda self: counted)
    return stages


def test_a_probe_that_fits_is_not_repeated(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    stages = count_probes(monkeypatch, [True])
    network, _ = make()
    network.verify()
    assert (stages, network.document["attempts"], network.document["probes"]) == (["before"], 1, [{"number": 1}])
    network.close()


def test_a_probe_is_tried_until_it_fits(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    stages = count_probes(monkeypatch, [False, True])
    network, _ = make()
    network.verify()
    assert (len(stages), network.document["probes"]) == (2, [{"number": 2}])
    network.close()


@pytest.mark.parametrize(("method", "has_advice"), [(PACKET, True), ("netem", False)])
def test_a_network_that_never_fits_is_refused(
    make: Make, monkeypatch: pytest.MonkeyPatch, method: str, has_advice: bool
) -> None:
    stages = count_probes(monkeypatch, [False] * ATTEMPTS)
    network, _ = make(method=method)
    with pytest.raises(ShapingError, match=r"requested 50mbit,20ms, but it is not") as caught:
        network.verify()
    assert (len(stages), network.document["probes"]) == (ATTEMPTS, [])
    assert ("2 workers need 0.1 Gbit/s of this machine" in str(caught.value)) is has_advice
    network.close()


def test_a_probe_after_the_task_that_does_not_fit_is_kept_as_evidence(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    count_probes(monkeypatch, [True] + [False] * ATTEMPTS)
    network, hub = make()
    network.verify()
    network.finish(str(tmp_path / "shaping.json"))
    document = json.loads((tmp_path / "shaping.json").read_text())
    assert document["probes"] == [{"number": 1}, {"number": 1 + ATTEMPTS}]
    assert (document["notes"], document["attempts"]) == ([], 1 + ATTEMPTS)
    assert "kill" in hub.calls


@pytest.mark.parametrize("error", [OSError("gone"), ValueError("gone"), ShapingError("gone")])
def test_a_network_that_breaks_leaves_a_note_and_its_document(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception
) -> None:
    def fail(self: ShapedNetwork) -> None:
        raise error

    monkeypatch.setattr(ShapedNetwork, "_count", fail)
    network, hub = make()
    network.finish(str(tmp_path / "shaping.json"))
    document = json.loads((tmp_path / "shaping.json").read_text())
    assert (document["notes"], document["task"], document["probes"]) == (["after the task: gone"], None, [])
    assert "kill" in hub.calls


# --- links and counts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rate", "asked"), [(None, 50e6), (0.0, 0.0), (1e6, 1e6)])
def test_a_link_gets_the_rate_that_is_asked_for_or_its_own(make: Make, rate: float | None, asked: float) -> None:
    network, hub = make()
    hub.end.send(b"{}")
    assert network.change_link(1, rate=rate, loss=0.25) is None
    assert json.loads(hub.end.recv(1000)) == {"link": 1, "rate": asked, "loss": 0.25}
    network.close()


def test_why_a_link_cannot_be_changed_is_told(make: Make) -> None:
    network, hub = make()
    hub.end.send(b'{"problem": "no such link"}')
    assert network.change_link(7) == "no such link"
    hub.end.close()
    answer = network.change_link(1)
    assert answer is not None
    assert answer.startswith("the process that creates the network does not answer: ")
    network.close()


def counted(packets: float, late: float, worst: float, *sent: int) -> SwitchDocument:
    return {"switch": {"packets": packets, "late_packets": late, "worst_late_seconds": worst}, "sent_bytes": list(sent)}


def test_what_the_task_sent_is_what_was_counted_in_between() -> None:
    found = _difference(counted(10, 1, 0.5, 100, 200), counted(30, 4, 0.7, 150, 900))
    assert found == counted(20, 3, 0.7, 50, 700)
    kernel: SwitchDocument = {"switch": None, "sent_bytes": [1]}
    after = counted(1, 0, 0.0, 5)
    assert (_difference(kernel, after), _difference(after, kernel)) == (after, kernel)


@pytest.mark.parametrize(
    ("packets", "late", "note"),
    [
        (100, 5, None),
        (100, 6, "6 %"),
        (100, 150, "100 %"),
        (0, 3, None),  # those of the probe
    ],
)
def test_a_switch_that_was_late_with_more_than_a_twentieth_is_noted(packets: int, late: int, note: str | None) -> None:
    found = _find_lateness(counted(packets, late, 0.1))
    assert found == (note and f"the switch was late with {note} of the packets: the machine was busy")
    assert _find_lateness({"switch": None, "sent_bytes": []}) is None


# --- what is started ------------------------------------------------------------------------------------------------


def test_the_hub_is_told_workers_rate_and_delay_and_the_document_begins_empty(make: Make) -> None:
    network, hub = make(mtu=1500)
    assert hub.words[1:4] == ["-I", "-S", "-c"]  # no file of the user's, no installed package
    assert hub.words[4].endswith("from mlbench_cli.agent.network.hub import main; sys.exit(main(sys.argv[1:]))")
    assert hub.words[5:] == [str(shaped.ROOT), str(hub.passed[0]), "2", "50000000.0", "0.02"]
    assert (hub.stdin, network.channel.gettimeout()) == (subprocess.DEVNULL, shaped.SETUP_SECONDS)
    assert network.document == {
        "schema_version": 1,
        "asked": SHAPE,
        "method": "netem",
        "setup": {"method": "netem", "user_namespace": False, "mtu": 1500},
        "attempts": 0,
        "probes": [],
        "task": None,
        "notes": [],
    }
    network.close()


class Prober:
    """One of the processes that measure; the first of them reports."""

    first: Any

    def __init__(self, worker: int, words: list[str]) -> None:
        self.worker, self.words = worker, words
        self.calls: list[str] = []
        self.answer: bytes | Exception = self.first
        self.is_stubborn = False
        self.stdout = SimpleNamespace(close=lambda: self.calls.append("close"))

    def communicate(self, timeout: float) -> tuple[bytes, None]:
        self.calls.append(f"communicate {timeout:g}")
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer, None

    def wait(self, timeout: float | None = None) -> None:
        if timeout is not None and self.is_stubborn:
            raise subprocess.TimeoutExpired("probe", timeout)

    def kill(self) -> None:
        self.calls.append("kill")


@pytest.fixture
def probers(monkeypatch: pytest.MonkeyPatch) -> list[Prober]:
    found: list[Prober] = []

    def start(self: ShapedNetwork, worker: int, words: list[str]) -> Prober:
        found.append(Prober(worker, words))
        return found[-1]

    monkeypatch.setattr(Prober, "first", b'{"rate": 5}', raising=False)
    monkeypatch.setattr(ShapedNetwork, "_start_in", start)
    return found


def test_a_probe_runs_among_all_workers_and_the_first_reports(make: Make, probers: list[Prober]) -> None:
    network, _ = make()
    assert network.probe("before") == {"rate": 5}
    assert [prober.worker for prober in probers] == [0, 1]
    assert [prober.words[6:] for prober in probers] == [[str(n), "2", "before", "10.77.0.1:7077"] for n in (0, 1)]
    assert "task_images.harness.network_probe" in probers[0].words[4]
    assert [prober.calls for prober in probers] == [["communicate 90", "kill", "close"], ["kill", "close"]]
    network.close()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (subprocess.TimeoutExpired("probe", 90), "it is too slow to be measured within 90 s"),
        (b"", "the probe failed: Expecting value"),
        (OSError("gone"), "the probe failed: gone"),
        (subprocess.SubprocessError("preexec"), "the probe failed: preexec"),
    ],
)
def test_a_probe_without_a_report_says_why_and_leaves_no_process(
    make: Make, probers: list[Prober], monkeypatch: pytest.MonkeyPatch, answer: object, reason: str
) -> None:
    monkeypatch.setattr(Prober, "first", answer)
    network, _ = make()
    with pytest.raises(ShapingError, match=reason):
        network.probe("before")
    assert [prober.calls[-2:] for prober in probers] == [["kill", "close"]] * 2
    network.close()


def test_the_hub_counts_when_it_is_asked(make: Make) -> None:
    network, hub = make()
    hub.end.send(b'{"switch": null, "sent_bytes": [3, 4]}')
    assert network._count() == {"switch": None, "sent_bytes": [3, 4]}
    assert hub.end.recv(100) == b"count"
    network.close()


def test_the_end_of_the_hub_is_noticed(make: Make) -> None:
    """The agent keeps no copy of the hub's end of their channel."""
    network, hub = make()
    hub.end.close()
    network.channel.settimeout(5)
    assert network.channel.recv(10) == b""
    network.close()


@pytest.mark.parametrize(("is_verified", "packets", "sent"), [(True, 20, [50, 700]), (False, 30, [150, 900])])
def test_what_probes_have_sent_is_not_the_tasks(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_verified: bool, packets: int, sent: list[int]
) -> None:
    count_probes(monkeypatch, [True, True])
    network, _ = make()
    counts = iter([counted(10, 0, 0.0, 100, 200)] * is_verified + [counted(30, 0, 0.0, 150, 900)])
    monkeypatch.setattr(ShapedNetwork, "_count", lambda self: next(counts))
    if is_verified:
        network.verify()
    network.finish(str(tmp_path / "shaping.json"))
    task = json.loads((tmp_path / "shaping.json").read_text())["task"]
    assert (task["switch"]["packets"], task["sent_bytes"]) == (packets, sent)


def test_the_programs_are_found_below_the_folder_of_the_packages() -> None:
    assert (shaped.ROOT / "mlbench_cli/agent/network/hub.py").exists()
    assert (shaped.ROOT / "task_images/harness/network_probe.py").exists()
