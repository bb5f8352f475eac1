"""The probe of the network, with real processes and sockets."""

import io
import itertools
import json
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlbench_cli.agent.machine import free_port
from mlbench_cli.agent.network import probe as network

ROOT = Path(__file__).parents[3]
SECONDS = 200


def measure(size: int) -> Any:
    places = [f"127.0.0.1:{free_port()}" for _ in range(size)]
    words = [sys.executable, "-m", "mlbench_cli.agent.network.probe"]
    nodes = [
        subprocess.Popen([*words, str(node), "before", "token", *places], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for node in range(size)
    ]
    texts = [node.communicate(timeout=SECONDS)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0] * size
    assert texts[1:] == [""] * (size - 1)
    return json.loads(texts[0])


@pytest.mark.parametrize("size", [2, 3])
def test_nodes_of_one_machine_take_the_short_form(size: int) -> None:
    report = measure(size)
    assert "error" not in report, report["error"]
    assert (report["stage"], report["form"], report["nodes"], report["networks"]) == ("before", "short", size, 1)
    assert [(link["from"], link["to"]) for link in report["links"]] == [(n, (n + 1) % size) for n in range(size)]
    assert all(0 < link["rtt_p50_seconds"] <= link["rtt_p90_seconds"] for link in report["links"])
    assert report["links"][0]["alone_bits_per_second"] > 0
    assert {row["interface"] for row in report["counters"]} == {"lo"}
    assert len(report["counters"]) == size
    assert all(row["tx_bytes"] > 0 and row["retransmits"] >= 0 for row in report["counters"])


def test_a_node_that_does_not_come_is_a_report_and_not_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(network, "CONNECT_SECONDS", 0.2)
    assert network.main(["0", "before", "token", *(f"127.0.0.1:{free_port()}" for _ in range(2))]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["stage"] == "before"
    assert "Connection refused" in report["error"]


def test_what_comes_with_the_greeting_is_not_lost() -> None:
    """Node 0 may order the first ping while a neighbor has not yet read who connected."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        neighbor = network.connect(listener.getsockname()[:2], b"secret data 1")
        neighbor.socket.sendall(b"xy" + bytes(5))
        line = network.accept(listener, b"secret", {"data 1"})["data 1"]
        assert [line.read_byte(), line.read_byte()] == [b"x", b"y"]
        line.receive_block(5, bytearray(8))
        neighbor.close()
        assert line.read_byte() == b""
        line.close()


def test_a_stranger_is_not_taken_for_a_neighbor() -> None:
    """It speaks first, without the token; the neighbor that has it comes second."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        place = listener.getsockname()[:2]
        found: dict[str, network.Line] = {}
        thread = threading.Thread(target=lambda: found.update(network.accept(listener, b"secret", {"data 1"})))
        thread.start()
        stranger = network.connect(place, b"guess data 1")
        neighbor = network.connect(place, b"secret data 1")
        thread.join(SECONDS)
        assert stranger.socket.recv(1) == b""  # it was turned away
        found["data 1"].write("welcome")
        assert neighbor.read() == "welcome"
        for line in (stranger, neighbor, found["data 1"]):
            line.close()


def test_counters_are_those_of_one_interface() -> None:
    assert network.read_counters("lo").keys() >= {"rx_bytes", "tx_bytes", "rx_dropped", "tx_dropped", "retransmits"}
    assert network.read_counters(None) == {"interface": None, "retransmits": network.read_counters("lo")["retransmits"]}


def test_each_counter_is_that_of_its_column(monkeypatch: pytest.MonkeyPatch) -> None:
    names = "face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs drop fifo colls"
    files = {
        "/proc/net/dev": f"{names}\n eth0: {' '.join(map(str, range(16)))}\neth01: {' '.join(['99'] * 16)}\n",
        "/proc/net/snmp": "Tcp: InSegs RetransSegs InErrs\nTcp: 7 5 3\n",
    }
    with monkeypatch.context() as patch:  # a test cannot have a kernel of its own
        patch.setattr("builtins.open", lambda path, **_: io.StringIO(files[path]))
        found = network.read_counters("eth0")
    received = {"rx_bytes": 0, "rx_packets": 1, "rx_dropped": 3}
    sent = {"tx_bytes": 8, "tx_packets": 9, "tx_dropped": 11}
    assert found == {"interface": "eth0", **received, **sent, "retransmits": 5}


def test_a_rate_is_of_the_bits_that_were_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = itertools.count(0.0, 2.0)
    monkeypatch.setattr(network, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        there = socket.create_connection(listener.getsockname())
        line = network.Line(listener.accept()[0])
        there.sendall(bytes(1000))
        assert line.receive_block(1000, bytearray(100)) == 800 * 8 / 2  # the first fifth is TCP's slow start
        there.close()
        line.close()


@pytest.mark.parametrize(
    ("rates", "found", "taken"),
    [([4.9], 4.9, 1), ([9.0, 5.1], 5.1, 2), ([60.0, 50.0, 55.0, 70.0], 50.0, 4)],
    ids=["no burst", "a late reader", "a token bucket"],
)
def test_a_late_reader_is_no_burst(rates: list[float], found: float, taken: int) -> None:
    left = list(rates)
    assert network.find_least(lambda: left.pop(0), 5.2) == found
    assert len(rates) - len(left) == taken
