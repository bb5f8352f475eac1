"""Commands of a few lines: `wait`, `status`, `kubeconfig`, those that change a cluster, and those that show results."""

import base64
import json
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from mlbench_cli import api, console
from mlbench_cli.clusters import changes
from mlbench_cli.commands import _cluster_status, campaign, discover, kubeconfig, pins, report, sign, wait
from mlbench_cli.commands import status as status_module
from mlbench_cli.commands._experiment_file import How, Limits
from mlbench_cli.commands._report import Unanswered
from mlbench_cli.commands._status import MAX_SHOWN, Choice
from mlbench_cli.commands.completion import Shell, completion
from mlbench_cli.commands.extend import extend
from mlbench_cli.commands.scale_cluster import scale_cluster
from mlbench_cli.commands.set_cluster import set_cluster
from mlbench_cli.commands.status import status
from mlbench_cli.console import Format
from mlbench_cli.errors import DamagedArchive, DeadlineError, TaskFailedError, UnreachableError, UsageError
from mlbench_cli.kube.access import Access
from mlbench_cli.kube.credentials import Credential, CredentialSource
from mlbench_cli.model.run import Cluster
from mlbench_cli.results import receipts
from mlbench_cli.storage.store import Store
from providers import registry
from providers.pins import SOON_DAYS, Pin

Captured = pytest.CaptureFixture[str]
NOW = 1_767_225_600.0  # 2026-01-01T00:00:00Z
CONTEXT: Any = SimpleNamespace(obj=("x",))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MLBENCH_CLUSTER", raising=False)
    return tmp_path


# --- wait -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Lets `wait` find these runs, each with its exit code or error; the list is what it asked for and reported."""

    def prepare(**found: Any) -> list[Any]:
        told: list[Any] = []
        runs = [SimpleNamespace(name=name, run=f"run {name}", end=end) for name, end in found.items()]

        class Client:
            def __init__(self, notice: Any) -> None:
                pass

            def select(self, names: Sequence[str], *, all_runs: bool, filter: Any) -> Any:
                told.append((tuple(names), all_runs, filter.states, filter.tasks))
                return SimpleNamespace(runs=runs)

        def wait_for(run: Any, seconds: Any, deadline: Any, require_goal: bool) -> Any:
            told.append((run.name, seconds, deadline, require_goal))
            if isinstance(run.end, Exception):
                raise run.end
            return SimpleNamespace(exit_code=run.end)

        def report_ended(ended: Any, output: Format, *, unanswered: Sequence[Unanswered]) -> None:
            told.append(([item.exit_code for item in ended], [item.word for item in unanswered], output))

        monkeypatch.setattr(wait, "Client", Client)
        monkeypatch.setattr(wait, "_wait_for", wait_for)
        monkeypatch.setattr(wait, "report_ended", report_ended)
        monkeypatch.setattr(time, "monotonic", lambda: 100.0)
        return told

    return prepare


def test_waiting_ends_with_the_highest_exit_code(waiting: Callable[..., list[Any]]) -> None:
    told = waiting(a=0, b=7, c=6)
    assert wait.wait(CONTEXT, ["a", "b"], "90s", require_goal=True, output=Format.json) == 7
    assert told == [
        (("a", "b"), False, (), ()),
        *((name, 90.0, 190.0, True) for name in "abc"),
        ([0, 7, 6], [], Format.json),
    ]


def test_waiting_without_a_limit_and_with_filters(waiting: Callable[..., list[Any]], capsys: Captured) -> None:
    told = waiting()
    assert wait.wait(CONTEXT, all_runs=True, states=["running"], tasks=["mnist"]) == 0
    assert told == [((), True, ("running",), ("mnist",)), ([], [], Format.text)]
    assert capsys.readouterr().err == "No such run: nothing to wait for.\n"
    told = waiting(a=0)
    wait.wait(CONTEXT, ["a"])
    assert told[1] == ("a", None, None, False)
    with pytest.raises(UsageError, match="is not a duration"):
        wait.wait(CONTEXT, ["a"], "soon")


