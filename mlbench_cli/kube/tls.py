"""TLS to API servers: how strictly certificates are checked, and what a failed connection means.

Standard library only at import.
"""

import ssl
from typing import Any

# What the words of a failed connection mean, with what to do. OpenSSL's, urllib3's and the SDKs' words are alike.
_CAUSES = (
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
        "The proxy refused or did not answer: look at HTTPS_PROXY; NO_PROXY names addresses that go past it.",
    ),
)


def explain_connection_failure(words: str) -> str | None:
    """What a connection that failed with these words lacks: trust or a proxy; None if the words name neither."""
    return next((hint for phrases, hint in _CAUSES if any(phrase in words for phrase in phrases)), None)


def create_context(settings: Any) -> ssl.SSLContext:
    """The TLS context for the official client's settings, without the strict check of RFC 5280.

    Python 3.13 switches that check on. It refuses certificate authorities without an authority key identifier, which
    EKS clusters born before 2020 and some of kubeadm's have ("Missing Authority Key Identifier",
    kubernetes-client/python#2394). Chain, name and dates are checked all the same.
    """
    from urllib3.util.ssl_ import create_urllib3_context

    context = create_urllib3_context(cert_reqs=ssl.CERT_REQUIRED if settings.verify_ssl else ssl.CERT_NONE)
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context
