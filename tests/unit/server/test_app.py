"""Errors as answers: statuses, messages and hints, as a page for a browser and as JSON for programs."""

import asyncio
import json
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("jinja2")

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from mlbench_cli.errors import MlbenchError, NotFoundError, UnreachableError
from mlbench_cli.server import app, discovery
from mlbench_cli.server.config import ServerConfig
from mlbench_cli.server.security import BodyTooLong


def request(path: str, accept: str = "", method: str = "GET") -> Request:
    headers = [(b"accept", accept.encode())] if accept else []
    return Request({"type": "http", "method": method, "path": path, "query_string": b"", "headers": headers})


HANDLERS: dict[str, tuple[Any, Exception, int, str, str | None]] = {
    "an error of mlbench": (
        *(app._explain, NotFoundError("There is no run.", hint="mlbench status"), 404),
        *("There is no run.", "mlbench status"),
    ),
    "one without a hint": (app._explain, MlbenchError("It broke."), 500, "It broke.", None),
    "a long request": (app._refuse_body, BodyTooLong(), 413, "The request is larger than 65536 bytes.", None),
    "an unknown page": (app._explain_status, HTTPException(404), 404, "There is no such page.", None),
    "another method": (app._explain_status, HTTPException(405), 405, "POST is not supported here.", None),
    "another status": (app._explain_status, HTTPException(418, "I am a teapot"), 418, "I am a teapot", None),
    "a disk": (app._explain_crash, OSError(28, "full"), 500, "Operating system error: [Errno 28] full.", None),
    "a mistake": (app._explain_crash, KeyError("secret"), 500, "Internal error: KeyError.", None),
}


@pytest.mark.parametrize(("handler", "error", "status", "message", "hint"), HANDLERS.values(), ids=[*HANDLERS])
@pytest.mark.parametrize("path", ["/api/runs", "/runs/x"])
def test_programs_get_json(
    handler: Any, error: Exception, status: int, message: str, hint: str | None, path: str
) -> None:
    accept = "text/html" if path.startswith("/api/") else "application/json"
    answer: Response = asyncio.run(handler(request(path, accept, "POST"), error))
    assert answer.status_code == status
    assert json.loads(bytes(answer.body)) == {"status": "ERROR", "message": message, "hint": hint, "data": {}}


def test_browsers_get_a_page() -> None:
    error = NotFoundError("There is no <run>.", hint="mlbench status")
    answer: Response = asyncio.run(app._explain(request("/runs/x", "text/html,*/*"), error))
    text = bytes(answer.body).decode()
    assert (answer.status_code, answer.media_type) == (404, "text/html")
    assert "There is no &lt;run&gt;." in text
    assert "<code>mlbench status</code>" in text


# --- runs that other machines start ---------------------------------------------------------------------------------


def test_new_runs_of_the_shown_cluster_are_looked_for_every_half_minute(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    answers: list[Exception | None] = [None, UnreachableError("away"), OSError("full"), None]
    calls: list[Any] = []

    class Client:
        """Discovers nothing, or fails as prepared."""

        def __init__(self, home: Any) -> None:
            assert home == tmp_path

        def __enter__(self) -> "Client":
            return self

        def __exit__(self, *_: object) -> None:
            calls.append("closed")

        def discover(self, cluster: str) -> None:
            calls.append(cluster)
            if not answers:
                raise KeyboardInterrupt
            if (error := answers.pop(0)) is not None:
                raise error

    monkeypatch.setattr(discovery, "Client", Client)
    monkeypatch.setattr("mlbench_cli.server.discovery.time.sleep", calls.append)
    with pytest.raises(KeyboardInterrupt):
        discovery.keep_discovering(ServerConfig(tmp_path, 8080, cluster="far"))
    assert calls == ["far", "closed", 30.0] * 4 + ["far", "closed"]
