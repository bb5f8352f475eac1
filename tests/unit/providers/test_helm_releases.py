"""A Helm release without a helm: its calls, what the answers mean, and charts of a repository in memory."""

import contextlib
import hashlib
import io
import itertools
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlbench_cli.errors import (
    CredentialError,
    DeadlineError,
    MlbenchError,
    NotFoundError,
    UsageError,
)
from mlbench_cli.kube.api import AccessDenied, ApiError, ObjectNotFound
from mlbench_cli.model.run import Cluster
from providers.base import Readiness, ResourceStatus, TransientError
from providers.helm import archive, install, source, tool
from providers.helm.install import Installation, Release, _error_class_for, _waiting, prepare_chart
from providers.helm.source import Chart, _check_scheme, _DownloadLimit, _http_error, fetch_chart
from providers.helm.tool import Helm, HelmCall, find_helm, render_template
from providers.helm.values import merge_values, parse_custom_values, resolve_overrides, warn_about
from tests.fakes.chart_repository import chart_files, pack_chart, write_chart

HELM = Helm("/bin/helm", "v3.19.0")
SPACE = "/api/v1/namespaces/mlbench-web"
CHART = Chart(
    "web", "1.2.3", "/charts/web", "sha256:" + "a" * 64, Path("/copy/web"), {"replicas": 1}, ("sub",), ("old",)
)


def installation(*entries: str, chart: Chart = CHART, **more: Any) -> Installation:
    customs = parse_custom_values(entries)
    return Installation(chart, customs, resolve_overrides(customs, chart.values), HELM, **more)


# --- the installation -----------------------------------------------------------------------------------------------


def test_the_record_of_a_chart_has_the_names_of_values_and_not_the_values() -> None:
    found = installation("replicas=2", "auth.password=hunter2")
    assert found.record() == {
        "release": "web",
        "namespace": "mlbench-web",
        "version": "1.2.3",
        "source": "/charts/web",
        "digest": "sha256:" + "a" * 64,
        "custom_values": ["replicas", "auth.password"],
    }
    assert found.merged_values() == {"replicas": 2, "auth": {"password": "hunter2"}}
    assert found.warnings[0] == "old"
    assert 'no "auth"' in found.warnings[1]


def test_the_content_of_a_release_changes_with_chart_and_values_and_not_with_their_order() -> None:
    first = installation("a=1", "b=2").content
    assert installation("b=2", "a=1").content == first
    assert installation("a=1", "b=3").content != first
    other = Chart("web", "1.2.3", "/charts/web", "sha256:" + "b" * 64, Path("/copy/web"), {})
    assert installation("a=1", "b=2", chart=other).content != first
    text = json.dumps(["sha256:" + "a" * 64, {"a": 1, "b": 2}])
    assert first == hashlib.sha256(text.encode()).hexdigest()[:40]


@pytest.mark.parametrize(
    ("entries", "seconds", "flag"),
    [(["a=1"], 600.0, "--custom-value"), ([], 601.0, "--chart-timeout"), (["a=1"], 1.0, "--custom-value")],
)
def test_values_and_a_timeout_need_a_chart(entries: list[str], seconds: float, flag: str) -> None:
    with pytest.raises(UsageError, match=f"{flag} needs a Helm chart"), prepare_chart(None, entries, seconds):
        pass


def test_no_chart_is_no_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "find_helm", lambda: pytest.fail("helm was looked for"))
    with prepare_chart(None, []) as found:
        assert found is None


@pytest.mark.parametrize(
    ("location", "command"),
    [
        ("charts/web", "helm template RELEASE charts/web --namespace default"),
        (
            "https://example.org/charts/web@1.2.3",
            "helm template web web --repo https://example.org/charts --version 1.2.3 --namespace default",
        ),
    ],
)
def test_without_helm_the_commands_for_another_machine_are_told(
    monkeypatch: pytest.MonkeyPatch, location: str, command: str
) -> None:
    monkeypatch.setattr(tool, "find_helm", lambda: None)
    with pytest.raises(UsageError, match="Nothing was created") as caught, prepare_chart(location, []):
        pass
    assert command in str(caught.value.hint)


