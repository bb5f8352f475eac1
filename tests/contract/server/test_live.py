"""What a follower of a run gets while it runs."""

import http.client
import os
import re
import socket
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.model.run import Cluster
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.results.archive.evidence import read_last_samples
from mlbench_cli.server.live import MAX_FOLLOWERS
from mlbench_cli.server.words import live_words
from mlbench_cli.storage.store import Store
from tests.contract.local_runs import until
from tests.contract.server.dashboards import BUSY, PATIENCE, Dashboard, serve

Found = dict[str, list[dict[str, Any]]]


def follow(dashboard: Dashboard, name: str) -> Found:
    """All events of a run until its end, by their kind."""
    found = Found()
    for kind, document in dashboard.follow(name):
        found.setdefault(kind, []).append(document)
        if kind == "over":
            return found
    raise AssertionError("the stream ended early")


def lines_of(found: Found) -> list[str]:
    return [line["text"] for event in found["log"] for line in event["lines"]]


def test_a_follower_gets_status_metrics_resources_and_log_until_the_end(acting: Dashboard, program: str) -> None:
    assert acting.post("/api/v1/runs", {"name": "mine", "workers": [1], "command": program}).status == 201
    found = follow(acting, "mine-1")
    assert [text.split()[1] for text in lines_of(found)] == [str(number) for number in range(1, 11)]
    assert set(found) == {"status", "resources", "metrics", "curves", "log", "over"}
    assert found["resources"][-1]["0"]["memory"] > 0
    assert found["status"][-1]["state"] == "finished"


def test_the_use_of_the_machine_is_that_of_the_last_samples(dashboard: Dashboard) -> None:
    used = follow(dashboard, "alpha-2")["resources"][-1]["0"]
    assert used == {"cpu": 1.5, "memory": pytest.approx(1e6 / 2**20), "traffic": pytest.approx(0.003)}


@pytest.mark.parametrize(
    ("progress", "share"), [({"elapsed": 30.0, "eta": 90.0}, 0.25), ({"epoch": 3, "epochs": 4}, 0.75), ({}, None)]
)
def test_a_bar_is_as_long_as_the_part_that_is_done(progress: dict[str, float], share: float | None) -> None:
    assert live_words({"progress": progress})["share"] == share


def test_a_follower_of_a_quick_program_is_told_how_many_lines_are_missing(acting: Dashboard) -> None:
    assert acting.post("/api/v1/runs", {"name": "quick", "workers": [1], "command": "seq 9000"}).status == 201
    until(lambda: acting.ask("/api/v1/runs/quick-1").document["state"] == "finished")
    found = follow(acting, "quick-1")
    lines = lines_of(found)
    assert lines[-1] == "9000"
    assert len(lines) + sum(event["left_out"] for event in found["log"]) == 9000


@pytest.mark.slow
def test_clusters_show_the_nodes_processes_and_resources_of_running_runs(acting: Dashboard) -> None:
    idle = acting.ask("/clusters").body.decode()
    assert "no run in progress" in idle
    assert 'data-open="no"' in idle
    acting.post("/api/v1/runs", {"name": "mine", "workers": [2], "command": BUSY, "share_machine": True})
    until(lambda: "CPU in use per rank" in acting.ask("/cluster-list").body.decode())
    page = acting.ask("/clusters").body.decode()
    acting.post("/api/v1/experiments/mine/cancel", {})
    assert 'data-open="yes"' in page
    (nodes,) = re.findall(r"<caption[^>]*>Nodes of local</caption>.*?</table>", page, re.DOTALL)
    assert re.search(rf'<th scope="row">{socket.gethostname()}</th>.*mine-2.*<td[^>]*>2</td>', nodes)
    assert float(re.findall(r'cores" class="number">([0-9.]+)', nodes)[0]) > 0
    assert page.count('href="/runs/mine-2"') >= 3  # its node and two processes


def test_more_followers_than_allowed_are_refused(acting: Dashboard) -> None:
    """With a status and a reason, not in the middle of an answer."""
    acting.post("/api/v1/runs", {"name": "mine", "workers": [1], "command": "sleep 600"})
    request = (
        f"GET /api/v1/runs/mine-1/events HTTP/1.1\r\nHost: 127.0.0.1:{acting.port}\r\n"
        f"Authorization: Bearer {acting.token}\r\n\r\n"
    )
    with ExitStack() as stack:
        for _ in range(MAX_FOLLOWERS):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", acting.port), PATIENCE))
            connection.sendall(request.encode())
            assert connection.recv(12) == b"HTTP/1.1 200"
        refused = acting.ask("/api/v1/runs/mine-1/events")
        assert (refused.status, "already follow runs" in refused.document["message"]) == (503, True)

    def is_followed() -> bool:
        with socket.create_connection(("127.0.0.1", acting.port), PATIENCE) as connection:
            connection.sendall(request.encode())
            return connection.recv(12) == b"HTTP/1.1 200"

    until(is_followed)  # pages that were closed do not count any more
    acting.post("/api/v1/experiments/mine/cancel", {})


@pytest.mark.slow
def test_a_page_that_is_closed_while_its_cluster_does_not_answer_keeps_no_other_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ssh = tmp_path / "bin/ssh"
    ssh.parent.mkdir()
    ssh.write_text(f"#!/bin/sh\ntest $# -gt 20 && touch {tmp_path}/asked\nexec sleep 60\n")
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{ssh.parent}:{os.environ['PATH']}")
    (tmp_path / "home").mkdir()
    with closing(Store(tmp_path / "home")) as store:
        host = {"name": "m0", "login": "m0", "slots": 1, "address": "192.0.2.1", "interface": None}
        store.record_cluster(Cluster("far", "hosts", details={"folder": "~/far", "hosts": [host]}))
        store.record_run(RunSpec("far-1", "far", "hosts", "custom", "custom", ("true",), "gloo", 1))
    with serve(tmp_path / "home") as dashboard:
        connection = http.client.HTTPConnection("127.0.0.1", dashboard.port, timeout=PATIENCE)
        headers = {"Authorization": f"Bearer {dashboard.token}"}
        connection.request("GET", "/api/v1/runs/far-1/events", headers=headers)
        assert connection.getresponse().status == 200
        until((tmp_path / "asked").exists)
        connection.close()
        begun = time.monotonic()
        while time.monotonic() < begun + 4:
            assert dashboard.ask("/static/live.js").status
            time.sleep(0.1)
        assert time.monotonic() - begun < 8  # ssh sleeps for a minute


def test_only_the_end_of_the_samples_is_read(tmp_path: Path) -> None:
    path = tmp_path / "resources.jsonl"
    rows = [f'{{"rank": {number % 2}, "time": {number}, "cpu_seconds": {number}}}\n' for number in range(10_000)]
    path.write_text("".join(rows) + '{"rank": 0, "ti')  # a line that is being written
    found = list(read_last_samples(path, 4096))
    assert 40 < len(found) < 120
    assert found[-1]["cpu_seconds"] == 9999
    assert list(read_last_samples(tmp_path / "none")) == []
