"""Files in object stores, from any byte offset: s3://BUCKET/KEY with boto3, gs://BUCKET/KEY with Google's JSON API.

Uses the credentials that boto3 and google.auth find; without any, requests are unsigned, which works for public
buckets. AWS_ENDPOINT_URL and STORAGE_EMULATOR_HOST select other servers, as in the vendors' own tools.
"""

import http.client
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.message import Message
from importlib import import_module
from typing import Any, NamedTuple

from task_images.harness.errors import EnvironmentUnfitError, install_hint

SCHEMES = ("s3", "gs")
READ_ONLY = "https://www.googleapis.com/auth/devstorage.read_only"
GOOGLE = "https://storage.googleapis.com"


class Source(NamedTuple):
    """An open file. `read(n)` returns the next bytes; `goes_on`: whether it starts at the requested offset; `total`:
    the size of the whole file, 0 if unknown."""

    read: Callable[[int], bytes]
    goes_on: bool
    total: int


@contextmanager
def open_object(url: str, start: int, timeout: float) -> Iterator[Source]:
    """The object, from byte `start`. Raises HTTPError if the request is rejected, HTTPException for a broken
    connection."""
    scheme, _, rest = url.partition("://")
    bucket, _, key = rest.partition("/")
    if scheme == "s3":
        yield _open_s3(url, bucket, key, start, timeout)
        return
    with _open_google(bucket, key, start, timeout) as response:
        stated = response.headers.get("Content-Range", "").rpartition("/")[2] or response.headers["Content-Length"]
        yield Source(response.read, start > 0 and response.status == 206, int(stated))


def _open_s3(url: str, bucket: str, key: str, start: int, timeout: float) -> Source:
    boto3, config, errors = (
        _need("boto3", "eks"),
        import_module("botocore.config"),
        import_module("botocore.exceptions"),
    )
    session = boto3.Session()
    more: dict[str, Any] = {"connect_timeout": timeout, "read_timeout": timeout}
    if session.get_credentials() is None:
        more["signature_version"] = import_module("botocore").UNSIGNED
    client = session.client("s3", config=config.Config(**more))
    try:
        answer = client.get_object(Bucket=bucket, Key=key, **({"Range": f"bytes={start}-"} if start else {}))
    except errors.ClientError as error:
        status = int(error.response["ResponseMetadata"]["HTTPStatusCode"])
        raise urllib.error.HTTPError(url, status, str(error), Message(), None) from None
    except errors.BotoCoreError as error:
        raise http.client.HTTPException(str(error)) from None

    def read(count: int) -> bytes:
        try:
            data: bytes = answer["Body"].read(count)
        except (errors.BotoCoreError, errors.HTTPClientError) as error:
            raise http.client.HTTPException(str(error)) from None
        return data

    total = str(answer.get("ContentRange", "")).rpartition("/")[2] or answer["ContentLength"]
    return Source(read, start > 0 and "ContentRange" in answer, int(total))


def _open_google(bucket: str, key: str, start: int, timeout: float) -> Any:
    server = os.environ.get("STORAGE_EMULATOR_HOST", GOOGLE).rstrip("/")
    path = f"/storage/v1/b/{urllib.parse.quote(bucket, safe='')}/o/{urllib.parse.quote(key, safe='')}?alt=media"
    request = urllib.request.Request(f"{server}{path}", headers={"Accept-Encoding": "identity"})
    if start:
        request.add_header("Range", f"bytes={start}-")
    if token := _google_token():
        request.add_header("Authorization", f"Bearer {token}")
    return urllib.request.urlopen(request, timeout=timeout)


def _google_token() -> str | None:
    """An access token from the credentials found; None without credentials."""
    auth, transport = _need("google.auth", "gke"), _need("google.auth.transport.requests", "gke")
    try:
        credentials, _ = auth.default(scopes=[READ_ONLY])
        credentials.refresh(transport.Request())
    except auth.exceptions.DefaultCredentialsError:
        return None
    except auth.exceptions.GoogleAuthError as error:
        raise EnvironmentUnfitError(
            f"Google refused the login: {error}", "gcloud auth application-default login"
        ) from None
    return str(credentials.token)


def _need(module: str, extra: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError:
        raise EnvironmentUnfitError(
            f"{module} is not installed; it is needed to read object stores", install_hint(extra)
        ) from None