def test_a_chart_is_rendered_with_its_values_before_the_cluster_exists(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rendered: list[Any] = []
    monkeypatch.setattr(tool, "find_helm", lambda: HELM)
    monkeypatch.setattr(tool, "render_template", lambda *given: rendered.append(given))
    location = str(write_chart(tmp_path / "web"))
    with prepare_chart(location, ["replicas=3"], 7.0) as found:
        assert found is not None
        assert rendered == [(HELM, found.chart, "mlbench-web", {"replicas": 3})]
        assert (found.wait_seconds, found.values, found.chart.name) == (7.0, {"replicas": 3}, "web")


# --- the release ----------------------------------------------------------------------------------------------------


class Api:
    """Kubernetes' answers by path."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers = answers
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.created: list[tuple[str, Any]] = []

    def get(self, path: str, **parameters: str) -> Any:
        self.asked.append((path, parameters))
        answer = self.answers.get(path, ObjectNotFound("none", status=404))
        if isinstance(answer, list) and path.endswith("secrets"):
            answer = answer.pop(0) if len(answer) > 1 else answer[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def create(self, path: str, body: Any) -> None:
        self.created.append((path, body))

    @contextlib.contextmanager
    def client(self) -> Iterator["Api"]:
        yield self

    def compose_kubeconfig(self, name: str) -> dict[str, str]:
        return {"current-context": name}


def secrets(*labels: dict[str, str]) -> dict[str, Any]:
    return {"items": [{"metadata": {"labels": item}} for item in labels]}


def revision(number: int, status: str, content: str | None = None) -> dict[str, str]:
    found = {"version": str(number), "status": status}
    return found if content is None else {**found, "mlbench-content": content}


def namespace(owner: str | None = "demo-2", **metadata: Any) -> dict[str, Any]:
    labels = None if owner is None else {"mlbench-cluster": owner}
    return {"metadata": {"labels": labels, **metadata}}


CONTENT = installation().content


def release(answers: dict[str, Any], **more: Any) -> tuple[Release, Api]:
    api = Api(answers)
    cluster = Cluster("demo-2", "gke", details={"owner": "me"})
    return Release(cluster, installation(**more), lambda: api, ()), api  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize(
    ("space", "listed", "found"),
    [
        (None, secrets(), None),
        (namespace("other"), secrets(), ResourceStatus("there", ours=False)),
        (namespace(None), secrets(), ResourceStatus("there", ours=False)),
        (namespace(deletionTimestamp="x"), secrets(), ResourceStatus("being removed", deleting=True)),
        (namespace(), secrets(), None),
        (namespace(), secrets(revision(1, "deployed", CONTENT)), ResourceStatus("deployed")),
        (namespace(), secrets(revision(1, "deployed", "another")), None),
        (namespace(), secrets(revision(1, "deployed")), None),
        (namespace(), secrets(revision(1, "failed", CONTENT)), None),
        (
            namespace(),
            secrets(revision(9, "superseded", "x"), revision(10, "deployed", CONTENT), revision(2, "failed")),
            ResourceStatus("deployed"),
        ),
    ],
)
def test_a_release_is_there_if_the_newest_revision_has_the_same_content(
    space: Any, listed: Any, found: ResourceStatus | None
) -> None:
    answers = {f"{SPACE}/secrets": listed} if space is None else {SPACE: space, f"{SPACE}/secrets": listed}
    what, api = release(answers)
    assert what.find() == found
    if found is not None and found.state == "deployed":
        assert api.asked[-1] == (f"{SPACE}/secrets", {"labelSelector": "owner=helm,name=web"})


@contextlib.contextmanager
def free(program: str, name: str) -> Iterator[int | None]:
    assert (program, name) == ("helm", "demo-2-web")
    yield 3


@contextlib.contextmanager
def taken(program: str, name: str) -> Iterator[int | None]:
    yield None


PENDING = "pending-install"


@pytest.mark.parametrize(
    ("lock", "now", "found"),
    [
        (taken, revision(1, PENDING), ResourceStatus(PENDING)),
        (
            free,
            revision(1, PENDING),
            ResourceStatus(PENDING, broken=f"an earlier helm was interrupted ({PENDING})"),
        ),
        (free, revision(1, "deployed", CONTENT), ResourceStatus("deployed")),
        (free, revision(1, "deployed", "another"), None),
        (free, revision(1, "failed", CONTENT), None),
    ],
)
@pytest.mark.parametrize("before", ["pending-upgrade", "pending-rollback", "uninstalling"])
def test_an_unfinished_release_is_broken_unless_another_helm_works_on_it(
    monkeypatch: pytest.MonkeyPatch, before: str, lock: Any, now: dict[str, str], found: ResourceStatus | None
) -> None:
    monkeypatch.setattr(install, "inheritable_lock", lock)
    listed = [secrets(revision(1, before)), secrets(now)]
    what, _ = release({SPACE: namespace(), f"{SPACE}/secrets": listed})
    status = what.find()
    assert status == (ResourceStatus(before) if lock is taken else found)


class Call:
    """A helm that has ended, or still runs with code None."""

    def __init__(self, code: int | None = 0, output: str = "", complaint: str = "", line: str = "") -> None:
        self.code, self.output, self.complaint, self.line = code, output, complaint, line
        self.given: list[Any] = []
        self.waited: list[float] = []
        self.stopped = 0

    def __call__(self, helm: Helm, words: list[str], **more: Any) -> "Call":
        self.given.append((helm, words, more))
        return self

    def __enter__(self) -> "Call":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait(self, seconds: float) -> None:
        self.waited.append(seconds)

    def stop(self) -> None:
        self.stopped += 1


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Call:
    found = Call()
    monkeypatch.setattr(install, "HelmCall", found)
    return found


def test_a_release_is_installed_in_a_namespace_of_the_clusters_own(call: Call) -> None:
    what, api = release({}, wait_seconds=90.5)
    what.create()
    assert api.created == [
        (
            "/api/v1/namespaces",
            {
                "apiVersion": "v1",
                "kind": "Namespace",
                "metadata": {"name": "mlbench-web", "labels": {"mlbench-cluster": "demo-2", "mlbench-owner": "me"}},
            },
        )
    ]
    ((helm, words, more),) = call.given
    assert helm == HELM
    assert words == [
        *("upgrade", "--install", "web", "/copy/web", "--namespace", "mlbench-web", "--wait", "--timeout", "90.5s"),
        *("--history-max", "3", "--output", "json", "--debug", "--labels", f"mlbench-content={CONTENT}"),
    ]
    assert more == {"access": api, "values": {}, "lock": "demo-2-web"}
    assert what.create_seconds == 150.5


def test_a_namespace_that_exists_is_not_created_again(call: Call) -> None:
    what, api = release({SPACE: namespace()})
    what.create()
    assert api.created == []
    assert len(call.given) == 1


def test_a_release_is_ready_when_helm_has_ended_and_its_notes_are_kept(call: Call) -> None:
    what, _ = release({SPACE: namespace()})
    what.create()
    call.code = None
    assert what.poll() == Readiness(False, "helm is running")
    call.line = "creating 3 resources"
    assert what.poll() == Readiness(False, "creating 3 resources")
    assert call.stopped == 0
    call.code, call.output = 0, json.dumps({"info": {"notes": " Visit it.\n"}})
    assert what.poll() == Readiness(True)
    assert (what.notes, call.stopped) == ("Visit it.", 1)


@pytest.mark.parametrize("output", ["", "[]", "{}", '{"info": {}}', '{"info": {"notes": null}}', "no json"])
def test_a_chart_without_notes_has_none(call: Call, output: str) -> None:
    what, _ = release({SPACE: namespace()})
    what.create()
    call.output = output
    assert what.poll().ready
    assert what.notes == ""


def test_a_helm_that_still_runs_is_stopped_at_the_end(call: Call) -> None:
    what, _ = release({SPACE: namespace()})
    what.close()
    assert call.stopped == 0
    what.create()
    what.close()
    assert call.stopped == 1


@pytest.mark.parametrize(
    ("complaint", "kind"),
    [
        ("Error: context deadline exceeded", DeadlineError),
        ("Error: timed out waiting for the condition", DeadlineError),
        ("Error: Kubernetes cluster unreachable: EOF", MlbenchError),
        ("dial tcp: connection refused", MlbenchError),
        ("context canceled", MlbenchError),
        ("Error: Service is invalid: spec.ports: Required value", UsageError),
        ("", UsageError),
    ],
)
def test_what_helm_complains_of_decides_the_error(call: Call, complaint: str, kind: type[MlbenchError]) -> None:
    assert _error_class_for(complaint) is kind
    pod = {"metadata": {"name": "web-0"}, "status": {"phase": "Pending"}}
    lists = {f"{SPACE}/pods": {"items": [pod]}, f"{SPACE}/services": {"items": []}}
    what, _ = release({SPACE: namespace(), **lists})
    what.create()
    call.code, call.complaint = 1, complaint
    with pytest.raises(MlbenchError) as caught:
        what.poll()
    assert type(caught.value) is kind
    assert caught.value.message == (f'helm did not install the chart "web": {complaint}\nNot ready: pod web-0: Pending')
    assert "mlbench kubeconfig export demo-2" in str(caught.value.hint)
    assert "--namespace mlbench-web get pods,events" in str(caught.value.hint)


def test_a_cluster_that_does_not_answer_does_not_hide_helms_complaint(call: Call) -> None:
    what, _ = release({SPACE: namespace(), f"{SPACE}/pods": ApiError("gone", status=503)})
    what.create()
    call.code, call.complaint = 1, "Error: no such thing"
    with pytest.raises(UsageError) as caught:
        what.poll()
    assert caught.value.message.endswith("no such thing")


@pytest.mark.parametrize(
    ("status", "answer"),
    [
        ("deployed", Readiness(True, "another helm process is working on it (deployed)")),
        (PENDING, Readiness(False, f"another helm process is working on it ({PENDING})")),
        ("failed", None),
    ],
)
def test_the_helm_of_a_killed_client_is_followed_by_its_record(
    monkeypatch: pytest.MonkeyPatch, status: str, answer: Readiness | None
) -> None:
    monkeypatch.setattr(install, "inheritable_lock", taken)
    what, _ = release({SPACE: namespace(), f"{SPACE}/secrets": secrets(revision(1, status, CONTENT))})
    if answer is not None:
        assert what.poll() == answer
        return
    with pytest.raises(MlbenchError, match='"web" was not finished by another helm'):
        what.poll()


def test_a_release_that_another_helm_left_behind_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "inheritable_lock", free)
    what, _ = release({SPACE: namespace(), f"{SPACE}/secrets": secrets(revision(1, PENDING))})
    with pytest.raises(MlbenchError, match="was not finished"):
        what.poll()


@pytest.mark.parametrize(
    ("code", "complaint", "is_removed"),
    [(0, "", True), (1, "Error: release: not found", True), (1, "Error: denied", False), (None, "", True)],
)
def test_a_release_is_uninstalled_with_a_timeout(
    call: Call, code: int | None, complaint: str, is_removed: bool
) -> None:
    what, api = release({})
    call.code, call.complaint = code, complaint
    if is_removed:
        what.delete()
    else:
        with pytest.raises(MlbenchError, match='could not remove the release "web": Error: denied'):
            what.delete()
    ((_, words, more),) = call.given
    assert words == ["uninstall", "web", "--namespace", "mlbench-web", "--wait", "--timeout", "300s"]
    assert more == {"access": api, "lock": "demo-2-web"}
    # helm itself ends before it is stopped.
    assert call.waited[0] > 300
    assert call.stopped == 1
    assert what.remove_command == "helm uninstall web --namespace mlbench-web"


@pytest.mark.parametrize(
    ("error", "is_transient"),
    [
        (ApiError("x", status=0, hint="h"), True),
        (ApiError("x", status=429, hint="h"), True),
        (ApiError("x", status=500, hint="h"), True),
        (ApiError("x", status=503, hint="h"), True),
        (ApiError("x", status=422, hint="h"), False),
        (AccessDenied("x", status=403, hint="h"), False),
    ],
)
def test_errors_of_the_api_that_pass_are_transient(error: ApiError, is_transient: bool) -> None:
    what, _ = release({SPACE: error})
    with pytest.raises(MlbenchError) as caught:
        what.find()
    assert isinstance(caught.value, TransientError) is is_transient
    assert (caught.value.message, caught.value.hint) == ("x", "h")


def pod(name: str, phase: str = "Pending", **status: Any) -> dict[str, Any]:
    return {"metadata": {"name": name}, "status": {"phase": phase, **status}}


def container(reason: str, message: str | None = None) -> dict[str, Any]:
    return {"state": {"waiting": {"reason": reason, "message": message}}}


def listing(pods: list[Any], services: list[Any]) -> Any:
    return Api({f"{SPACE}/pods": {"items": pods}, f"{SPACE}/services": {"items": services}})


@pytest.mark.parametrize(
    ("item", "says"),
    [
        (pod("done", "Succeeded"), None),
        (pod("up", "Running", conditions=[{"type": "Ready", "status": "True"}]), None),
        (pod("a", "Running", conditions=[{"type": "Ready", "status": "False"}]), "pod a: Running"),
        (pod("a"), "pod a: Pending"),
        (pod("a", containerStatuses=[container("ErrImagePull", "no such image")]), "pod a: ErrImagePull no such image"),
        (
            pod(
                "a",
                initContainerStatuses=[container("A")],
                containerStatuses=[{"state": {"running": {}}}, container("B")],
            ),
            "pod a: A; B",
        ),
        (
            pod("a", conditions=[{"type": "PodScheduled", "status": "False", "message": "0/2 nodes"}]),
            "pod a: 0/2 nodes",
        ),
        (
            pod("a", conditions=[{"type": "PodScheduled", "message": "0/2"}], containerStatuses=[container("C")]),
            "pod a: C",
        ),
        ({"metadata": {"name": "new"}}, "pod new: None"),
        (pod("a", containerStatuses=[container("E", "x" * 400)]), f"pod a: E {'x' * 298}"),
    ],
)
def test_a_pod_that_is_not_ready_is_named_with_its_reason(item: Any, says: str | None) -> None:
    assert _waiting(listing([item], []), "mlbench-web") == ([] if says is None else [says])


@pytest.mark.parametrize(
    ("kind", "status", "is_named"),
    [
        ("LoadBalancer", {}, True),
        ("LoadBalancer", {"loadBalancer": {"ingress": []}}, True),
        ("LoadBalancer", {"loadBalancer": {"ingress": [{"ip": "192.0.2.1"}]}}, False),
        ("ClusterIP", {}, False),
    ],
)
def test_a_service_without_its_load_balancer_is_named(kind: str, status: Any, is_named: bool) -> None:
    service = {"metadata": {"name": "front"}, "spec": {"type": kind}, "status": status}
    found = _waiting(listing([], [service]), "mlbench-web")
    assert [item.partition(":")[0] for item in found] == (["Service front"] if is_named else [])


def test_of_many_pods_that_are_not_ready_ten_are_named() -> None:
    assert len(_waiting(listing([pod(str(number)) for number in range(11)], []), "mlbench-web")) == 10


# --- a call of helm -------------------------------------------------------------------------------------------------


class Process:
    """A program that writes `err` and `out` and then waits for a signal, or has ended with a code."""

    code: int | None = None
    obeys = True
    out, err = "", ""

    def __init__(self, argv: list[str], **options: Any) -> None:
        Process.last = self  # type: ignore[attr-defined]
        self.argv, self.options = argv, options
        self.signals: list[str] = []
        os.write(options["stdout"], self.out.encode())
        os.write(options["stderr"], self.err.encode())
        self.files = {
            flag: (os.fstat(int(path.rpartition("/")[2])).st_mode & 0o777, Path(path).read_text())
            for flag, path in itertools.pairwise(argv)
            if flag in ("--kubeconfig", "--values")
        }

    def poll(self) -> int | None:
        return self.code

    def wait(self, seconds: float | None = None) -> None:
        if self.code is None:
            raise subprocess.TimeoutExpired("helm", seconds or 0)

    def terminate(self) -> None:
        self.signals.append("TERM")
        if self.obeys:
            self.code = -signal.SIGTERM

    def kill(self) -> None:
        self.signals.append("KILL")
        self.code = -signal.SIGKILL


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[type[Process]]:
    kind = type("Process", (Process,), {})
    monkeypatch.setattr(subprocess, "Popen", kind)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("HELM_NAMESPACE", "mine")
    monkeypatch.setenv("KUBECONFIG", "/mine")
    monkeypatch.setenv("HOME", "/home/me")
    yield kind
    assert {path.name for path in tmp_path.iterdir()} <= {f"mlbench-helm-{os.getuid()}"}  # the folder of locks


def test_helm_gets_access_and_values_in_files_of_this_user_alone(process: type[Process]) -> None:
    with HelmCall(HELM, ["template", "web"], access=Api({}), values={"a": 1}):  # type: ignore[arg-type]
        started: Process = Process.last  # type: ignore[attr-defined]
        assert started.argv[:3] == ["/bin/helm", "template", "web"]
        assert {flag: (mode, json.loads(text)) for flag, (mode, text) in started.files.items()} == {
            "--kubeconfig": (0o600, {"current-context": "cluster"}),
            "--values": (0o600, {"a": 1}),
        }
        assert started.options["stdin"] == subprocess.DEVNULL
        assert started.options["start_new_session"] is True
        assert len(started.options["pass_fds"]) == 2
        environment = started.options["env"]
        assert "HELM_NAMESPACE" not in environment
        assert "KUBECONFIG" not in environment
        assert environment["HOME"] == "/home/me"
        homes = {key: value for key, value in environment.items() if key.startswith("HELM_")}
        home = Path(homes["HELM_CACHE_HOME"]).parent
        assert homes == {
            "HELM_CACHE_HOME": f"{home}/cache",
            "HELM_CONFIG_HOME": f"{home}/config",
            "HELM_DATA_HOME": f"{home}/data",
        }
        assert home.is_dir()
    assert not home.exists()


def test_files_with_credentials_are_closed_at_the_end(process: type[Process]) -> None:
    with HelmCall(HELM, ["template"], access=Api({}), values={"a": 1}):  # type: ignore[arg-type]
        files = Process.last.options["pass_fds"]  # type: ignore[attr-defined]
        assert all(os.fstat(file).st_size for file in files)
    for file in files:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(file)


def test_a_call_without_access_and_values_has_neither_flag(process: type[Process]) -> None:
    with HelmCall(HELM, ["version"]):
        started: Process = Process.last  # type: ignore[attr-defined]
    assert started.argv == ["/bin/helm", "version"]
    with HelmCall(HELM, ["template"], values={}):
        started = Process.last  # type: ignore[attr-defined]
    assert json.loads(started.files["--values"][1]) == {}


def test_helm_keeps_the_lock_and_a_second_call_is_refused(process: type[Process]) -> None:
    with HelmCall(HELM, ["upgrade"], lock="demo-2-web"):
        assert len(Process.last.options["pass_fds"]) == 1  # type: ignore[attr-defined]
        with pytest.raises(MlbenchError, match="Another helm process is working on demo-2-web"):
            HelmCall(HELM, ["upgrade"], lock="demo-2-web")
    with HelmCall(HELM, ["upgrade"], lock="demo-2-web"):
        pass


@pytest.mark.parametrize(("obeys", "signals"), [(True, ["TERM"]), (False, ["TERM", "KILL"])])
def test_a_helm_that_runs_is_asked_to_end_before_it_is_killed(
    process: type[Process], obeys: bool, signals: list[str]
) -> None:
    """It records on the cluster that it was stopped."""
    process.obeys, process.out = obeys, "half"
    with HelmCall(HELM, ["upgrade"]) as call:
        assert call.code is None
        assert call.output == "half"
    assert Process.last.signals == signals  # type: ignore[attr-defined]
    assert call.output == "half"  # what it said outlives its files
    assert call.code in (-signal.SIGTERM, -signal.SIGKILL)


def test_a_helm_that_has_ended_gets_no_signal(process: type[Process]) -> None:
    process.code = 0
    with HelmCall(HELM, ["upgrade"]) as call:
        call.wait(1)
    assert Process.last.signals == []  # type: ignore[attr-defined]


def test_a_helm_that_takes_too_long_is_stopped(process: type[Process]) -> None:
    with HelmCall(HELM, ["upgrade"]) as call:
        call.wait(0.1)
        assert call.code == -signal.SIGTERM


DEBUG = "install.go:225: 2026-11-21 12:00:00 [debug] "


@pytest.mark.parametrize(
    ("err", "line"),
    [
        ("", ""),
        ("WARNING: x\n", ""),
        (f"{DEBUG}creating 1 resource(s)\n{DEBUG}beginning wait \nError: no\n", "beginning wait"),
    ],
)
def test_the_last_line_of_debugging_says_what_helm_does(process: type[Process], err: str, line: str) -> None:
    process.err = err
    with HelmCall(HELM, ["upgrade"]) as call:
        assert call.line == line


@pytest.mark.parametrize(
    ("err", "says"),
    [
        ("Error: chart is bad\nsecond line\n", "Error: chart is bad\nsecond line"),
        (f"noise\nError: bad\n\nUse --debug flag to render out invalid YAML\n{DEBUG}bad\nmain.go\n", "Error: bad"),
        ("1\n2\n3\n4\n5\n6\n", "2\n3\n4\n5\n6"),
        ("1\n2\n", "1\n2"),
        ("", "exit code 1"),
        ("Error: " + "x" * 2000, "Error: " + "x" * 1493),
    ],
)
def test_the_complaint_of_helm_is_its_error_without_the_places_in_its_source(
    process: type[Process], err: str, says: str
) -> None:
    process.err, process.code = err, 1
    with HelmCall(HELM, ["upgrade"]) as call:
        assert call.complaint == says


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (0, None),
        (1, "The chart web 1.2.3 cannot be rendered with these values: Error: bad"),
        (None, "The chart web 1.2.3 was not rendered within 60 s."),
    ],
)
def test_a_chart_is_rendered_without_a_cluster(process: type[Process], code: int | None, says: str | None) -> None:
    process.code, process.out, process.err = code, "kind: ConfigMap", "Error: bad"
    if says is None:
        assert render_template(HELM, CHART, "mlbench-web", {"a": 1}) == "kind: ConfigMap"
    else:
        with pytest.raises(UsageError) as caught:
            render_template(HELM, CHART, "mlbench-web", {"a": 1})
        assert caught.value.message == says
        if code:
            assert caught.value.hint == "helm show values /charts/web   shows what it takes"
    argv = Process.last.argv  # type: ignore[attr-defined]
    assert argv[1:6] == ["template", "web", "/copy/web", "--namespace", "mlbench-web"]
    assert "--kubeconfig" not in argv


@pytest.mark.parametrize(
    ("done", "found"),
    [
        (SimpleNamespace(returncode=0, stdout="v3.19.0+g12", stderr=""), Helm("/bin/helm", "v3.19.0+g12")),
        (SimpleNamespace(returncode=0, stdout="v2.17.0", stderr=""), r"/bin/helm is v2\.17\.0; 3\.13 or later"),
        (SimpleNamespace(returncode=1, stdout="v3.19.0", stderr="broken"), "did not print its version: broken"),
        (SimpleNamespace(returncode=0, stdout="hello", stderr=""), "did not print its version: hello"),
        (OSError("Exec format error"), "cannot be run: Exec format error"),
        (subprocess.TimeoutExpired("helm", 60), "cannot be run: .*timed out"),
    ],
)
def test_helm_must_run_and_tell_its_version(monkeypatch: pytest.MonkeyPatch, done: Any, found: Any) -> None:
    asked: list[Any] = []

    def run(command: list[str], **options: Any) -> Any:
        asked.append((command, options["env"]["HELM_DATA_HOME"]))
        if isinstance(done, Exception):
            raise done
        return done

    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(subprocess, "run", run)
    if isinstance(found, Helm):
        assert find_helm() == found
    else:
        with pytest.raises(UsageError, match=found):
            find_helm()
    assert asked == [(["/bin/helm", "version", "--template", "{{.Version}}"], "/nonexistent/data")]
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert find_helm() is None


# --- charts of a repository -----------------------------------------------------------------------------------------

REPOSITORY = "https://example.org/charts"
GOOD = pack_chart(chart_files())
DIGEST = hashlib.sha256(GOOD).hexdigest()


@pytest.fixture
def repository(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Files by URL; the index has the chart web 1.2.3."""
    entry = {"version": "1.2.3", "urls": ["web-1.2.3.tgz"], "digest": DIGEST}
    files: dict[str, Any] = {f"{REPOSITORY}/web-1.2.3.tgz": GOOD, "entries": {"web": [entry]}, "asked": []}

    def download(repository: str, url: str, limit: int, read_seconds: float) -> bytes:
        files["asked"].append((url, limit >> 20, read_seconds))
        if url == f"{REPOSITORY}/index.yaml":
            return json.dumps({"entries": files["entries"]}).encode()
        return bytes(files[url])

    monkeypatch.setattr(source, "_download", download)
    return files


def test_a_chart_comes_from_where_the_index_says(repository: dict[str, Any]) -> None:
    with fetch_chart(f"{REPOSITORY}/web@1.2.3", 7) as chart:
        assert (chart.name, chart.version, chart.warnings, chart.subcharts) == ("web", "1.2.3", (), ())
        assert (chart.digest, chart.source) == (f"sha256:{DIGEST}", f"{REPOSITORY}/web@1.2.3")
        assert chart.values["image"] == {"repository": "web", "tag": "v1"}
    # helm's own limit of an archive is 20 MiB
    assert repository["asked"] == [(f"{REPOSITORY}/index.yaml", 50, 7), (f"{REPOSITORY}/web-1.2.3.tgz", 20, 7)]


@pytest.mark.parametrize("digest", [f"sha256:{DIGEST}", DIGEST.upper(), DIGEST])
def test_a_digest_may_be_written_with_its_kind_or_in_capitals(repository: dict[str, Any], digest: str) -> None:
    repository["entries"]["web"][0]["digest"] = digest
    with fetch_chart(f"{REPOSITORY}/web@1.2.3") as chart:
        assert chart.warnings == ()


@pytest.mark.parametrize("digest", [None, "", "sha256:"])
def test_a_chart_without_a_digest_is_used_with_a_warning(repository: dict[str, Any], digest: str | None) -> None:
    repository["entries"]["web"][0]["digest"] = digest
    with fetch_chart(f"{REPOSITORY}/web@1.2.3") as chart:
        assert chart.warnings == (f"{REPOSITORY} has no digest for web 1.2.3, so it cannot be verified.",)


def test_another_archive_than_promised_is_not_used(repository: dict[str, Any]) -> None:
    repository["entries"]["web"][0]["digest"] = "0" * 64
    with (
        pytest.raises(UsageError, match=f"its SHA-256 is {DIGEST}, not {'0' * 64}"),
        fetch_chart(f"{REPOSITORY}/web@1.2.3"),
    ):
        pass


@pytest.mark.parametrize(
    ("entries", "kind", "says"),
    [
        (5, UsageError, "is not a chart repository"),
        ({}, NotFoundError, 'has no chart "web"'),
        ({"webb": []}, NotFoundError, 'has no chart "web".*Did you mean "webb"'),
        ({"web": []}, NotFoundError, "no version 1.2.3 of web; it has none"),
        ({"web": [{"version": "1.2.3"}]}, UsageError, "does not say where web 1.2.3 is"),
        ({"web": [{"version": "1.2.3", "urls": []}]}, UsageError, "does not say where web 1.2.3 is"),
        ({"web": [{"version": "1.2.3", "urls": ["http://example.org/x"]}]}, UsageError, "is not encrypted"),
        (
            {"web": ["junk", *({"version": f"1.0.{number}"} for number in range(6))]},
            NotFoundError,
            r"it has 1\.0\.0, 1\.0\.1, 1\.0\.2, 1\.0\.3, 1\.0\.4 and older ones\.",
        ),
        (
            {"web": [{"version": f"1.0.{number}"} for number in range(5)]},
            NotFoundError,
            r"it has 1\.0\.0, 1\.0\.1, 1\.0\.2, 1\.0\.3, 1\.0\.4\.",
        ),
    ],
)
def test_an_index_without_the_version_says_what_it_has(
    repository: dict[str, Any], entries: Any, kind: type[MlbenchError], says: str
) -> None:
    repository["entries"] = entries
    with pytest.raises(kind, match=says) as caught, fetch_chart(f"{REPOSITORY}/web@1.2.3"):
        pass
    assert type(caught.value) is kind


@pytest.mark.parametrize(("name", "version"), [("other", "1.2.3"), ("web", "1.2.4")])
def test_an_archive_that_holds_another_chart_is_not_used(repository: dict[str, Any], name: str, version: str) -> None:
    data = pack_chart(chart_files(name, version))
    repository[f"{REPOSITORY}/web-1.2.3.tgz"] = data
    repository["entries"]["web"][0]["digest"] = hashlib.sha256(data).hexdigest()
    with (
        pytest.raises(UsageError, match=f"holds {name} {version}, not web 1.2.3"),
        fetch_chart(f"{REPOSITORY}/web@1.2.3"),
    ):
        pass


@pytest.mark.parametrize(
    ("about", "subcharts"),
    [
        ("dependencies: [{name: redis}, {name: db, alias: store}, junk]", ("redis", "store")),
        ("dependencies: none", ()),
        ("type: application", ()),
    ],
)
def test_a_dependency_is_known_by_its_alias(tmp_path: Path, about: str, subcharts: tuple[str, ...]) -> None:
    write_chart(tmp_path / "web", **{"Chart.yaml": f"apiVersion: v1\nname: web\nversion: 1.2.3\n{about}\n"})
    with fetch_chart(str(tmp_path / "web")) as chart:
        assert chart.subcharts == subcharts


@pytest.mark.parametrize(
    ("name", "is_allowed"),
    [("a", True), ("a" * 53, True), ("a" * 54, False), ("a-", False), ("1a", False), ("", False)],
)
def test_the_name_of_a_chart_is_that_of_a_release(tmp_path: Path, name: str, is_allowed: bool) -> None:
    """helm allows 53 characters."""
    (tmp_path / "Chart.yaml").write_text(f'apiVersion: v2\nname: "{name}"\nversion: 1.2.3\n')
    if is_allowed:
        with fetch_chart(str(tmp_path)) as chart:
            assert (chart.name, chart.values) == (name, {})
        return
    with pytest.raises(UsageError, match="cannot be the name of a release"), fetch_chart(str(tmp_path)):
        pass


def test_the_digest_of_a_folder_is_that_of_paths_and_contents(tmp_path: Path) -> None:
    folder = write_chart(tmp_path / "web")
    with fetch_chart(str(folder)) as chart:
        first = chart.digest
    (folder / ".git").mkdir()
    (folder / ".git/HEAD").write_text("ref")
    with fetch_chart(str(folder)) as chart:
        assert chart.digest == first
        assert not (chart.folder / ".git").exists()
        assert chart.source == str(folder)
    digest = hashlib.sha256()
    for path in ("Chart.yaml", "templates/config.yaml", "values.yaml"):
        content = (folder / path).read_bytes()
        digest.update(path.encode() + b"\0" + str(len(content)).encode() + b"\0" + content)
    assert first == f"sha256:{digest.hexdigest()}"


@pytest.mark.parametrize(("files", "size", "is_allowed"), [(3, 10**6, True), (2, 10**6, False), (9, 100, False)])
def test_a_folder_with_too_much_in_it_is_no_chart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: int, size: int, is_allowed: bool
) -> None:
    monkeypatch.setattr(source, "MAX_FILES", files)
    monkeypatch.setattr(source, "MAX_UNPACKED", size)
    with contextlib.ExitStack() as stack:
        if not is_allowed:
            stack.enter_context(pytest.raises(UsageError, match="too many for a chart"))
        stack.enter_context(fetch_chart(str(write_chart(tmp_path / "web"))))


