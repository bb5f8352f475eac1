"""How a client shapes the network of a run, proves it by probes, and lets the workers begin or refuses the network."""

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlbench_cli.engines.kubernetes.network import gate as gating
from mlbench_cli.engines.kubernetes.network.gate import NetworkGate
from mlbench_cli.errors import CapacityError, UnreachableError
from mlbench_cli.kube.access import Access
from mlbench_cli.kube.api import AccessDenied, ApiError
from mlbench_cli.kube.execute import Executed
from mlbench_cli.model.run import Run
from mlbench_cli.model.spec import KubernetesOptions, RunSpec
from task_images.contract import format_event, parse_event
from tests.unit.engines.kubernetes.memory_api import MemoryApi

JOB = "/apis/batch/v1/namespaces/team/jobs/x-2"
RATE = 1e9


def link(**changes: float) -> dict[str, float]:
    good = {"alone_bits_per_second": RATE, "together_bits_per_second": RATE, "rtt_p50_seconds": 1e-6}
    return {"seconds": 1.0, **good, **changes}


GOOD = {"links": [link()]}
SLOW = {"links": [link(together_bits_per_second=RATE / 2)]}
HALF = "it carries 500 Mbit/s with all ranks sending"
FAST = {"links": [link(alone_bits_per_second=2.1 * RATE)]}


class Lab:
    """A gate whose pods take orders and whose probes give `reports` in turn, the last one for ever."""

    def __init__(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        *reports: dict[str, Any],
        method: str | None = None,
        run_on_node: Any = lambda node, script, arguments: json.dumps({"discipline": "tbf"}),
    ) -> None:
        monkeypatch.setattr(gating, "POLL_SECONDS", 0.0)
        monkeypatch.setattr(gating, "execute", self.execute)
        self.api = MemoryApi({JOB: {"metadata": {"name": "x-2", "namespace": "team", "uid": "u"}}})
        self.reports = list(reports) or [GOOD]
        self.orders: dict[str, list[str]] = {}
        self.code = 0
        options = KubernetesOptions(network_method=method)
        names = ("x-2", "c", "kubernetes", "custom", "custom", ("true",), "gloo", 2)
        run = Run("abc", RunSpec(*names, network="1gbit", kubernetes=options), folder, "2027")
        access = cast(Access, SimpleNamespace(client=lambda: nullcontext(self.api.api)))
        self.gate = NetworkGate(access, "team", run, [], run_on_node)
        self.pods = {number: self.pod(f"p{number}") for number in (0, 1)}

    def pod(self, name: str, phase: str = "Running", **metadata: str) -> dict[str, Any]:
        status = {"phase": phase, "containerStatuses": [{"name": "main", "containerID": "containerd://a"}]}
        return {"metadata": {"name": name, **metadata}, "spec": {"nodeName": "n"}, "status": status}

    def execute(self, access: Any, namespace: str, pod: str, command: list[str]) -> Executed:
        assert namespace == "team"
        if command[0] == "sh":
            self.orders.setdefault(pod, []).append(command[-1])
            return Executed(self.code, b"", "read-only")
        assert (pod, command[0]) == ("p0", "cat")
        report = self.reports.pop(0) if len(self.reports) > 1 else self.reports[0]
        event = {"v": 1, "event": "network", "rank": 0, "time": 1.0, **report}
        return Executed(0, format_event(event).encode(), "")

    def advance(self, seconds: float = 0.0) -> None:
        self.gate.advance(self.api.objects[JOB], self.pods, seconds)
        if self.gate._thread is not None:
            self.gate._thread.join(10)

    @property
    def states(self) -> list[str]:
        """What was noted on the Job, in order."""
        notes = [body["metadata"]["annotations"]["mlbench/network"] for body in self.api.bodies if body]
        return [json.loads(note)["state"] for note in notes]

    @property
    def note(self) -> dict[str, Any]:
        """The last note."""
        text = self.api.objects[JOB]["metadata"]["annotations"]["mlbench/network"]
        document: dict[str, Any] = json.loads(text)
        return document


def test_a_network_that_is_as_asked_opens_the_gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(tmp_path, monkeypatch)
    lab.advance()
    assert (lab.gate.is_open, lab.gate.is_refused, lab.gate.failure) == (True, False, None)
    assert lab.states == ["shaping", "open"]
    assert lab.orders["p0"] == lab.orders["p1"]
    probe, go = lab.orders["p0"]
    word, number, event = go.split(" ", 2)
    assert (probe, word) == (f"probe {number}", "go")
    told = parse_event(event)
    assert told is not None
    assert told["setup"] == {
        "method": "nsenter",
        "discipline": "tbf",
        "links": 2,
        "first": {"discipline": "tbf"},
    }


