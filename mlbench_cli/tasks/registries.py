"""A small read-only client of the OCI distribution API of container registries.

Checks whether an image exists, and its digest, before money is spent and before a run is submitted. Logins come from
the caller (a cloud's token) or from Docker's configuration file, which is only read.
"""

import base64
import http.client
import json
import os
import re
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from mlbench_cli.tasks.images import ImageReference

CALL_SECONDS = 20.0
HELPER_SECONDS = 20.0
MAX_DOCUMENT = 4 << 20  # bytes of a manifest; registries must accept 4 MiB (distribution specification)
HUB = "registry-1.docker.io"
MANIFESTS = ", ".join(
    (
        "application/vnd.oci.image.index.v1+json",
        "application/vnd.docker.distribution.manifest.list.v2+json",
        "application/vnd.oci.image.manifest.v1+json",
        "application/vnd.docker.distribution.manifest.v2+json",
    )
)


class Presence(StrEnum):
    """What is known about an image."""

    PRESENT = "present"
    ABSENT = "absent"  # the registry says so
    HIDDEN = "hidden"  # it requires another login: the image may exist
    UNKNOWN = "unknown"  # the registry did not answer


@dataclass(frozen=True)
class Login:
    """A user and a password, or token, for one registry."""

    user: str
    password: str

    @property
    def basic(self) -> str:
        return base64.b64encode(f"{self.user}:{self.password}".encode()).decode()


@dataclass(frozen=True)
class FoundImage:
    """`digest` of the image if it is present, otherwise the registry's message in `words`."""

    presence: Presence
    digest: str = ""
    words: str = ""
    platforms: tuple[str, ...] = ()  # "linux/amd64", ...; empty: unknown


def find_image(image: ImageReference, login: Login | None = None) -> FoundImage:
    """Ask the image's registry for its manifest. Failures are part of the result, without an exception."""
    repository = image.repository if image.host or "/" in image.repository else f"library/{image.repository}"
    path = f"/v2/{repository}/manifests/{image.digest or image.tag}"
    login = login or find_docker_login(image.host)
    try:
        status, headers, body = _ask(image.host, path, login)
        if status < 300:
            platforms = _read_platforms(image.host, repository, body, login)
            return FoundImage(Presence.PRESENT, headers.get("docker-content-digest", ""), platforms=platforms)
    except (OSError, ValueError, http.client.HTTPException) as error:
        return FoundImage(Presence.UNKNOWN, words=str(getattr(error, "reason", None) or error))
    words = _words(body[:4000])
    if status == 404:
        return FoundImage(Presence.ABSENT, words=words)
    if status in (401, 403):
        return FoundImage(Presence.HIDDEN, words=words)
    return FoundImage(Presence.UNKNOWN, words=f"{status} {words}".strip())


def docker_folder() -> Path:
    """The folder of Docker's settings and logins; it may not exist."""
    return Path(os.environ.get("DOCKER_CONFIG") or os.path.expanduser("~/.docker"))


def find_docker_login(host: str) -> Login | None:
    """The login stored by `docker login` for a registry, also in a credential helper; None if there is none."""
    key = host or "https://index.docker.io/v1/"
    try:
        config = json.loads((docker_folder() / "config.json").read_text("utf-8"))
        helper = (config.get("credHelpers") or {}).get(host) or config.get("credsStore")
        if helper and re.fullmatch(r"[A-Za-z0-9._-]+", helper):
            return _ask_helper(helper, key)
        entry = (config.get("auths") or {}).get(key) or {}
        user, colon, password = base64.b64decode(entry.get("auth", "")).decode().partition(":")
    except (OSError, ValueError, TypeError, AttributeError):  # missing, or in another format
        return None
    return Login(user, password) if colon else None


def _ask_helper(helper: str, key: str) -> Login | None:
    try:
        done = subprocess.run(
            [f"docker-credential-{helper}", "get"], input=key, capture_output=True, text=True, timeout=HELPER_SECONDS,
            check=True,
        )  # fmt: skip
        answer = json.loads(done.stdout)
        return Login(str(answer["Username"]), str(answer["Secret"]))
    except (OSError, ValueError, KeyError, TypeError, subprocess.SubprocessError):
        return None


