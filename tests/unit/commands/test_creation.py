"""`create-cluster` and `serve`: the end of a cluster that is made, its options, and addresses of a dashboard."""

import inspect
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlbench_cli import console
from mlbench_cli.clusters.manage import PlannedCluster, Ttl
from mlbench_cli.commands import create_cluster as module
from mlbench_cli.commands._clusters import describe_estimate, estimate_document
from mlbench_cli.commands._dashboard import connect
from mlbench_cli.commands.create_cluster import (
    _check_registry,
    _choose_end,
    _describe_end,
    _function,
    _help,
    _parse_ttl,
    _print_result,
    _show_probe,
)
from mlbench_cli.commands.serve import _check_public_url, _explain, _is_loopback
from mlbench_cli.console import Format
from mlbench_cli.errors import UsageError
from mlbench_cli.model.cluster_details import ClusterDetails
from mlbench_cli.model.run import Cluster
from mlbench_cli.storage.store import Store
from providers.base import Plan, PlanLine, option
from tests.unit.commands.test_plan_answers import candidate

Captured = pytest.CaptureFixture[str]
NOW = 1_767_225_600.0


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: NOW)


def planned(price: float | None = 1.0, **details: Any) -> PlannedCluster:
    plan = Plan((PlanLine("worker", 1, price),), "near")
    return PlannedCluster(Cluster("lab-2", "gke", location="near", details=details), plan, cast(Any, None), None)


# --- its end ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "ttl"),
    [(None, None), ("none", None), ("90m", Ttl("90m", 5400.0)), ("2d", Ttl("2d", 172_800.0)), ("0", Ttl("0", 0.0))],
)
def test_a_time_to_live(text: str | None, ttl: Ttl | None) -> None:
    assert _parse_ttl(text) == ttl


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(
    ("price", "is_watched", "expires"),
    [(1.0, True, None), (1.0, False, NOW + 8 * 3600), (None, False, NOW + 8 * 3600), (0.0, False, None)],
)
def test_a_paid_cluster_that_nobody_watches_ends_after_eight_hours(
    store: Store, monkeypatch: pytest.MonkeyPatch, price: float | None, is_watched: bool, expires: float | None
) -> None:
    monkeypatch.setattr(console, "interactive", lambda: is_watched)
    found = _choose_end(store, planned(price), None)
    assert ClusterDetails.of(found.cluster).expires == expires
    assert _describe_end(found) == (None if expires is None else "It expires after 8h.")


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(
    ("recorded", "expires", "keeps"),
    [
        (NOW + 3600, NOW + 3600, True),
        (None, None, True),
        (NOW - 1, NOW + 8 * 3600, False),
        (NOW, NOW + 8 * 3600, False),
    ],
)
def test_a_cluster_that_exists_keeps_its_end_unless_that_has_passed(
    store: Store, monkeypatch: pytest.MonkeyPatch, recorded: float | None, expires: float | None, keeps: bool
) -> None:
    monkeypatch.setattr(console, "interactive", lambda: False)
    end = {} if recorded is None else {"expires": recorded, "ttl": "1h"}
    store.record_cluster(Cluster("lab-2", "gke", location="near", details=end))
    found = _choose_end(store, planned(), None)
    assert (ClusterDetails.of(found.cluster).expires, found.keeps_end) == (expires, keeps)
    if recorded == NOW + 3600:
        assert _describe_end(found) == "It still expires in 1 h (--ttl changes that)."


@pytest.mark.usefixtures("clock")
def test_an_end_that_is_asked_for_counts_but_none_takes_none_away(store: Store) -> None:
    store.record_cluster(Cluster("lab-2", "gke", location="near", details={"expires": NOW + 60}))
    asked = planned().with_ttl(Ttl("2h", 7200.0))
    assert _choose_end(store, asked, "2h") is asked
    assert ClusterDetails.of(asked.cluster).expires == NOW + 7200
    for text in ("none", " none "):
        with pytest.raises(UsageError, match='The cluster "lab-2" already expires') as caught:
            _choose_end(store, planned(), text)
        assert caught.value.hint == "mlbench extend lab-2 30d   moves it"
    other = PlannedCluster(Cluster("new-2", "gke", location="near"), planned().plan, cast(Any, None), None)
    assert _choose_end(store, other, "none") is other


# --- its options ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """Options of a provider."""

    zone: str = option("near", "--zone", help="where")
    size: int | None = option(None, "--size", help="how large")
    tags: tuple[str, ...] = option(("a",), "--tag", help="tags")


