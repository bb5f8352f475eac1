"""A dashboard that others share, by its REST API: what `--dashboard-url` of the commands talks to."""

import http.client
import json
import os
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlbench_cli.errors import (
    CannotTellError,
    CredentialError,
    DeadlineError,
    MlbenchError,
    NotFoundError,
    UnreachableError,
    UsageError,
)
from mlbench_cli.model.run import JsonObject
from mlbench_cli.util.files import replace_file
from mlbench_cli.util.text import one_line

TOKEN_VARIABLE = "MLBENCH_DASHBOARD_TOKEN"
ANSWER_SECONDS = 60.0  # without a byte
_CHUNK = 1 << 20
_ERRORS: Mapping[int, type[MlbenchError]] = {
    400: UsageError,
    401: CredentialError,
    403: CredentialError,
    404: NotFoundError,
    405: CredentialError,  # a read-only dashboard
    409: CannotTellError,
    413: UsageError,
    502: UnreachableError,
    503: UnreachableError,
    504: DeadlineError,
}


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect would carry the token to another address."""

    def redirect_request(self, req, fp, code, msg, headers, newurl):  # type: ignore[no-untyped-def]
        return None


class RemoteDashboard:
    """The dashboard at a URL, e.g. https://mlbench.example.com, or the URL with its token that mlbench serve prints.

    The token comes from the URL or from MLBENCH_DASHBOARD_TOKEN. SSL_CERT_FILE names the certificate authority of a
    private certificate. Every method raises the error that the server's status stands for, or UnreachableError.
    """

    def __init__(self, url: str) -> None:
        try:
            parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
            is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and url.isascii()
            _ = parts.port
        except ValueError:
            is_usable = False
        if not is_usable or parts.username is not None:
            raise UsageError(
                "--dashboard-url is not the URL of a dashboard.",
                hint="mlbench get-dashboard-url prints that of this machine; others begin with https://",
            )
        given = urllib.parse.parse_qs(parts.query).get("token")
        self._token = given[0] if given else os.environ.get(TOKEN_VARIABLE)
        path = parts.path.rstrip("/")
        if not self._token and "/t/" not in f"{path}/":
            raise CredentialError(
                "The dashboard needs a token.",
                hint=f"Set {TOKEN_VARIABLE}, or use the URL with ?token=... that mlbench serve prints.",
            )
        self._base = f"{parts.scheme}://{parts.netloc}{path}"
        self.host = parts.netloc
        self.is_exposed = parts.scheme == "http" and parts.hostname not in ("127.0.0.1", "localhost", "::1")

    def get(self, path: str, **query: Any) -> JsonObject:
        """The document at a path below /api/v1, e.g. get("runs", limit=5). Lists repeat their key; None is left out."""
        return self._document("GET", path, query)

    def post(self, path: str, document: JsonObject | None = None, **query: Any) -> JsonObject:
        """Post a document and return the answer."""
        return self._document("POST", path, query, json.dumps(document or {}).encode())

    def download(self, name: str, target: Path) -> int:
        """Write the archive of a run to a file, which appears only when it is complete. Returns its size in bytes."""
        try:
            with self._open("GET", f"runs/{urllib.parse.quote(name, safe='')}/archive", {}) as answer:
                declared, done = answer.headers.get("Content-Length"), 0
                with replace_file(target) as file:
                    while chunk := answer.read(_CHUNK):
                        done += len(chunk)
                        file.write(chunk)
                    if declared is not None and declared.isdecimal() and done != int(declared):
                        raise UnreachableError(f"The connection broke after {done} of {declared} bytes.")
        except (http.client.HTTPException, TimeoutError, ConnectionError) as error:
            raise self._unreachable(error) from None
        except OSError as error:
            raise UsageError(f"{target} cannot be written: {error.strerror or error}.") from None
        return done

    def _document(self, method: str, path: str, query: Mapping[str, Any], body: bytes | None = None) -> JsonObject:
        path = "/".join(urllib.parse.quote(part, safe="") for part in path.split("/"))
        try:
            with self._open(method, path, query, body) as answer:
                document = json.loads(answer.read())
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from None
        except ValueError:
            document = None
        if not isinstance(document, dict):
            raise UnreachableError(f"{self.host} does not answer like a dashboard of mlbench.", hint="mlbench serve")
        return document

    def _open(self, method: str, path: str, query: Mapping[str, Any], body: bytes | None = None) -> Any:
        words = urllib.parse.urlencode({key: value for key, value in query.items() if value is not None}, doseq=True)
        headers = {"User-Agent": "mlbench", "Accept": "application/json", "Content-Type": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        url = f"{self._base}/api/v1/{path}" + (f"?{words}" if words else "")
        request = urllib.request.Request(url, data=body, headers=headers, method=method)
        opener = urllib.request.build_opener(
            _NoRedirects, urllib.request.HTTPSHandler(context=ssl.create_default_context())
        )
        try:
            return opener.open(request, timeout=ANSWER_SECONDS)
        except urllib.error.HTTPError as error:
            raise self._explain(error) from None
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from None

    def _explain(self, error: urllib.error.HTTPError) -> MlbenchError:
        try:
            document = json.loads(error.read(1 << 16))
            message, hint = str(document["message"]), document.get("hint")
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            message, hint = f"It answered {error.code} {one_line(str(error.reason))}.", None
        kind = _ERRORS.get(error.code, MlbenchError)
        return kind(f"{self.host}: {one_line(message, 2000)}", hint=hint if isinstance(hint, str) else None)

    def _unreachable(self, error: Exception) -> UnreachableError:
        reason = one_line(str(getattr(error, "reason", error)) or type(error).__name__)
        hint = "SSL_CERT_FILE=ca.pem names its certificate authority." if "CERTIFICATE" in reason.upper() else None
        return UnreachableError(f"The dashboard at {self.host} cannot be reached: {reason}.", hint=hint)
