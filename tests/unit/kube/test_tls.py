"""A TLS context that threads share is changed once, not by each connection."""

import os
import ssl
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import certifi
import pytest
from urllib3.util.ssl_ import ssl_wrap_socket

from mlbench_cli.kube.tls import SharedContext, create_context, explain_connection_failure

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


@pytest.mark.parametrize("verifies", [True, False])
def test_certificates_are_verified_unless_the_settings_say_otherwise(verifies: bool) -> None:
    context = create_context(SimpleNamespace(verify_ssl=verifies))
    assert (context.verify_mode is ssl.CERT_REQUIRED, context.check_hostname) == (verifies, verifies)
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2
    assert not context.verify_flags & ssl.VERIFY_X509_STRICT


@pytest.mark.parametrize(
    ("words", "begins"),
    [
        ("[SSL: CERTIFICATE_VERIFY_FAILED] unable to get local issuer certificate", "The certificate of the server"),
        ("x509: certificate verify failed", "The certificate of the server"),
        ("Tunnel connection failed: 407 Proxy Authentication Required", "The proxy refused"),
        ("407 ", "The proxy refused"),
        ("Proxy Authentication Required", "The proxy refused"),
        ("Unable to connect to proxy", "The proxy refused"),
        ("ProxyError('Cannot connect')", "The proxy refused"),
        ("Failed to connect to proxy", "The proxy refused"),
        ("Connection refused", None),
        ("40700 bytes", None),
    ],
)
def test_trust_and_proxies_are_explained_and_nothing_else(words: str, begins: str | None) -> None:
    """In the words of OpenSSL, urllib3 and the clouds' SDKs."""
    hint = explain_connection_failure(words)
    assert (hint is None) if begins is None else (hint is not None and hint.startswith(begins))


def test_a_name_in_the_old_place_of_a_certificate_does_not_count() -> None:
    """RFC 6125: the common name is no host's name."""
    assert create_context(SimpleNamespace(verify_ssl=True)).hostname_checks_common_name is False


def test_a_client_certificate_is_read_again_when_its_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Any] = []
    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", lambda self, *words: read.append(words))
    context = SharedContext()
    file = tmp_path / "pem"
    file.touch()
    os.utime(file, ns=(1, 1))
    for _ in range(2):
        context.load_cert_chain(str(file))
    assert read == [(str(file), None, None)]
    os.utime(file, ns=(2, 2))
    context.load_cert_chain(str(file))
    context.load_cert_chain(str(file), str(tmp_path / "key"))
    context.load_cert_chain(str(tmp_path / "none"))
    assert [words[:2] for words in read[1:]] == [
        (str(file), None),
        (str(file), str(tmp_path / "key")),
        (str(tmp_path / "none"), None),  # OpenSSL says that it is not there
    ]
