"""TLS to API servers: verification of certificates, and explanations of failed connections.

Standard library only at import.
"""

import os
import ssl
from collections.abc import Callable
from threading import Lock
from typing import Any

# Messages of failed connections, their meaning and remedy. OpenSSL, urllib3 and the SDKs use similar wording.
_CAUSES = (
    (
        ("Hostname mismatch", "IP address mismatch"),
        "The server's certificate is for other names: check the server's address in the kubeconfig, or its "
        "tls-server-name.",
    ),
    (
        ("CERTIFICATE_VERIFY_FAILED", "certificate verify failed"),
        "The certificate of the server is not trusted. A proxy that opens TLS needs its certificate authority to be "
        "trusted here (SSL_CERT_FILE, REQUESTS_CA_BUNDLE, AWS_CA_BUNDLE or GRPC_DEFAULT_SSL_ROOTS_FILE_PATH); a "
        "cluster that was created again under the same address needs a new kubeconfig.",
    ),
    (
        (
            "407 ",
            "Proxy Authentication Required",
            "Unable to connect to proxy",
            "ProxyError",
            "Failed to connect to proxy",
        ),
        "The proxy refused or did not answer: check HTTPS_PROXY, or proxy-url in the kubeconfig; NO_PROXY lists "
        "addresses that bypass it.",
    ),
)


def explain_connection_failure(words: str) -> str | None:
    """An explanation of a failed connection (trust or proxy) from its message; None if it has another cause."""
    return next((hint for phrases, hint in _CAUSES if any(phrase in words for phrase in phrases)), None)


class SharedContext(ssl.SSLContext):
    """A TLS context for connections from several threads.

    urllib3 sets protocols, authorities and the client certificate for each connection. OpenSSL then frees the previous
    ones, which another thread may be copying, and the process aborts. So they are set once, and again only when their
    file changes.
    """

    def __new__(cls) -> "SharedContext":
        context = super().__new__(cls, ssl.PROTOCOL_TLS_CLIENT)
        context._lock, context._taken = Lock(), set()
        return context

    _lock: Lock
    _taken: set[tuple[object, ...]]

    def set_alpn_protocols(self, alpn_protocols: Any) -> None:
        self._take(("protocols", *alpn_protocols), super().set_alpn_protocols, alpn_protocols)

    def load_verify_locations(self, cafile: Any = None, capath: Any = None, cadata: Any = None) -> None:
        what = ("authorities", cafile, _changed(cafile), capath, cadata)
        self._take(what, super().load_verify_locations, cafile, capath, cadata)

    def load_cert_chain(self, certfile: Any, keyfile: Any = None, password: Any = None) -> None:
        what = ("certificate", certfile, _changed(certfile), keyfile, _changed(keyfile))
        self._take(what, super().load_cert_chain, certfile, keyfile, password)

    def _take(self, what: tuple[object, ...], take: Callable[..., None], *arguments: Any) -> None:
        with self._lock:
            if what not in self._taken:
                take(*arguments)
                self._taken.add(what)


def _changed(path: Any) -> int | None:
    """The modification time of the file; None without a file."""
    try:
        return os.stat(path).st_mtime_ns if path else None
    except OSError:
        return None  # OpenSSL's own message is better


def create_context(settings: Any) -> ssl.SSLContext:
    """The TLS context for the official client's configuration, without the strict check of RFC 5280.

    Python 3.13 enables that check. It rejects certificate authorities without an authority key identifier, which
    EKS clusters born before 2020 and some of kubeadm's have ("Missing Authority Key Identifier",
    kubernetes-client/python#2394). Chain, name and dates are still verified.
    """
    context = SharedContext()
    context.hostname_checks_common_name = False
    if not settings.verify_ssl:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context
