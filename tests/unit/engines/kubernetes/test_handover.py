"""How a worker sends its results to the keeper: requests, times and answers, with the test as the network."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import templates.kubernetes.keeper
from tests.fakes.clock import Clock

program: Any = templates.kubernetes.keeper
ENVIRON = {"MLBENCH_KEEPER": "[fd00::1]:29600", "MLBENCH_KEEPER_TOKEN": "secret"}


class Connection:
    """Notes a request, and answers with `status`."""

    made: list["Connection"]
    status = 200
    refuses: Exception | None = None

    def __init__(self, host: str, port: int, *, timeout: float, blocksize: int) -> None:
        self.words = (host, port, timeout, blocksize)
        self.asked: list[Any] = []
        self.is_closed = self.is_read = False
        Connection.made.append(self)

    def request(self, method: str, path: str, body: Any, headers: dict[str, str]) -> None:
        self.asked.append((method, path, body if isinstance(body, bytes) else body.read(), headers))
        if self.refuses is not None:
            raise self.refuses

    def getresponse(self) -> Any:
        return SimpleNamespace(status=self.status, read=self._read)

    def _read(self) -> bytes:
        self.is_read = True
        return b""

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    found = Clock(1000.0)
    monkeypatch.setattr(program, "time", found)
    monkeypatch.setattr(Connection, "made", [], raising=False)
    monkeypatch.setattr(program.http.client, "HTTPConnection", Connection)
    yield found
    assert all(connection.is_closed for connection in Connection.made)


def test_a_request_has_the_runs_token_and_the_digest_of_its_bytes(clock: Clock) -> None:
    program.put(ENVIRON, "/0/offer", b"42", "the-digest", 1600.0)
    (connection,) = Connection.made
    headers = {"Authorization": "Bearer secret", "X-Sha256": "the-digest"}
    assert connection.asked == [("PUT", "/0/offer", b"42", headers)]
    assert connection.words == ("[fd00::1]", 29600, 30.0, 1 << 20)
    assert connection.is_read


def test_a_file_is_sent_with_its_size(clock: Clock, tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"12345")
    program.put(ENVIRON, "/0/log", str(tmp_path / "log"), "d", 1600.0)
    ((_, _, body, headers),) = Connection.made[0].asked
    assert (body, headers["Content-Length"]) == (b"12345", "5")


@pytest.mark.parametrize("error", [BrokenPipeError(), ConnectionResetError()])
def test_a_file_that_is_refused_before_all_of_it_was_sent_has_an_answer(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    (tmp_path / "log").touch()
    monkeypatch.setattr(Connection, "refuses", error)
    monkeypatch.setattr(Connection, "status", 507)
    with pytest.raises(program.UploadRejected, match="no_room"):
        program.put(ENVIRON, "/0/log", str(tmp_path / "log"), "d", 1600.0)
    with pytest.raises(type(error)):
        program.put(ENVIRON, "/0/offer", b"5", "", 1600.0)  # an offer was heard as a whole, or not at all


@pytest.mark.parametrize(
    ("status", "word"), [(201, "status_201"), (422, "damaged"), (403, "forbidden"), (500, "status_500")]
)
def test_every_answer_but_200_is_a_refusal(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, status: int, word: str
) -> None:
    monkeypatch.setattr(Connection, "status", status)
    with pytest.raises(program.UploadRejected, match=f"^{word}$") as caught:
        program.put(ENVIRON, "/0/offer", b"5", "", 1600.0)
    assert caught.value.code == status


# --- patience -------------------------------------------------------------------------------------------------------


class Tries:
    """A handover whose requests take a second each, and fail with `error` as long as `fails` says."""

    def __init__(self, folder: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, size: int = 4 << 20) -> None:
        self.clock = clock
        self.sent: list[str] = []
        self.ends: set[float] = set()
        self.error: Exception = ConnectionRefusedError()
        self.fails = 1e9
        summary = {"worker": 3, "archive": {"size": size, "sha256": "a"}, "log": None}
        (folder / "summary.json").write_text(json.dumps(summary))
        self.environ = {"MLBENCH_WORK_DIR": str(folder)}
        monkeypatch.setattr(program, "put", self.put)

    def put(self, environ: object, path: str, what: object, sha256: str, end: float) -> None:
        self.sent.append(path)
        self.ends.add(end)
        self.clock.now += 1.0
        if len(self.sent) <= self.fails:
            raise self.error


@pytest.fixture
def tries(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Tries:
    return Tries(tmp_path, clock, monkeypatch)


@pytest.mark.parametrize(("patience", "count"), [(0.0, 1), (1.0, 1), (1.5, 2), (2.5, 2), (2.6, 3)])
def test_an_unreachable_keeper_is_tried_every_half_second(tries: Tries, patience: float, count: int) -> None:
    assert program.send(tries.environ, patience) == 1
    assert tries.sent == ["/3/offer"] * count


def test_a_transfer_has_its_time_after_the_patience(tries: Tries) -> None:
    """At 2 MiB a second, and 30 s for a connection that stands still."""
    tries.fails = 0
    assert program.send(tries.environ, 10.0) == 0
    assert tries.ends == {1000.0 + 10.0 + 30.0 + 2.0}
    assert tries.sent == ["/3/offer", "/3/archive", "/3/summary"]


def test_a_handover_that_fails_in_the_middle_begins_anew(tries: Tries) -> None:
    tries.fails, tries.error = 2, program.UploadRejected(422)
    assert program.send(tries.environ, 60.0) == 0
    assert tries.sent == ["/3/offer", "/3/offer", "/3/offer", "/3/archive", "/3/summary"]


def test_the_server_has_room_for_a_thousand_workers_that_end_together() -> None:
    assert program.Server.request_queue_size >= 1000
    assert program.Server.daemon_threads


def test_the_keeper_asks_nobody_for_the_name_of_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow name server would hold up its start."""
    monkeypatch.setattr(program.socket, "getfqdn", lambda name="": pytest.fail("it asked"))
    with program.Server(("127.0.0.1", 0), program.Handler) as server:
        assert (server.server_name, server.server_port) == ("keeper", server.server_address[1])