def test_runs_that_do_not_answer_do_not_hide_the_others(waiting: Callable[..., list[Any]], capsys: Captured) -> None:
    damaged = DamagedArchive("b", "run.json", "it was changed")
    far = UnreachableError("The cluster does not answer.", hint="mlbench wait c")
    told = waiting(a=7, b=damaged, c=far)
    assert wait.wait(CONTEXT, ["x"]) == 10
    assert told[-1] == ([7], ["damaged", "unknown"], Format.text)
    assert capsys.readouterr().err.splitlines() == [
        "Warning: b is damaged: b: run.json: it was changed Next: mlbench verify b",
        "Warning: The cluster does not answer. Next: mlbench wait c",
    ]
    waiting(a=far)
    with pytest.raises(UnreachableError):
        wait.wait(CONTEXT, ["x"])
    assert capsys.readouterr().err == ""
    waiting(a=far, b=DeadlineError("Too late."), c=damaged)
    with pytest.raises(DeadlineError):  # the highest exit code, 124
        wait.wait(CONTEXT, ["x"])


# --- status -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `status` shows: runs, a cluster or those of a dashboard."""
    told: list[Any] = []
    client = SimpleNamespace(store="store")
    monkeypatch.setattr(status_module, "Client", lambda notice: client)
    monkeypatch.setattr(
        status_module, "show_runs", lambda client, names, choice, **rest: told.append((names, choice, rest))
    )
    monkeypatch.setattr(
        _cluster_status, "show_cluster", lambda store, name, output, *, cloud: told.append((store, name, output, cloud))
    )
    monkeypatch.setattr(status_module, "connect", lambda context, url, *known: (url, known))
    monkeypatch.setattr(
        status_module, "show_status", lambda there, names, output, **rest: told.append((there, names, output, rest))
    )
    return told


def test_the_newest_runs_are_shown_or_those_that_match(shown: list[Any]) -> None:
    plain = {"metric": None, "watch": False, "verbose": False, "output": Format.text}
    status(CONTEXT)
    status(CONTEXT, ["a"], "loss", watch=True, verbose=True, limit=3, state="failed", task="mnist", output=Format.json)
    status(CONTEXT, since="2026-01-01T00:00:00Z")
    assert shown == [
        (None, Choice(MAX_SHOWN), plain),
        (
            ["a"],
            Choice(3, "failed", "mnist"),
            {"metric": "loss", "watch": True, "verbose": True, "output": Format.json},
        ),
        (None, Choice(MAX_SHOWN, since=NOW), plain),
    ]


def test_a_cluster_is_shown_as_recorded_or_as_its_cloud_sees_it(shown: list[Any]) -> None:
    status(CONTEXT, cluster="lab")
    status(CONTEXT, cluster="lab", cloud=True, output=Format.json)
    assert shown == [("store", "lab", Format.text, False), ("store", "lab", Format.json, True)]