def _read_platforms(host: str, repository: str, manifest: bytes, login: Login | None) -> tuple[str, ...]:
    """The platforms of an image, from its index or from the configuration blob of a single manifest.

    Empty if unreadable.
    """
    try:
        document = json.loads(manifest)
        if "manifests" in document:
            found = [item.get("platform") or {} for item in document["manifests"]]
        else:
            _, _, body = _ask(host, f"/v2/{repository}/blobs/{document['config']['digest']}", login)
            found = [json.loads(body)]
        # BuildKit's attestations have the platform "unknown".
        named = [f"{item['os']}/{item['architecture']}" for item in found if item.get("os") not in (None, "unknown")]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, http.client.HTTPException):
        return ()
    return tuple(dict.fromkeys(named))


def _ask(host: str, path: str, login: Login | None) -> tuple[int, Mapping[str, str], bytes]:
    """Status, headers and body of the answer. Logs in by basic authentication or a token if required."""
    answer = _send(f"{_base(host)}{path}", {})
    if answer[0] != 401:
        return answer
    challenge = answer[1].get("www-authenticate", "")
    if challenge.lower().startswith("bearer"):
        token = _fetch_token(challenge, login)
        return _send(f"{_base(host)}{path}", {"Authorization": f"Bearer {token}"}) if token else answer
    if login is None:
        return answer
    return _send(f"{_base(host)}{path}", {"Authorization": f"Basic {login.basic}"})


def _fetch_token(challenge: str, login: Login | None) -> str | None:
    """A token from the registry's token server, anonymous or for the login."""
    fields = dict(re.findall(r'(\w+)="([^"]*)"', challenge))
    realm = fields.pop("realm", "")
    if not realm.startswith(("https://", "http://127.0.0.1", "http://localhost")):
        return None
    headers = {"Authorization": f"Basic {login.basic}"} if login else {}
    query = urllib.parse.urlencode({key: value for key, value in fields.items() if key in ("service", "scope")})
    request = urllib.request.Request(f"{realm}?{query}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=CALL_SECONDS) as answer:
            document: Any = json.load(answer)
    except urllib.error.HTTPError:
        return None
    if not isinstance(document, dict):
        return None
    return str(document.get("token") or document.get("access_token") or "") or None


def _send(url: str, headers: Mapping[str, str]) -> tuple[int, Mapping[str, str], bytes]:
    request = urllib.request.Request(url, headers={"Accept": MANIFESTS, "User-Agent": "mlbench"})
    for key, value in headers.items():
        # Blobs are redirected to a storage service that rejects an Authorization header on its signed URLs.
        request.add_unredirected_header(key, value)
    try:
        with urllib.request.urlopen(request, timeout=CALL_SECONDS) as answer:
            return answer.status, _lower(answer.headers), answer.read(MAX_DOCUMENT)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, _lower(error.headers), error.read(4000)


def _lower(headers: Any) -> dict[str, str]:
    """Headers with lower-case names."""
    return {key.lower(): value for key, value in headers.items()}


def _words(body: bytes) -> str:
    try:
        errors = json.loads(body)["errors"]
        return "; ".join(f"{item['code']}: {item.get('message', '')}".rstrip(": ") for item in errors)
    except (ValueError, KeyError, TypeError):
        return " ".join(body.decode("utf-8", "replace").split())[:200]


def _base(host: str) -> str:
    """The base URL of a registry. MLBENCH_REGISTRY_ENDPOINT replaces all of them, for tests and mirrors."""
    if endpoint := os.environ.get("MLBENCH_REGISTRY_ENDPOINT"):
        return endpoint.rstrip("/")
    name = host or HUB
    is_here = re.fullmatch(r"(localhost|127\.0\.0\.1)(:\d+)?", name) is not None
    return f"{'http' if is_here else 'https'}://{name}"