def test_a_network_is_probed_three_times_before_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(tmp_path, monkeypatch, SLOW)
    lab.advance()
    assert (lab.gate.is_open, lab.gate.is_refused) == (False, True)
    assert [order.split()[0] for order in lab.orders["p0"]] == ["probe"] * 3
    assert lab.note["problem"] == "it carries 500 Mbit/s with all ranks sending"
    assert lab.note["report"]["links"] == SLOW["links"]
    once = Lab(tmp_path, monkeypatch, SLOW, SLOW, GOOD)
    once.advance()
    assert once.gate.is_open


def test_a_link_that_is_far_too_fast_is_not_probed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(tmp_path, monkeypatch, FAST)
    lab.advance()
    assert lab.gate.is_refused
    assert len(lab.orders["p0"]) == 1
    twice = Lab(tmp_path, monkeypatch, {"links": [link(alone_bits_per_second=2.0 * RATE)]})
    twice.advance()
    assert len(twice.orders["p0"]) == 3


@pytest.mark.parametrize(
    ("report", "words"),
    [
        (
            {**SLOW, "drained_bits_per_second": 1.2 * RATE},
            f"{HALF}: the cluster's network plugin does not limit pods by their annotations",
        ),
        ({**SLOW, "drained_bits_per_second": 1.1 * RATE}, HALF),
        (
            {**SLOW, "drained_bytes": 256 << 20},
            f"{HALF}, from a token bucket of about 512 MiB, containerd's default, which training does not empty",
        ),
        ({**SLOW, "drained_bytes": (256 << 20) - 1}, HALF),
        ({"error": "no time"}, "it could not be measured: no time"),
    ],
)
def test_why_annotations_do_not_shape_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, report: dict[str, Any], words: str
) -> None:
    lab = Lab(tmp_path, monkeypatch, report, method="annotation")
    lab.advance()
    assert lab.note["problem"] == words
    other = Lab(tmp_path, monkeypatch, report)  # whose buckets are this client's own
    other.advance()
    assert other.note["problem"] == (HALF if "links" in report else words)


def test_pods_that_ask_the_plugin_need_no_shaping_by_this_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = Lab(tmp_path, monkeypatch, method="annotation", run_on_node=None)
    lab.advance()
    assert lab.gate.is_open
    assert '"setup":{"method":"annotation"}' in lab.orders["p0"][-1].replace(" ", "")
    nobody = Lab(tmp_path, monkeypatch, run_on_node=None)
    nobody.advance()
    assert nobody.note["problem"] == "this client cannot reach the containers of the nodes"


def test_a_pod_that_takes_no_order_refuses_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(tmp_path, monkeypatch)
    lab.code = 1
    lab.advance()
    assert lab.gate.is_refused
    assert "does not accept commands: read-only" in lab.note["problem"]


@pytest.mark.parametrize(
    ("error", "is_refused", "is_failure"),
    [
        (CapacityError("no room"), True, False),
        (ApiError("injected", status=500), True, False),
        (AccessDenied("forbidden", status=403), True, False),
        (AccessDenied("log in", status=401), False, True),
        (UnreachableError("away"), False, True),
        (ApiError("the container has ended", status=400), False, False),
        (ApiError("the pod is gone", status=404), False, False),
    ],
)
def test_what_ends_the_run_and_what_only_this_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Any, is_refused: bool, is_failure: bool
) -> None:
    def fail(node: str, script: str, arguments: Any) -> str:
        raise error

    lab = Lab(tmp_path, monkeypatch, run_on_node=fail)
    lab.advance()
    assert (lab.gate.is_refused, lab.gate.failure is error) == (is_refused, is_failure)
    assert lab.states == (["shaping", "refused"] if is_refused else ["shaping"])
    if is_failure:
        with pytest.raises(type(error)):
            lab.advance()


# --- who begins ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("phase", "metadata", "begins"),
    [("Running", {}, True), ("Pending", {}, False), ("Running", {"deletionTimestamp": "2027"}, False)],
)
def test_a_client_begins_when_all_pods_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str, metadata: dict[str, str], begins: bool
) -> None:
    lab = Lab(tmp_path, monkeypatch)
    lab.pods[1] = lab.pod("p1", phase, **metadata)
    lab.advance()
    assert (lab.states != []) is begins
    few = Lab(tmp_path, monkeypatch)
    del few.pods[1]
    few.advance()
    assert few.states == []