def test_a_folder_of_just_the_largest_size_is_a_chart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = write_chart(tmp_path / "web")
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    monkeypatch.setattr(source, "MAX_UNPACKED", size)
    with fetch_chart(str(folder)):
        pass


@pytest.mark.parametrize(
    ("files", "size", "says"),
    [
        (3, 1 << 20, None),
        (2, 1 << 20, "has more than 2 files"),
        (3, 1000, "when unpacked"),
    ],
)
def test_an_archive_may_have_just_as_much_as_is_allowed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: int, size: int, says: str | None
) -> None:
    monkeypatch.setattr(archive, "MAX_FILES", files)
    monkeypatch.setattr(archive, "MAX_UNPACKED", size)
    with contextlib.ExitStack() as stack:
        if says is not None:
            stack.enter_context(pytest.raises(UsageError, match=says))
        assert archive.unpack(GOOD, tmp_path, "web.tgz") == tmp_path / "web"


# --- addresses and downloads ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("https://example.org/x", None),
        ("http://localhost:8080/x", None),
        ("http://127.9.9.9/x", None),
        ("http://[::1]/x", None),
        ("http://localhost.example.org/x", "is not encrypted"),
        ("http://10.0.0.1/x", "is not encrypted"),
        ("http:///x", "is not encrypted"),
        ("ftp://localhost/x", '"ftp" is neither https nor http'),
        ("/x", '"" is neither https nor http'),
    ],
)
def test_only_this_machine_may_be_asked_without_encryption(url: str, says: str | None) -> None:
    with contextlib.ExitStack() as stack:
        if says is not None:
            stack.enter_context(pytest.raises(UsageError, match=f"^--chart-location {url}.*{says}"))
        _check_scheme(url)


