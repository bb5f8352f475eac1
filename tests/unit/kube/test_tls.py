"""A TLS context that threads share is changed once, not by each connection."""

import os
import ssl
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import certifi
import pytest
from urllib3.util.ssl_ import ssl_wrap_socket

from mlbench_cli.kube.tls import create_context

METHODS = ("set_alpn_protocols", "load_verify_locations")


@pytest.fixture
def changes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The changes that OpenSSL has been asked for."""
    found: list[str] = []

    def count(name: str) -> Any:
        own = getattr(ssl.SSLContext, name)

        def change(self: ssl.SSLContext, *arguments: Any) -> None:
            found.append(name)
            own(self, *arguments)

        return change

    for name in METHODS:
        monkeypatch.setattr(ssl.SSLContext, name, count(name))
    return found


class Refusing(ssl.SSLSocket):
    """Ends a connection where TLS would begin."""

    @classmethod
    def _create(cls, *_: Any, **__: Any) -> Any:
        raise ssl.SSLError("no connection")


def test_connections_leave_the_context_as_it_is(changes: list[str], tmp_path: Path) -> None:
    authorities = tmp_path / "ca.crt"
    authorities.write_bytes(Path(certifi.where()).read_bytes())
    context = create_context(SimpleNamespace(verify_ssl=True))
    context.sslsocket_class = Refusing

    def connect() -> None:
        with pytest.raises(ssl.SSLError, match="no connection"):
            ssl_wrap_socket(object(), ca_certs=str(authorities), server_hostname="localhost", ssl_context=context)  # type: ignore[call-overload]

    for _ in range(3):
        connect()
    assert sorted(changes) == ["load_verify_locations", "set_alpn_protocols"]
    os.utime(authorities, ns=(1, 1))
    connect()
    assert sorted(changes) == ["load_verify_locations", "load_verify_locations", "set_alpn_protocols"]
