"""What the client sends to an API server and what it makes of the answers, with connections that are the test's own."""

import pytest

from mlbench_cli.kube.api import (
    error_of,
)

POD = "/api/v1/namespaces/n/pods/p"


# --- requests -------------------------------------------------------------------------------------------------------


# --- retries --------------------------------------------------------------------------------------------------------


# --- clocks ---------------------------------------------------------------------------------------------------------


# --- credentials ----------------------------------------------------------------------------------------------------


# --- who does not answer --------------------------------------------------------------------------------------------


# --- streams --------------------------------------------------------------------------------------------------------


# --- websockets -----------------------------------------------------------------------------------------------------


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "path", "hint", "code", "exit_code"),
    [
        (401, "/x", "Log in to the cluster again.", "credentials", 3),
        (403, "/x", "mlbench doctor lists the rights that are needed.", "credentials", 3),
        (404, "/x", None, "not_found", 4),
        (409, "/x", None, "usage", 2),
        (410, "/x", None, "kubernetes_api", 1),
        (418, "/x", None, "kubernetes_api", 1),
        (503, "/x", None, "unreachable", 10),
        (502, f"{POD}/log", None, "node_unreachable", 10),
    ],
)
def test_an_error_has_the_servers_words_and_says_how_to_go_on(
    status: int, path: str, hint: str | None, code: str, exit_code: int
) -> None:
    error = error_of(status, b'{"message": "its words", "reason": "Why"}', f"GET {path}", 7.5)
    document = error.to_dict()["error"]
    assert document["message"] == f'The cluster refused GET {path}: "its words" ({status} Why).'
    assert (document["hint"], document["code"], error.exit_code) == (hint, code, exit_code)
    retry = {} if status in (401, 403, 404, 409) else {"retry_after": 7.5}
    assert document["details"] == {"status": status, "reason": "Why", **retry}
    assert (error.status, error.reason) == (status, "Why")


@pytest.mark.parametrize(
    ("content", "quoted"),
    [
        (b"", ""),
        (b"  <html>\n\t <b>502</b>  ", "<html> <b>502</b>"),
        (b'{"kind": "Status"}', '{"kind": "Status"}'),
        (b"[1]", "[1]"),
        (b"x" * 301, "x" * 300),
        (b"\xff", "\ufffd"),
    ],
)
def test_an_answer_without_a_message_is_quoted(content: bytes, quoted: str) -> None:
    assert error_of(418, content, "GET /x").message == f'The cluster refused GET /x: "{quoted}" (418).'


# --- connections ----------------------------------------------------------------------------------------------------