def test_a_redirect_is_named_with_where_it_came_from() -> None:
    with pytest.raises(UsageError, match=r"^https://a redirects to http://b, which is not encrypted"):
        _check_scheme("http://b", "https://a")


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (401, CredentialError),
        (403, CredentialError),
        (404, NotFoundError),
        (410, NotFoundError),
        (402, MlbenchError),
        (500, MlbenchError),
    ],
)
def test_a_status_of_http_is_an_error_of_its_kind(status: int, kind: type[MlbenchError]) -> None:
    error = _http_error("https://example.org/x", status)
    assert type(error) is kind
    assert f"HTTP {status}" in error.message
    assert "https://example.org/x" in error.message


class Raw(io.BytesIO):
    def read(self, size: int | None = -1, decode_content: bool = False) -> bytes:
        return super().read(size)


def response(content: bytes, location: str | None = None) -> Any:
    headers = {"location": location} if location else {}
    return SimpleNamespace(
        url="https://example.org/x", is_redirect=location is not None, headers=headers, raw=Raw(content)
    )


@pytest.mark.parametrize(("size", "is_allowed"), [(100, True), (101, False), (0, True)])
def test_a_download_may_be_just_as_large_as_its_limit(size: int, is_allowed: bool) -> None:
    found = response(b"x" * size)
    raw = found.raw
    with contextlib.ExitStack() as stack:
        if not is_allowed:
            stack.enter_context(pytest.raises(UsageError, match=r"https://example\.org/x has more than 0 MiB"))
        _DownloadLimit(100)(found)
        assert found.raw.read() == b"x" * size
    assert raw.closed