def test_options_of_a_provider_become_options_of_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    created: list[Any] = []
    monkeypatch.setattr(module, "create", lambda provider, **given: created.append(given))

    provider: Any = SimpleNamespace(options=Options, summary="A cloud", notes="It is new.")
    command = _function(provider)
    parameters = inspect.signature(command).parameters
    assert list(parameters)[:5] == ["nodes", "release", "zone", "size", "tags"]
    assert {name: parameters[name].default for name in ("zone", "size", "tags")} == {
        "zone": "near", "size": None, "tags": ["a"]
    }  # fmt: skip
    assert {parameters[name].default for name in ("dry_run", "yes")} == {False}
    assert parameters["ttl"].default is None
    command(nodes=2, release="lab", zone="far", size=3, tags=["b", "c"], ttl=None)
    assert created == [
        {"nodes": 2, "release": "lab", "ttl": None, "options": {"zone": "far", "size": 3, "tags": ("b", "c")}}
    ]
    assert _help(provider) == "A cloud.\n\nThe cluster is named RELEASE-NUM_WORKERS. It is new."
    assert (
        _help(cast(Any, SimpleNamespace(summary="A cloud"))) == "A cloud.\n\nThe cluster is named RELEASE-NUM_WORKERS."
    )


# --- its registry and result ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("provider", "given", "default", "asked", "warns"),
    [
        ("kind", None, None, None, False),
        ("gke", "auto", "mine", None, False),
        ("gke", None, None, None, True),
        ("gke", None, "mine", "mine", False),
        ("gke", "given", "mine", "given", False),
    ],
)
def test_task_images_are_looked_for_before_a_cluster_costs_money(
    monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
    provider: str,
    given: str | None,
    default: str | None,
    asked: str | None,
    warns: bool,
) -> None:
    places: list[str] = []
    found = None if default is None else SimpleNamespace(value=default)
    monkeypatch.setattr(module, "find_default", lambda key: found if key == "registry" else None)
    monkeypatch.setattr("mlbench_cli.commands._images.require_registry", places.append)
    _check_registry(cast(Any, SimpleNamespace(name=provider)), given)
    assert places == ([] if asked is None else [asked])
    assert ("No registry for the task images is configured" in capsys.readouterr().err) == warns


def test_the_times_of_a_new_cluster(capsys: Captured) -> None:
    times = [
        {"kind": "pool", "name": "a", "began": 1.04, "ready": 61.26, "waits": []},
        {"kind": "pool", "name": "b", "began": None, "ready": None, "waits": []},
    ]
    _print_result(Cluster("lab-2", "kind", details={"provisioning": times}), Format.text)
    printed = capsys.readouterr()
    assert [line.split() for line in printed.out.splitlines()[1:]] == [
        ["pool", "a", "1.00", "61.3"],
        ["pool", "b", "0", "0"],
    ]
    assert printed.err.splitlines() == [
        "The cluster lab-2 is ready; commands now use it. To delete it:",
        "  mlbench delete-cluster kind lab-2",
    ]


@pytest.mark.parametrize(
    ("details", "words"),
    [
        ({"end_problem": "No right."}, "Warning: Nothing in the cloud deletes this cluster: No right. When it expires"),
        (
            {"topology_problem": "No right."},
            "Results will not include the workers' positions in the network: No right.",
        ),
        ({"registry_problem": "No right."}, "not be able to pull images from the cluster's registry: No right."),
        ({"registry_made": True, "registry": "r"}, "Its registry r is empty. To fill it: mlbench images push"),
    ],
)
def test_what_a_new_cluster_lacks_is_told(capsys: Captured, details: dict[str, Any], words: str) -> None:
    _print_result(Cluster("lab-2", "gke", details=details), Format.text)
    assert words in capsys.readouterr().err
    _print_result(Cluster("lab-2", "gke"), Format.text)
    assert words.partition(":")[2] not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("report", "words"),
    [
        ({}, ""),
        ({"gpus": "2", "gpu": "T4", "driver": "580.1"}, "GPUs of a worker: 2 × T4, driver 580.1\n"),
        (
            {"gpus": "2", "gpu": "T4", "driver": "580.1", "torch": "2.15.0"},
            "GPUs of a worker: 2 × T4, driver 580.1; torch 2.15.0 ran a kernel and an all-reduce\n",
        ),
    ],
)
def test_the_gpus_of_a_new_cluster(capsys: Captured, report: dict[str, str], words: str) -> None:
    _show_probe(ClusterDetails(gpu_probe=report))
    assert capsys.readouterr().err.startswith(words)
    assert bool(words) or not report


