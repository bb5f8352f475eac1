"""Helm charts from a folder, or from a chart repository by exact version.

pyhelm's `repo` fetches the index and the chart; the rest of pyhelm is for Tiller, which Helm 3 removed. Of `repo` the
function below its two public ones is used, because pyhelm 2.14.5 is not safe with today's repositories:

* `repo_index` has no timeout and no limit of size, and parses without libyaml, so 20 MB take minutes.
* `from_repo` does not compare the index's digest, and unpacks with `extractall`: on Python 3.11 a chart can write
  outside of its folder. It turns the address "/chart.tgz" of an index into one that requests rejects, and says "None
  not found in the repository" of any missing chart.
"""

import hashlib
import io
import ipaddress
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urljoin, urlsplit

from mlbench_cli.config.extras import load_library
from mlbench_cli.errors import CredentialError, DeadlineError, MlbenchError, NotFoundError, UsageError, did_you_mean
from mlbench_cli.util.yaml_text import read_yaml
from providers.helm.archive import MAX_FILES, MAX_PACKED, MAX_UNPACKED, unpack

FLAG = "--chart-location"
FORM = "Write the repository's address, the chart and its version: https://charts.example.org/stable/CHART@1.2.3"
EXACT = re.compile(r"v?\d+\.\d+\.\d+(-[0-9A-Za-z.-]+)?(\+[0-9A-Za-z.-]+)?")
NAME = re.compile(r"[a-z]([-a-z0-9]{0,51}[a-z0-9])?")  # also the release's name; helm allows up to 53 characters
MAX_INDEX = 50 << 20  # bytes; of the largest public repository it is 20 MB
CONNECT_SECONDS = 10.0
READ_SECONDS = 30.0
FILE_SECONDS = 180.0  # timeout of one file


@dataclass(frozen=True)
class Chart:
    """A chart in a folder that exists until the block of `fetch_chart` ends. `digest` is "sha256:" and 64 hex
    digits."""

    name: str
    version: str
    source: str
    digest: str
    folder: Path
    values: Mapping[str, Any]  # the chart's own
    subcharts: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class ChartReference:
    """A chart of a repository: its address, the chart's name, its version."""

    repository: str
    name: str
    version: str


@contextmanager
def fetch_chart(location: str, read_seconds: float = READ_SECONDS) -> Iterator[Chart]:
    """Fetch the chart at DIR or REPO@VERSION into a private folder that is deleted at the end of the block.

    `read_seconds` is the read timeout of a repository.

    Raises UsageError for an invalid or damaged chart, or a wrong digest; NotFoundError if it does not exist;
    DeadlineError on a timeout.
    """
    reference = parse_chart_reference(location) if "://" in location else None
    with tempfile.TemporaryDirectory(prefix="mlbench-chart-") as folder:
        yield (
            _download_chart(reference, Path(folder), location, read_seconds)
            if reference
            else _copy_folder(Path(location), Path(folder))
        )


def parse_chart_reference(location: str) -> ChartReference:
    """Parse REPO@VERSION without network access. Raises UsageError."""
    address, at, version = location.rpartition("@")
    if not at or "/" in version:
        raise UsageError(f"{FLAG} {location} has no version; mlbench needs an exact one.", hint=FORM)
    parts = _split(address)
    if parts.username or parts.password:
        raise UsageError(f"{FLAG}: do not put passwords on a command line.", hint="Put it into ~/.netrc")
    if parts.scheme == "oci":
        raise UsageError(
            f"{FLAG} {location}: mlbench cannot download charts from image registries; helm can.",
            hint=f"helm pull {address} --version {version} --untar   and then {FLAG} {parts.path.rpartition('/')[2]}",
        )
    _check_scheme(address)
    if parts.query or parts.fragment:
        raise UsageError(f'{FLAG} {location}: "?" and "#" are not allowed here.', hint=FORM)
    repository, _, name = address.rstrip("/").rpartition("/")
    if not _split(repository).netloc:
        raise UsageError(f"{FLAG} {location} has no chart.", hint=FORM)
    if not EXACT.fullmatch(version):
        raise UsageError(f'{FLAG}: "{version}" is not an exact version such as 1.2.3.', hint=FORM)
    return ChartReference(repository, name, version)


# --- a folder of this machine ---------------------------------------------------------------------------------------