@pytest.mark.parametrize(("age", "begins"), [(39.9, False), (40.0, True)])
def test_another_client_is_taken_over_from_when_it_was_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, age: float, begins: bool
) -> None:
    lab = Lab(tmp_path, monkeypatch)
    note = {"state": "shaping", "time": 1000.0, "holder": "other"}
    lab.api.objects[JOB]["metadata"]["annotations"] = {"mlbench/network": json.dumps(note)}
    lab.advance(1000.0 + age)
    assert (lab.states != []) is begins


@pytest.mark.parametrize(("state", "is_open"), [("open", True), ("refused", False)])
def test_a_network_that_another_client_has_settled_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, is_open: bool
) -> None:
    lab = Lab(tmp_path, monkeypatch)
    note = {"state": state, "time": 1.0, "holder": "other"}
    lab.api.objects[JOB]["metadata"]["annotations"] = {"mlbench/network": json.dumps(note)}
    lab.advance(1e9)
    assert (lab.gate.is_open, lab.gate.is_refused, lab.states) == (is_open, not is_open, [])


def test_a_client_that_stops_following_opens_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(tmp_path, monkeypatch)
    lab.gate.close()
    lab.advance()
    assert isinstance(lab.gate.failure, UnreachableError)
    assert str(lab.gate.failure.hint) == "mlbench wait x-2"
    assert lab.states == ["shaping"]


# --- more ways to shape and to fail ----------------------------------------------------------------------------------


def test_notes_are_in_the_clusters_time_and_name_their_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(tmp_path, monkeypatch)
    monkeypatch.setattr(gating, "time", SimpleNamespace(time=lambda: 100.0, time_ns=lambda: 7_000_000, monotonic=float))
    lab.advance(130.0)
    assert (lab.note["time"], lab.note["holder"]) == (130.0, lab.gate._holder)
    assert lab.orders["p0"][0] == "probe 7"
    other = Lab(tmp_path, monkeypatch)
    assert other.gate._holder != lab.gate._holder


def test_chaos_mesh_shapes_with_its_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(tmp_path, monkeypatch, method="chaos-mesh", run_on_node=None)
    asked: list[Any] = []

    def inject(api: Any, documents: Any, job: Any) -> list[str]:
        asked.append((documents, job["metadata"]["name"]))
        return ["x-2-bandwidth"]

    monkeypatch.setattr("mlbench_cli.engines.kubernetes.network.chaos.inject", inject)
    lab.gate._chaos = [{"kind": "NetworkChaos"}]
    lab.advance()
    assert asked == [([{"kind": "NetworkChaos"}], "x-2")]
    told = parse_event(lab.orders["p0"][-1].split(" ", 2)[2])
    assert told is not None
    assert told["setup"] == {"method": "chaos-mesh", "objects": ["x-2-bandwidth"]}


def test_a_burst_after_a_pause_may_be_so_large_that_one_probe_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = Lab(tmp_path, monkeypatch, {"links": [link(first_bits_per_second=2.1 * RATE)]})
    lab.advance()
    assert len(lab.orders["p0"]) == 1
    assert lab.note["problem"] == "it lets the first MiB after a pause through at 2.1 Gbit/s"


def test_a_probe_without_a_report_is_waited_for_and_noted_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = Lab(tmp_path, monkeypatch)
    now = [0.0]

    def monotonic() -> float:
        now[0] += 1.0
        return now[0]

    monkeypatch.setattr(gating, "time", SimpleNamespace(time=float, time_ns=int, monotonic=monotonic))
    plain = lab.execute
    monkeypatch.setattr(
        gating, "execute", lambda *words: plain(*words) if words[3][0] == "sh" else Executed(1, b"", "no file")
    )
    lab.advance()
    assert lab.gate.is_refused
    assert lab.note["problem"] == "it could not be measured: the probe gave no report within 240 s"
    assert lab.states.count("shaping") > 40  # of three probes, every ten seconds or so


def test_a_report_that_cannot_be_read_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(tmp_path, monkeypatch)
    plain = lab.execute
    monkeypatch.setattr(
        gating, "execute", lambda *words: plain(*words) if words[3][0] == "sh" else Executed(0, b"rubbish", "")
    )
    lab.advance()
    assert lab.note["problem"] == "it could not be measured: the probe's report cannot be read"