# --- its estimate -----------------------------------------------------------------------------------------------------


def test_the_time_and_price_of_a_task_on_a_new_cluster() -> None:
    """Two hours for 6 USD, from half to twice as long."""
    item = candidate(task="digits_resnet")
    assert describe_estimate(item, "EUR") == (
        "for digits_resnet: about 2 h (1 h to 4 h), 6.00 EUR (3.00 to 12.00), with method bsp and batch 64. "
        "Speed: a datasheet."
    )
    document = estimate_document(item)
    ends = [document.pop(name) for name in ("low_seconds", "high_seconds", "low_price", "high_price")]
    assert ends == pytest.approx([3600, 14400, 3, 12], rel=1e-4)
    assert document == {
        "task": "digits_resnet",
        "method": "bsp",
        "global_batch": 64,
        "seconds": 7200.0,
        "price": 6.0,
        "bases": {"speed": "published", "price": "measured"},
    }


# --- a dashboard ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.5.6.7", "::1", "[::1]"])
def test_addresses_of_this_machine(host: str) -> None:
    assert _is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", "localhost.example.org", ""])
def test_addresses_that_others_reach(host: str) -> None:
    assert not _is_loopback(host)


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("https://a.example", "https://a.example"),
        ("https://a.example/", "https://a.example"),
        ("http://a.example:8080", "http://a.example:8080"),
        ("https://[::1]:8443/", "https://[::1]:8443"),
    ],
)
def test_public_addresses_are_scheme_host_and_port(url: str, found: str) -> None:
    assert _check_public_url(url) == found


@pytest.mark.parametrize(
    "url",
    [
        *("a.example", "ftp://a.example", "https://", "https://me@a.example", "https://a.example/x"),
        *("https://a.example?x=1", "https://a.example#x", "https://a.example:99999", "https://[x"),
    ],
)
def test_other_public_addresses_are_refused(url: str) -> None:
    with pytest.raises(UsageError, match="is not a URL of scheme, host and port"):
        _check_public_url(url)


@pytest.mark.parametrize(
    ("is_loopback", "allows", "has_tls", "words"),
    [
        (True, False, False, "Open the URL above. It is read-only; start it with --allow-actions"),
        (True, True, True, "Open the URL above. It can start, stop and delete runs."),
        (False, True, True, "Warning: Other machines can reach the dashboard, with TLS."),
        (False, True, False, "Warning: Other machines can reach the dashboard, WITHOUT TLS: anyone who can read"),
    ],
)
def test_what_a_dashboard_can_do_and_who_reaches_it(
    capsys: Captured, is_loopback: bool, allows: bool, has_tls: bool, words: str
) -> None:
    _explain("http://x", is_loopback, allows, has_tls)
    printed = capsys.readouterr().err
    assert printed.startswith(words)
    assert printed.endswith('Client of MLBench 3: ApiClient(in_cluster=False, url="http://x")\n')


def line_of_options(**sources: str) -> Any:
    """A command line with the options "names", "tail" and "rank", of which each has a source."""
    opts = {"names": ["names"], "tail": ["-t", "--tail"], "rank": ["--rank"], "dashboard": ["-u", "--dashboard-url"]}
    parameters = [SimpleNamespace(name=name, opts=words, human_readable_name=name) for name, words in opts.items()]

    def source_of(name: str) -> Any:
        return SimpleNamespace(name=sources[name]) if name in sources else None

    return SimpleNamespace(
        command=SimpleNamespace(params=parameters), get_parameter_source=source_of, info_name="logs"
    )  # fmt: skip


def test_options_that_a_dashboard_does_not_know_are_refused(capsys: Captured) -> None:
    url = "http://127.0.0.1:1/?token=t"
    given = line_of_options(names="COMMANDLINE", dashboard="COMMANDLINE", rank="COMMANDLINE", tail="DEFAULT")
    assert connect(given, url, "rank").host == "127.0.0.1:1"
    assert capsys.readouterr().err == ""
    with pytest.raises(UsageError, match="--rank does not work with --dashboard-url") as caught:
        connect(given, url)
    assert caught.value.hint == "mlbench logs --help"
    with pytest.raises(UsageError, match="--tail does not work"):
        connect(line_of_options(tail="COMMANDLINE"), url, "rank")
    connect(line_of_options(tail="ENVIRONMENT"), "http://far.example/?token=t")
    assert capsys.readouterr().err == (
        "Warning: far.example is contacted without TLS, so others on the network can read the token.\n"
    )