def test_a_download_that_takes_longer_than_three_minutes_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    limit = _DownloadLimit(100)
    now[0] += 180.0
    limit(response(b"x"))
    now[0] += 0.1
    with pytest.raises(DeadlineError, match="not come whole after 180 s"):
        limit(response(b"x"))


@pytest.mark.parametrize(
    ("location", "says"),
    [
        ("https://other.org/y", None),
        ("/y", None),
        ("http://example.org/y", "https://example.org/x redirects to http://example.org/y, which is not encrypted"),
        ("file:///etc/passwd", '"file" is neither'),
        ("https://[::1/y", "names .* which is not an address"),
    ],
)
def test_a_redirect_leads_to_encrypted_places_only(location: str, says: str | None) -> None:
    with contextlib.ExitStack() as stack:
        if says is not None:
            stack.enter_context(pytest.raises(UsageError, match=says))
        _DownloadLimit(100)(response(b"", location))


# --- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("defaults", "top", "merged"),
    [
        ({"a": {"b": 1}}, {"a": {"c": 2}}, {"a": {"b": 1, "c": 2}}),
        ({"a": 1}, {"a": {"c": 2}}, {"a": {"c": 2}}),
        ({"a": [1, 2]}, {"a": [3]}, {"a": [3]}),
        ({"a": {"b": 1}}, {"a": 2}, {"a": 2}),
        ({"a": {"b": 1}}, {"a": {"b": None}}, {"a": {}}),
        ({}, {"a": None}, {}),
        ({}, {"a": {"b": None, "c": 0}}, {"a": {"c": 0}}),
    ],
)
def test_values_are_merged_as_helm_merges_them(defaults: Any, top: Any, merged: Any) -> None:
    """https://helm.sh/docs/chart_template_guide/values_files: maps are merged, lists replaced, null deletes."""
    before = json.dumps(defaults)
    found = merge_values(defaults, top)
    assert found == merged
    assert json.dumps(defaults) == before