def _copy_folder(source: Path, folder: Path) -> Chart:
    """Copy the chart, so that the checked files are the ones installed later."""
    source = Path(os.path.expanduser(source))
    if not source.is_dir():
        kind = UsageError if source.exists() else NotFoundError
        what = "is not a folder" if source.exists() else "does not exist"
        raise kind(f"{FLAG} {source} {what}.", hint="Pass the folder of a chart, with its Chart.yaml, or REPO@VERSION.")
    if not (source / "Chart.yaml").is_file():
        raise UsageError(f"{FLAG} {source} is not a chart: it has no Chart.yaml.")
    digest, size, count = hashlib.sha256(), 0, 0
    for path in sorted(source.rglob("*")):
        relative = path.relative_to(source)
        if ".git" in relative.parts or not path.is_file():
            continue
        size, count = size + path.stat().st_size, count + 1
        if size > MAX_UNPACKED or count > MAX_FILES:
            raise UsageError(
                f"{FLAG} {source} has more than {MAX_UNPACKED >> 20} MiB or {MAX_FILES} files, too many for a chart."
            )
        target = folder / "chart" / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
        content = target.read_bytes()
        digest.update(f"{relative.as_posix()}\0{len(content)}\0".encode() + content)
    return _load_chart(folder / "chart", str(source.absolute()), f"sha256:{digest.hexdigest()}")


# --- a repository ---------------------------------------------------------------------------------------------------


def _download_chart(reference: ChartReference, folder: Path, location: str, read_seconds: float) -> Chart:
    entry = _find_index_entry(reference, read_seconds)
    url = _join_url(f"{reference.repository}/", str(entry["urls"][0]))
    _check_scheme(url)
    data = _download(reference.repository, url, MAX_PACKED, read_seconds)
    digest = hashlib.sha256(data).hexdigest()
    promised = str(entry.get("digest") or "").removeprefix("sha256:").lower()
    warnings: tuple[str, ...] = ()
    if not promised:
        warnings = (
            f"{reference.repository} has no digest for {reference.name} {reference.version}, so it cannot be verified.",
        )
    elif promised != digest:
        raise UsageError(
            f"{url} is not what {reference.repository} promises: its SHA-256 is {digest}, not {promised}. "
            "It is not used.",
            hint="It was changed, or damaged in transit. Try again, or ask the owner of the repository.",
        )
    chart = _load_chart(unpack(data, folder, url), location, f"sha256:{digest}", warnings)
    if (chart.name, chart.version) != (reference.name, reference.version):
        raise UsageError(f"{url} holds {chart.name} {chart.version}, not {reference.name} {reference.version}.")
    return chart


def _find_index_entry(reference: ChartReference, read_seconds: float) -> Mapping[str, Any]:
    """The entry of this version in the repository's index."""
    url = f"{reference.repository}/index.yaml"
    index = _parse_yaml(_download(reference.repository, url, MAX_INDEX, read_seconds), url)
    entries = index.get("entries")
    if not isinstance(entries, Mapping):
        raise UsageError(f"{reference.repository} is not a chart repository: its index.yaml has no entries.", hint=FORM)
    if reference.name not in entries:
        near = did_you_mean(reference.name, [str(name) for name in entries])
        raise NotFoundError(f'{reference.repository} has no chart "{reference.name}".{near}')
    listed = entries[reference.name]
    versions = [item for item in listed if isinstance(item, Mapping)] if isinstance(listed, list) else []
    for item in versions:
        if str(item.get("version")) == reference.version:
            if isinstance(item.get("urls"), list) and item["urls"]:
                return item
            raise UsageError(f"{reference.repository} does not say where {reference.name} {reference.version} is.")
    newest = ", ".join(str(item.get("version")) for item in versions[:5])
    raise NotFoundError(
        f"{reference.repository} has no version {reference.version} of {reference.name}; it has {newest or 'none'}"
        f"{' and older ones' if len(versions) > 5 else ''}."
    )


def _download(repository: str, url: str, limit: int, read_seconds: float) -> bytes:
    """Download `url`, at most `limit` bytes."""
    library, requests = _load("pyhelm.repo"), _load("requests")
    get = partial(library._get_from_repo, urlsplit(url).scheme, repository, url, stream=True)
    options = {"timeout": (CONNECT_SECONDS, read_seconds), "hooks": {"response": _DownloadLimit(limit)}}
    try:
        try:
            return bytes(get(**options))
        except requests.ConnectionError:  # busy servers drop connections, so retry once
            return bytes(get(**options))
    except library.HTTPGetError as error:
        raise _http_error(url, int(error.args[2])) from None
    except requests.Timeout:
        raise DeadlineError(f"{url} gave no answer within {read_seconds:.0f} s.", hint="Repeat it later.") from None
    except requests.TooManyRedirects:
        raise UsageError(f"{url} redirects in a circle.") from None
    except (requests.RequestException, _load("urllib3").exceptions.HTTPError) as error:
        raise MlbenchError(
            f"{url} cannot be downloaded: {_words(error)}", hint="Check the network and the URL."
        ) from None


