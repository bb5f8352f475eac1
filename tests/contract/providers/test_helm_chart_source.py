"""Charts from a repository that is a real web server with faults, through pyhelm and beside the protobuf of gke."""

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlbench_cli.errors import CredentialError, DeadlineError, MlbenchError, NotFoundError, UsageError
from providers.helm.source import Chart, fetch_chart
from tests.fakes.chart_repository import Repository, chart_files, pack_chart, serving

GOOD = pack_chart(chart_files())
PATH = "/archives/web-1.2.3.tgz"


@pytest.fixture
def repository() -> Iterator[Repository]:
    with serving() as found:
        found.add(GOOD)
        found.add(pack_chart(chart_files(version="1.3.0-rc.1")), version="1.3.0-rc.1")
        yield found


@pytest.fixture(autouse=True)
def _nothing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # tempfile looks at TMPDIR only once in a process
    yield
    assert os.listdir(tmp_path) == []
    assert tempfile.gettempdir() == str(tmp_path)


def get(repository: Repository, chart: str = "web@1.2.3", read_seconds: float = 20) -> Chart:
    with fetch_chart(f"{repository.url}/{chart}", read_seconds) as found:
        assert (found.folder / "templates/config.yaml").is_file()
        return found


def test_exactly_the_version_that_is_named(repository: Repository) -> None:
    chart = get(repository)
    assert (chart.name, chart.version, chart.values["image"]["tag"]) == ("web", "1.2.3", "v1")
    assert chart.digest == f"sha256:{hashlib.sha256(GOOD).hexdigest()}"
    assert chart.warnings == ()
    assert repository.asked == ["/index.yaml", PATH]
    assert get(repository, "web@1.3.0-rc.1").version == "1.3.0-rc.1"


def test_one_dropped_connection_is_not_the_end(repository: Repository) -> None:
    repository.dropped = 1
    assert get(repository).version == "1.2.3"
    repository.dropped = 2
    with pytest.raises(MlbenchError, match=r"index\.yaml cannot be downloaded: .*Remote end closed connection"):
        get(repository)


def test_archives_may_be_anywhere(repository: Repository) -> None:
    repository.entries["web"][0]["urls"] = [f"{repository.url}/elsewhere"]
    repository.redirects["/elsewhere"] = f"{repository.url}{PATH}"
    assert get(repository).version == "1.2.3"
    repository.entries["web"][0]["urls"] = [PATH]
    assert get(repository).version == "1.2.3"


def test_without_a_digest_it_is_said(repository: Repository) -> None:
    repository.add(pack_chart(chart_files("other"), "other/"), "other", digest=None)
    [warning] = get(repository, "other@1.2.3").warnings
    assert "cannot be verified" in warning


@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        ("wrong digest", UsageError, "is not what .* promises"),
        ("truncated", UsageError, "damaged"),
        ("cut off", MlbenchError, "cannot be downloaded"),
        ("dots", UsageError, "outside its folder"),
        ("other chart", UsageError, "holds other 1.2.3, not web 1.2.3"),
        ("other version", UsageError, "holds web 9.9.9, not web 1.2.3"),
        ("no urls", UsageError, "does not say where"),
        ("redirect to http", UsageError, "redirects to http://example.org/x, which is not encrypted"),
        ("redirect to file", UsageError, '"file" is neither https nor http'),
        ("redirects in a circle", UsageError, "redirects in a circle"),
        ("404", NotFoundError, "There is no .*HTTP 404"),
        ("401", CredentialError, "was denied .HTTP 401"),
        ("503", MlbenchError, "HTTP 503"),
        ("stalled", DeadlineError, "stalled before it was complete"),
        ("large", UsageError, "has more than 20 MiB"),
        ("index 404", NotFoundError, "There is no .*index.yaml"),
        ("index stalled", DeadlineError, "stalled before it was complete"),
        ("index silent", DeadlineError, "no answer"),
        ("index of nothing", UsageError, "not a chart repository"),
        ("index not yaml", UsageError, "not valid YAML"),
        ("no list", NotFoundError, "it has none"),
        ("no address", UsageError, "which is not an address"),
    ],
)
def test_faults(repository: Repository, name: str, kind: type[MlbenchError], says: str) -> None:
    entry = repository.entries["web"][0]
    published: dict[str, bytes] = {
        "dots": pack_chart({**chart_files(), "../../../evil": "x"}),
        "truncated": GOOD[: len(GOOD) // 2],
        "other chart": pack_chart(chart_files("other")),
        "other version": pack_chart(chart_files(version="9.9.9")),
        "large": b"x" * (21 << 20),
    }
    if name in published:
        repository.files[PATH] = published[name]
        entry["digest"] = hashlib.sha256(published[name]).hexdigest()
    elif name == "wrong digest":
        entry["digest"] = "0" * 64
    elif name == "no list":
        repository.entries["web"] = 5  # type: ignore[assignment]
    elif name == "no address":
        entry["urls"] = ["https://[::1/x"]
    elif name == "no urls":
        entry["urls"] = []
    elif name.startswith("redirect"):
        targets = {"http": "http://example.org/x", "file": "file:///etc/passwd", "circle": repository.url + PATH}
        repository.redirects[PATH] = targets[name.split()[-1]]
    elif name.split()[-1].isdecimal():
        repository.refused["/index.yaml" if name.startswith("index") else PATH] = int(name.split()[-1])
    elif name == "cut off":
        repository.cut[PATH] = 100
    elif name.endswith(("stalled", "silent")):
        place = "/index.yaml" if name.startswith("index") else PATH
        repository.stall[place] = 0 if name.endswith("silent") else 100
        repository.hold_headers = name.endswith("silent")
    else:
        repository.files["/index.yaml"] = b"entries: 5" if name == "index of nothing" else b"a: [b"
    with pytest.raises(kind, match=says) as caught:
        get(repository, read_seconds=0.3 if "stall" in name or "silent" in name else 20)
    assert type(caught.value) is kind


@pytest.mark.parametrize(
    ("chart", "says"),
    [
        ("wbe@1.2.3", 'has no chart "wbe". Did you mean "web"'),
        ("web@1.2.4", "has no version 1.2.4 of web; it has 1.2.3, 1.3.0-rc.1"),
        ("web@v1.2.3", "has no version v1.2.3"),
    ],
)
def test_what_the_repository_does_not_have(repository: Repository, chart: str, says: str) -> None:
    with pytest.raises(NotFoundError, match=says.replace(".", r"\.").replace("?", r"\?")):
        get(repository, chart)


def test_nobody_there(repository: Repository) -> None:
    with (
        pytest.raises(MlbenchError, match=r"cannot be downloaded: .*refused"),
        fetch_chart("http://127.0.0.1:9/web@1.2.3"),
    ):
        pass


IMPORTS = """
import sys
from google.cloud import container_v1
from providers.helm.source import fetch_chart
with fetch_chart(sys.argv[1]) as chart:
    import google.protobuf
    print(chart.name, chart.version, int(google.protobuf.__version__.split(".")[0]) >= 4)
"""


def test_beside_the_protobuf_of_gke_and_without_git(repository: Repository) -> None:
    """What pyhelm generated for protobuf 3 is never imported; and it must not need the program git."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS, f"{repository.url}/web@1.2.3"],
        env={"PATH": "/nowhere"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("web 1.2.3 True\n", 0), done.stderr