def resolve(defaults: Any, *entries: str) -> Any:
    return resolve_overrides(parse_custom_values(entries), defaults)


@pytest.mark.parametrize(
    ("defaults", "entries", "found"),
    [
        ({"l": [{"a": {"x": 1}, "b": 2}]}, ["l[0].a.y=3"], {"l": [{"a": {"x": 1, "y": 3}, "b": 2}]}),
        ({"l": [1, 2, 3]}, ["l[1]=9"], {"l": [1, 9, 3]}),
        ({"l": [1]}, ["l[1]=2", "l[2]=3"], {"l": [1, 2, 3]}),
        ({"l": [[1, 2], [3]]}, ["l[1][0]=4"], {"l": [[1, 2], [4]]}),
        ({"l": "text"}, ["l[0]=1"], {"l": [1]}),
        ({"l": [{"a": 1}]}, ["l[0].a=null"], {"l": [{}]}),
        ({"m": {}}, ["m=text"], {"m": "text"}),
        ({"m": {"a": 1}}, ['m={"b": 2}'], {"m": {"b": 2}}),
        ({}, ["a.b.c=1", "a.d=2"], {"a": {"b": {"c": 1}, "d": 2}}),
        ({}, ["10=x"], {"10": "x"}),
    ],
)
def test_overrides_repeat_of_lists_what_the_chart_has(defaults: Any, entries: list[str], found: Any) -> None:
    before = json.dumps(defaults)
    assert resolve(defaults, *entries) == found
    assert json.dumps(defaults) == before