class _DownloadLimit:
    """Enforces limits of size and time on each response, and checks redirects."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.end = time.monotonic() + FILE_SECONDS

    def __call__(self, response: Any, **_: Any) -> None:
        url = str(response.url)
        if response.is_redirect:
            _check_scheme(_join_url(url, response.headers["location"]), url)
        raw, content = response.raw, bytearray()
        try:
            while piece := raw.read(1 << 16, decode_content=True):
                content += piece
                if len(content) > self.limit:
                    raise UsageError(f"{url} has more than {self.limit >> 20} MiB, so it is rejected.")
                if time.monotonic() > self.end:
                    raise DeadlineError(f"{url} has not come whole after {FILE_SECONDS:.0f} s.")
        except _load("urllib3").exceptions.ReadTimeoutError:
            raise DeadlineError(f"{url} stalled before it was complete.", hint="Repeat it later.") from None
        finally:
            raw.close()
        response.raw = io.BytesIO(bytes(content))


def _load(name: str) -> Any:
    """A module that charts of a repository need. Raises UsageError if it is not installed."""
    # GitPython, which pyhelm imports for charts in git, refuses to be imported if there is no git.
    os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
    try:
        return load_library(name, "helm")
    except UsageError as error:
        error.hint = f"{error.hint}   or: helm pull CHART --repo URL --version X.Y.Z --untar, and {FLAG} DIR"
        raise


def _split(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError as error:
        raise UsageError(f'"{url}" is not an address: {error}.', hint=FORM) from None


def _join_url(base: str, reference: str) -> str:
    try:
        return urljoin(base, reference)
    except ValueError as error:
        raise UsageError(f'{base} names "{reference}", which is not an address: {error}.') from None


def _check_scheme(url: str, before: str | None = None) -> None:
    parts = _split(url)
    if parts.scheme == "https" or (parts.scheme == "http" and _is_loopback(parts.hostname or "")):
        return
    said = f"{before} redirects to {url}, which" if before else f"{FLAG} {url}"
    if parts.scheme == "http":
        raise UsageError(f"{said} is not encrypted; http is allowed only for this machine.", hint="Is there https?")
    raise UsageError(f'{said}: "{parts.scheme}" is neither https nor http.', hint=FORM)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _http_error(url: str, status: int) -> MlbenchError:
    if status in (401, 403):
        return CredentialError(
            f"{url} was denied (HTTP {status}).", hint="Put the name and password of its host into ~/.netrc"
        )
    if status in (404, 410):
        return NotFoundError(f"There is no {url} (HTTP {status}).", hint=FORM)
    return MlbenchError(f"{url} was answered with HTTP {status}.", hint="Repeat it later.")


def _words(error: Exception) -> str:
    return " ".join(str(getattr(error, "reason", None) or error).split())[:300]


# --- what a chart says of itself ------------------------------------------------------------------------------------


def _load_chart(folder: Path, source: str, digest: str, warnings: tuple[str, ...] = ()) -> Chart:
    if not (folder / "Chart.yaml").is_file():
        raise UsageError(f"{source} is not a chart: it has no Chart.yaml.")
    about = _parse_yaml((folder / "Chart.yaml").read_bytes(), f"Chart.yaml of {source}")
    name, version = str(about.get("name") or ""), str(about.get("version") or "")
    if about.get("apiVersion") not in ("v1", "v2") or not version:
        raise UsageError(f"{source} is not a chart: its Chart.yaml has no apiVersion v1 or v2, or no version.")
    if not NAME.fullmatch(name):
        raise UsageError(f'{source}: the name "{name}" of the chart cannot be the name of a release.')
    if about.get("type") == "library":
        raise UsageError(f"{source} is a library chart, which cannot be installed.")
    values = folder / "values.yaml"
    dependencies = about.get("dependencies")
    parts = dependencies if isinstance(dependencies, list) else []
    return Chart(
        name,
        version,
        source,
        digest,
        folder,
        _parse_yaml(values.read_bytes(), f"values.yaml of {source}") if values.is_file() else {},
        tuple(str(item.get("alias") or item.get("name")) for item in parts if isinstance(item, Mapping)),
        warnings,
    )


def _parse_yaml(data: bytes, what: str) -> Mapping[str, Any]:
    document = read_yaml(data, what, dates_as_text=True)
    if not isinstance(document or {}, Mapping):
        raise UsageError(f"{what} is not a mapping.")
    return document or {}