@pytest.mark.parametrize("state", ["running", "failed", "ended", "unknown", "damaged", "goal_reached"])
def test_states_and_outcomes_select_runs(shown: list[Any], state: str) -> None:
    status(CONTEXT, state=state)
    assert shown[0][1].state == state


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"state": "faild"}, 'There is no state "faild". Did you mean "failed"'),
        ({"cluster": "lab", "state": "failed"}, "--state, --task and --since select runs and cannot be combined"),
        ({"cluster": "lab", "task": "mnist"}, "--state, --task and --since select runs"),
        ({"cluster": "lab", "since": "2d"}, "--state, --task and --since select runs"),
        ({"cluster": "lab", "names": ["a"]}, "--cluster cannot be combined with NAME, --metric or --watch"),
        ({"cluster": "lab", "metric": "loss"}, "--cluster cannot be combined with NAME"),
        ({"cluster": "lab", "watch": True}, "--cluster cannot be combined with NAME"),
        ({"cloud": True}, "--cloud requires --cluster."),
    ],
)
def test_options_that_contradict_each_other_show_nothing(shown: list[Any], options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        status(CONTEXT, **options)
    assert words in caught.value.message
    assert shown == []


def test_a_dashboard_shows_its_runs(shown: list[Any]) -> None:
    status(CONTEXT, ["a-1"], "loss", state="failed", task="mnist", limit=5, dashboard="http://x", watch=True)
    status(CONTEXT, dashboard="http://x", output=Format.json)
    (there, names, output, rest), (_, everything, as_json, _) = shown
    assert there == ("http://x", ("metric", "watch", "verbose", "limit", "state", "task", "since"))
    assert (names, output, everything, as_json) == (["a-1"], Format.text, (), Format.json)
    assert {key: rest[key] for key in ("limit", "state", "task", "since", "metric", "watch")} == {
        "limit": 5, "state": "failed", "task": "mnist", "since": None, "metric": "loss", "watch": True
    }  # fmt: skip


# --- kubeconfig -------------------------------------------------------------------------------------------------------


@pytest.fixture
def access(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The access of the cluster "lab", the default one."""
    store = Store()
    store.choose_cluster(store.record_cluster(Cluster("lab", "kind")))
    found = SimpleNamespace(value=Access("https://api", "bench", token=CredentialSource(lambda: Credential("secret"))))
    provider = SimpleNamespace(connect=lambda cluster: found.value)
    monkeypatch.setattr(registry, "load", lambda name: provider)
    return found


def test_a_kubeconfig_asks_mlbench_for_a_token_each_time(
    access: Any, home: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", "/opt/python")
    kubeconfig.export()
    text = capsys.readouterr().out
    assert "secret" not in text
    document = yaml.safe_load(text)
    assert document["current-context"] == "mlbench-lab"
    assert document["clusters"] == [{"name": "mlbench-lab", "cluster": {"server": "https://api"}}]
    assert document["users"][0]["user"] == {
        "exec": {
            "apiVersion": "client.authentication.k8s.io/v1",
            "interactiveMode": "Never",
            "command": "/opt/python",
            "args": ["-m", "mlbench_cli", "kubeconfig", "token", "lab"],
            "env": [{"name": "MLBENCH_HOME", "value": str(home / "home")}],
        }
    }
    kubeconfig.export("lab", output=Format.json)
    assert json.loads(capsys.readouterr().out) == document
    monkeypatch.delenv("MLBENCH_HOME")
    assert "env" not in kubeconfig._plugin(Cluster("lab", "kind"))["exec"]  # type: ignore[operator]


def test_a_kubeconfig_with_a_certificate_needs_no_plugin(access: Any, capsys: Captured) -> None:
    access.value = Access("https://api", certificate=b"CERT", key=b"KEY")
    kubeconfig.export()
    (user,) = yaml.safe_load(capsys.readouterr().out)["users"]
    assert user["user"] == {
        "client-certificate-data": base64.b64encode(b"CERT").decode(),
        "client-key-data": base64.b64encode(b"KEY").decode(),
    }
    with pytest.raises(UsageError, match='The cluster "lab" does not use tokens'):
        kubeconfig.token()


def test_a_kubeconfig_is_written_for_its_owner_only(access: Any, home: Path, capsys: Captured) -> None:
    file = home / "config"
    kubeconfig.export(file=file)
    assert (file.stat().st_mode & 0o777, yaml.safe_load(file.read_text())["kind"]) == (0o600, "Config")
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", f"Next: kubectl --kubeconfig {file} get nodes\n")
    file.write_text("x" * 10_000)
    file.chmod(0o644)
    with pytest.raises(UsageError, match=f"The file {file} exists") as caught:
        kubeconfig.export(file=file)
    assert caught.value.hint == "Choose another one, or add --force."
    kubeconfig.export(file=file, force=True, output=Format.json)
    assert (file.stat().st_mode & 0o777, yaml.safe_load(file.read_text())["kind"]) == (0o600, "Config")
    assert json.loads(capsys.readouterr().out) == {"schema_version": 1, "cluster": "lab", "file": str(file)}
    with pytest.raises(UsageError, match="cannot be written: No such file or directory"):
        kubeconfig.export(file=home / "no" / "config")


@pytest.mark.parametrize(
    ("credential", "status_of"),
    [
        (Credential("secret"), {"token": "secret"}),
        (
            Credential("secret", b"CERT", b"KEY"),
            {"token": "secret", "clientCertificateData": "CERT", "clientKeyData": "KEY"},
        ),
        (Credential(None, b"CERT", b"KEY"), {"clientCertificateData": "CERT", "clientKeyData": "KEY"}),
        (Credential("secret", b"CERT"), {"token": "secret"}),
    ],
)
def test_kubectl_gets_what_it_can_keep_for_five_minutes(
    access: Any, monkeypatch: pytest.MonkeyPatch, capsys: Captured, credential: Credential, status_of: dict[str, str]
) -> None:
    access.value = Access("https://api", token=CredentialSource(lambda: credential))
    monkeypatch.setattr(time, "time", lambda: NOW)
    kubeconfig.token("lab")
    assert json.loads(capsys.readouterr().out) == {
        "apiVersion": "client.authentication.k8s.io/v1",
        "kind": "ExecCredential",
        "status": {"expirationTimestamp": "2026-01-01T00:05:00Z", **status_of},
    }


# --- clusters ---------------------------------------------------------------------------------------------------------


def test_a_cluster_is_extended_by_a_duration(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    Store().record_cluster(Cluster("lab", "kind"))
    seconds: list[float] = []

    def extend_cluster(store: Store, cluster: Cluster, more: float, report_step: Any) -> Cluster:
        seconds.append(more)
        return Cluster("lab", "kind", details={"expires": NOW + more})

    monkeypatch.setattr(changes, "extend_cluster", extend_cluster)
    monkeypatch.setattr(time, "time", lambda: NOW)
    extend("lab", "90m")
    assert capsys.readouterr().out == "The cluster lab expires in 1 h 30 min.\n"
    extend("lab", "2h", Format.json)
    assert json.loads(capsys.readouterr().out)["cluster"]["details"] == {"expires": "2026-01-01T02:00:00.000Z"}
    assert seconds == [5400.0, 7200.0]
    with pytest.raises(UsageError, match="DURATION"):
        extend("lab", "soon")


@pytest.mark.parametrize(
    ("before", "nodes", "question"),
    [
        (2, 3, "Scale lab from 2 to 3 machines?"),
        (2, 2, None),
        (2, 0, None),
        (None, 1, "Scale lab from 0 to 1 machines?"),
    ],
)
def test_only_more_machines_are_asked_about(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured, before: int | None, nodes: int, question: str | None
) -> None:
    Store().record_cluster(Cluster("lab", "kind", details={} if before is None else {"nodes": before}))
    told: list[Any] = []
    monkeypatch.setattr(changes, "plan_scaling", lambda cluster, count: told.append(count))
    monkeypatch.setattr(changes, "scale_cluster", lambda store, cluster, count, report_step: cluster)
    monkeypatch.setattr(console, "confirm", lambda text, *, yes: told.append((text, yes)))
    scale_cluster("lab", nodes, yes=True)
    assert told == [nodes, *([(question, True)] if question else [])]
    assert capsys.readouterr().out == f"The cluster lab has {nodes} worker machines.\n"
    with pytest.raises(UsageError, match="-1 machines: the number must be at least 0"):
        scale_cluster("lab", -1)


def test_the_default_cluster_is_chosen_with_or_without_its_provider(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    Store().record_cluster(Cluster("lab", "gke"))
    alias = next(word for word, name in registry.ALIASES.items() if name == "gke")
    for words in (["lab"], ["gke", "lab"], [alias, "lab"]):
        set_cluster(words)
        assert capsys.readouterr().out == "Commands now use the cluster lab (gke).\n"
        assert Store().current_cluster.name == "lab"
        set_cluster(["local"])
        capsys.readouterr()
    with pytest.raises(UsageError, match='The cluster "lab" is a gke cluster, not eks') as caught:
        set_cluster(["eks", "lab"])
    assert caught.value.hint == "mlbench set-cluster lab"
    with pytest.raises(UsageError, match="3 words given"):
        set_cluster(["gke", "lab", "x"])
    monkeypatch.setenv("MLBENCH_CLUSTER", "other")
    set_cluster(["lab"], Format.json)
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"schema_version": 1, "cluster": "lab", "provider": "gke", "current": "other"}
    assert printed.err.startswith("Warning: Commands keep using other: ")
    set_cluster(["lab"])
    assert capsys.readouterr().out == "The cluster lab (gke) is chosen.\n"
    monkeypatch.setenv("MLBENCH_CLUSTER", "lab")
    set_cluster(["lab"])
    assert capsys.readouterr().err == ""


# --- results ----------------------------------------------------------------------------------------------------------


def test_discovered_runs_are_listed_and_problems_are_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    asked: list[Any] = []
    found: list[Any] = []

    def find(name: str, namespace: str | None) -> list[Any]:
        asked.append((name, namespace))
        return found

    client = SimpleNamespace(store=SimpleNamespace(current_cluster=Cluster("lab", "kind")), discover=find)
    monkeypatch.setattr(discover, "Client", lambda notice: client)
    assert discover.discover() == 0
    assert capsys.readouterr().err == "There are no runs on lab.\n"
    assert discover.discover("local", "bench") == 0
    assert capsys.readouterr().err == "There are no run folders that are not in the store.\n"
    assert asked == [("lab", None), ("local", "bench")]
    fine = SimpleNamespace(name="a-1", here="new", results="sealed", created="today", problem=None)
    taken = SimpleNamespace(name="b-1", here="taken", results="-", created="today", problem="its name is taken")
    fine.to_dict, taken.to_dict = (lambda: {"name": "a-1"}), (lambda: {"name": "b-1"})
    found += [fine]
    assert discover.discover() == 0
    found += [taken]
    capsys.readouterr()
    assert discover.discover() == 8
    printed = capsys.readouterr()
    assert [line.split() for line in printed.out.splitlines()] == [
        ["RUN", "HERE", "RESULTS", "CREATED"],
        ["a-1", "new", "sealed", "today"],
        ["b-1", "taken", "-", "today"],
    ]
    assert printed.err == "Warning: b-1: its name is taken\n"
    assert discover.discover(output=Format.json) == 8
    assert json.loads(capsys.readouterr().out) == {
        "schema_version": 1, "cluster": "lab", "runs": [{"name": "a-1"}, {"name": "b-1"}]
    }  # fmt: skip


def test_archives_and_receipts_are_signed_in_their_order(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    told: list[Any] = []
    monkeypatch.setattr(receipts, "is_receipt", lambda path: path.suffix == ".json")
    monkeypatch.setattr(
        receipts, "sign_receipt", lambda path, key, *, force: told.append(("receipt", path, key, force))
    )
    monkeypatch.setattr(sign, "sign_archive", lambda path, key, *, force: told.append(("archive", path, key, force)))
    paths, key = [Path("a.zip"), Path("b.json")], Path("key")
    sign.sign(paths, key)
    printed = capsys.readouterr()
    assert printed.out == "a.zip: signed\nb.json: signed\n"
    assert printed.err.startswith("Signing with key. Enter the passphrase or touch the key within ")
    sign.sign(paths, key, force=True, output=Format.json)
    assert told == [
        *(("archive", paths[0], key, False), ("receipt", paths[1], key, False)),
        *(("archive", paths[0], key, True), ("receipt", paths[1], key, True)),
    ]
    assert json.loads(capsys.readouterr().out) == {
        "schema_version": 1,
        "archives": [{"archive": "a.zip", "signed": True}, {"archive": "b.json", "signed": True}],
    }


def test_versions_whose_support_ends_are_a_warning_or_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    own = Pin("eks", "1.34", "cni", "v2", None, is_own=True)
    ending = Pin("eks", "1.33", "driver", "v1", date(2000, 1, 1))
    monkeypatch.setattr(pins, "list_pins", lambda: [own, ending, ending])
    pins.pins()
    printed = capsys.readouterr()
    assert [line.split() for line in printed.out.splitlines()[1:]] == [
        ["eks", "cni", "1.34", "v2", "-", "yours"],
        *[["eks", "driver", "1.33", "v1", "2000-01-01", "ends", "soon"]] * 2,
    ]
    text = f"Support of these versions ends within {SOON_DAYS} days, or has ended: eks 1.33 on 2000-01-01."
    assert printed.err.endswith(f"\nWarning: {text}\n")
    with pytest.raises(TaskFailedError) as caught:
        pins.pins(check=True, output=Format.json)
    assert caught.value.message == text
    documents = json.loads(capsys.readouterr().out)["pins"]
    assert documents[0] == {
        "group": "eks", "part": "cni", "kubernetes": "1.34", "version": "v2", "supported_until": None,
        "ends_soon": False, "own": True,
    }  # fmt: skip
    assert (documents[1]["supported_until"], documents[1]["ends_soon"], documents[1]["own"]) == (
        "2000-01-01", True, False
    )  # fmt: skip
    monkeypatch.setattr(pins, "list_pins", lambda: [own])
    pins.pins(check=True)
    assert "Warning" not in capsys.readouterr().err


@pytest.mark.parametrize(("sources", "has_list"), [(None, True), (["a", "b"], False), (["demo"], True)])
def test_a_damaged_archive_stops_a_report_only_if_it_was_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Captured, sources: list[str] | None, has_list: bool
) -> None:
    asked: list[Any] = []
    target = tmp_path / "out.md"

    class Client:
        def __init__(self, notice: Any) -> None:
            pass

        def find_archives(self, words: Sequence[str]) -> list[Path]:
            asked.append(list(words))
            return [Path("a"), Path("b")]

        def clusters_of(self, archives: Any) -> list[Cluster]:
            return []

    def open_archives(paths: Any, stack: ExitStack, *, unproven: bool, left_out: Any) -> list[str]:
        asked.append((unproven, left_out))
        return ["opened"]

    def write_report(content: Any, path: Path) -> list[Path]:
        asked.append(content)
        path.write_text("x" * 2048)
        return [path, tmp_path / "a.csv", tmp_path / "b.csv"]

    monkeypatch.setattr(api, "Client", Client)
    monkeypatch.setattr(report, "open_archives", open_archives)
    monkeypatch.setattr("mlbench_cli.results.report.collect.collect", lambda archives, **rest: (archives, rest))
    monkeypatch.setattr("mlbench_cli.results.report.write.write_report", write_report)
    report.report(target, sources, "A title")
    rest = {"title": "A title", "more": [], "foreign": (), "left_out": []}
    assert asked == [sources or [], (False, [] if has_list else None), (["opened"], rest)]
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == (f"{target}\n", "2.0 KiB of 1 run; data: 2 CSV files\n")
    report.report(target, sources, unproven=True, foreign=[Path("log")], output=Format.json)
    assert asked[-1][1]["foreign"] == [Path("log")]
    files = [str(target), str(tmp_path / "a.csv"), str(tmp_path / "b.csv")]
    assert json.loads(capsys.readouterr().out) == {"schema_version": 1, "report": str(target), "files": files}


def test_the_earlier_name_of_a_file_with_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def run_file(*arguments: Any) -> int:
        asked.append(arguments)
        return 7

    monkeypatch.setattr(campaign, "run_file", run_file)
    assert campaign.campaign(CONTEXT, "f.yaml") == 7
    assert (
        campaign.campaign(*(CONTEXT, "f.yaml", Path("out"), ["lab"], True, True, True, 1.0, 2.0, True, Format.json))
        == 7
    )
    line = ("mlbench", "x")
    assert asked == [
        ("f.yaml", Limits(), How(), None, Format.text, line),
        ("f.yaml", Limits(["lab"], 1.0, 2.0), How(True, True, True, True), Path("out"), Format.json, line),
    ]


@pytest.mark.parametrize(
    ("shell", "words"), [(Shell.bash, "COMPREPLY"), (Shell.zsh, "#compdef"), (Shell.fish, "complete")]
)
def test_a_completion_script_says_where_it_goes_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured, shell: Shell, words: str
) -> None:
    monkeypatch.setattr(console, "interactive", lambda: False)
    completion(shell)
    printed = capsys.readouterr()
    assert words in printed.out
    assert "_MLBENCH_COMPLETE" in printed.out
    assert printed.err == ""
    monkeypatch.setattr(console, "interactive", lambda: True)
    completion(shell)
    assert f"mlbench completion {shell}" in capsys.readouterr().err
    completion(shell, Format.json)
    assert json.loads(capsys.readouterr().out)["shell"] == shell.value