@pytest.mark.parametrize(
    ("defaults", "entry", "next_index"),
    [({"l": [1]}, "l[2]=x", 1), ({}, "a.l[1].b=x", 0), ({"l": [[1]]}, "l[0][2]=x", 1)],
)
def test_a_list_grows_by_one_at_a_time(defaults: Any, entry: str, next_index: int) -> None:
    with pytest.raises(UsageError, match=rf"so the next is \[{next_index}\]"):
        resolve(defaults, entry)


@pytest.mark.parametrize(
    ("entry", "warning"),
    [
        ("known=1", None),
        ("map.key=1", None),
        ("map.other=1", 'no "other" of map.other'),
        ("empty.any=1", None),
        ("known.deeper=1", None),
        ("list[0].x=1", None),
        ("sub.x=1", None),
        ("global.x=1", None),
        ("unknown=1", 'no "unknown" of unknown'),
    ],
)
def test_a_value_that_the_chart_does_not_know_is_warned_of(entry: str, warning: str | None) -> None:
    defaults = {"known": 0, "map": {"key": 0}, "empty": {}, "list": [{}]}
    found = warn_about(parse_custom_values([entry]), defaults, ["sub"])
    assert len(found) == (warning is not None)
    assert not found or warning in found[0]  # type: ignore[operator]


def test_a_long_number_is_warned_of_with_what_helm_prints() -> None:
    (found,) = warn_about(parse_custom_values(["port=1234567"]), {"port": 0}, [])
    assert "helm prints port=1234567 as 1.23457e+06" in found
    assert """--custom-value 'port="1234567"'""" in found
