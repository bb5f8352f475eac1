"""Shaped networks on clusters: the real worker script behind its gate, the real probe, a double of the API."""

import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.agent.network.namespaces import ShapingError
from mlbench_cli.agent.network.shaped import ShapedNetwork
from mlbench_cli.engines.kubernetes import submit
from mlbench_cli.engines.kubernetes.engine import KubernetesEngine
from mlbench_cli.engines.kubernetes.manifests import NETWORK_ANNOTATION
from mlbench_cli.engines.kubernetes.network import chaos, gate
from mlbench_cli.engines.kubernetes.network.nodes import link_arguments
from mlbench_cli.errors import CapacityError, UsageError
from mlbench_cli.kube.api import Api
from mlbench_cli.model.network import parse_network, worker_address
from mlbench_cli.model.run import Ending, Experiment, Observation, Outcome, Run
from mlbench_cli.model.spec import KubernetesOptions, RunSpec
from mlbench_cli.runs import supervise
from mlbench_cli.runs.recording import document_writer
from mlbench_cli.storage.store import Store
from task_images.comm.presets import resolve
from tests.fakes.kube_api import KubeApi
from tests.fakes.kubelet import LOOK_SECONDS, Kubelet

SLOW = "50mbit,20ms"  # slow enough for a machine that is busy with other tests
Objects = dict[str, Any]
LINK = '{"discipline":"netem","kernel":"6.1","pod":"qdisc netem","node":"qdisc netem"}'
NODES: list[tuple[str, tuple[str, ...]]] = []


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that runs other tests besides holds the asked round trip less often."""
    monkeypatch.setattr(gate, "ATTEMPTS", 10)


@pytest.fixture
def server() -> Iterator[KubeApi]:
    with KubeApi() as server:
        yield server


@pytest.fixture
def network() -> Iterator[ShapedNetwork]:
    """What a node's kernel would make of the links between pods: here the local engine's namespaces are the pods'."""
    try:
        made = ShapedNetwork(parse_network(SLOW), 2)
    except ShapingError as error:
        pytest.skip(str(error))
    yield made
    made.close()


def run_on_node(node: str, script: str, arguments: Sequence[str]) -> str:
    assert script.startswith("#!/bin/sh")
    NODES.append((node, tuple(arguments)))
    return LINK


def a_run(
    folder: Path,
    store: Store,
    asked: str = SLOW,
    method: str = "nsenter",
    *,
    method_of_messages: Mapping[str, str] | None = None,
) -> Run:
    fields: Objects = {"workers": 2, "image": "image:1", "backend": "gloo", "timeout": 300.0}
    fields |= {"method": method_of_messages} if method_of_messages else {}
    spec = RunSpec(
        name="net-2",
        cluster="c",
        engine="kubernetes",
        task="custom",
        preset="custom",
        argv=("printenv", "MLBENCH_NETWORK"),
        network=asked,
        kubernetes=KubernetesOptions(network_method=method, keep_seconds=0, hold_seconds=0),
        **fields,
    )
    run = store.record_run(spec)
    run.folder.mkdir(parents=True, exist_ok=True)
    document_writer(["mlbench", "run"], Experiment("0" * 12, "x", run.created, {}))(run)
    return run


def start(server: KubeApi, run: Run) -> KubernetesEngine:
    NODES.clear()
    engine = KubernetesEngine(server.access, run_on_node)
    engine.submit(run, engine.render(run.spec))
    return engine


def end(engine: KubernetesEngine, run: Run) -> Observation:
    with closing(engine.watch(run)) as observations:
        return list(observations)[-1]


@pytest.mark.slow
@pytest.mark.nightly  # a busy machine fails the probe
def test_workers_start_once_the_probe_has_proved_the_network(
    server: KubeApi, network: ShapedNetwork, tmp_path: Path
) -> None:
    store = Store(tmp_path)
    run = a_run(tmp_path, store)
    with Kubelet(server, tmp_path / "pods", network.enter_worker, worker_address(0)):
        finished = supervise.follow(run, start(server, run), store)
    assert finished.outcome is Outcome.COMPLETED, finished.findings
    # The nodes were asked to shape each pod's link by its container, before any worker had started its command.
    assert sorted(NODES) == [(f"node-{n}", (f"id-{n}", *link_arguments(parse_network(SLOW)))) for n in (0, 1)]
    log = (run.folder / "logs" / "rank-0.log").read_text().splitlines()
    assert [json.loads(line.removeprefix("@mlbench "))["stage"] for line in log if line.startswith("@mlbench ")] == [
        "setup", "before", "after", "after", "after",
    ]  # fmt: skip
    assert log[2] == SLOW
    document = json.loads((run.folder / "network.json").read_text())
    assert (document["asked"], document["method"], document["setup"]["discipline"]) == (SLOW, "nsenter", "netem")
    assert document["summary"]["held"] is True
    assert [probe["form"] for probe in document["probes"]] == ["full", "after", "after", "after"]
    assert "Network between the ranks: emulated 50mbit,20ms (got " in (run.folder / "official_result.txt").read_text()


@pytest.mark.nightly
def test_parameter_servers_stand_behind_the_same_gate(
    server: KubeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their Job is another one, their links are shaped and probed with the workers', and they start with them.

    It is released a moment before the workers' Job, which is long on a busy machine.
    """
    release = submit._release

    def release_slowly(api: Api, job: Objects) -> Objects:
        released = release(api, job)
        time.sleep(5 * LOOK_SECONDS)
        return released

    monkeypatch.setattr(submit, "_release", release_slowly)
    try:
        network = ShapedNetwork(parse_network(SLOW), 3)
    except ShapingError as error:
        pytest.skip(str(error))
    store = Store(tmp_path)
    run = a_run(tmp_path, store, method_of_messages=resolve("bsp-ps").to_dict())
    try:
        with Kubelet(server, tmp_path / "pods", network.enter_worker, worker_address(0)):
            finished = supervise.follow(run, start(server, run), store)
    finally:
        network.close()
    assert finished.outcome is Outcome.COMPLETED, finished.findings
    assert len(NODES) == 3
    document = json.loads((run.folder / "network.json").read_text())
    assert (document["setup"]["links"], document["summary"]["held"]) == (3, True)
    assert {probe["ranks"] for probe in document["probes"]} == {3}


def test_a_network_that_is_not_as_asked_never_starts_the_workers(server: KubeApi, tmp_path: Path) -> None:
    """The annotation on a cluster whose network plugin does not read it."""
    store = Store(tmp_path)
    run = a_run(tmp_path, store, "50mbit", "annotation")
    with Kubelet(server, tmp_path / "pods"):
        finished = supervise.follow(run, start(server, run), store)
    assert (finished.outcome, finished.exit_code()) == (Outcome.NEVER_STARTED, 5)
    finding = finished.findings[0]
    assert finding.code == "network_not_as_asked"
    assert "it carries " in finding.summary
    assert "the cluster's network plugin does not limit pods by their annotations" in finding.summary
    # It was measured after 600 MiB, so that no token bucket was left; that is in the evidence.
    assert finding.evidence["report"]["drained_bytes"] >= 600 << 20
    assert "50mbit\n" not in (run.folder / "logs" / "rank-0.log").read_text()
    # Another machine can say why, too: it is written down at the Job.
    assert gate.network_findings(server.objects["jobs", "net-2"]) == [finding]


def test_a_node_that_cannot_shape_is_the_reason(
    server: KubeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(node: str, script: str, arguments: Sequence[str]) -> str:
        raise CapacityError(f"on the node {node}, the kernel of the node has no netem, which delays packets")

    run = a_run(tmp_path, Store(tmp_path))
    with Kubelet(server, tmp_path / "pods"):
        engine = KubernetesEngine(server.access, refuse)
        engine.submit(run, engine.render(run.spec), detach=True)  # returns when that is known
        seen = end(engine, run)
    assert seen.ended == Ending.NEVER_STARTED
    assert "the kernel of the node has no netem" in seen.findings[0].summary


@pytest.mark.nightly
def test_another_client_goes_on_when_the_first_has_died(
    server: KubeApi, network: ShapedNetwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = a_run(tmp_path, Store(tmp_path))
    with Kubelet(server, tmp_path / "pods", network.enter_worker, worker_address(0)):
        engine = start(server, run)
        job = server.objects["jobs", "net-2"]
        state = {"state": "shaping", "time": 0, "holder": "a client that was killed"}
        server.put("jobs", {**job, "metadata": {**job["metadata"], "annotations": {
            **job["metadata"]["annotations"], NETWORK_ANNOTATION: json.dumps(state)}}})  # fmt: skip
        engine.submit(run, engine.render(run.spec), detach=True)
        known = gate.read_state(server.objects["jobs", "net-2"])
        assert known is not None
        assert (known["state"], known["holder"] != state["holder"]) == ("open", True)
        assert end(engine, run).ended == Ending.EXITED


@pytest.mark.nightly
def test_chaos_mesh_is_asked_for_waited_for_and_given_back(
    server: KubeApi, network: ShapedNetwork, tmp_path: Path
) -> None:
    store = Store(tmp_path)
    run = a_run(tmp_path, store, method="chaos-mesh")
    seen: Objects = {}
    stopped = threading.Event()

    def control() -> None:
        """What Chaos Mesh's controller does, here without a kernel: the network is that of the namespaces."""
        while not stopped.wait(0.05):
            for (kind, name), item in list(server.objects.items()):
                if kind == "networkchaos" and "status" not in item:
                    seen[name] = item
                    server.put(kind, {**item, "status": {"conditions": [{"type": "AllInjected", "status": "True"}]}})

    controller = threading.Thread(target=control, daemon=True)
    controller.start()
    try:
        with Kubelet(server, tmp_path / "pods", network.enter_worker, worker_address(0)):
            finished = supervise.follow(run, start(server, run), store)
    finally:
        stopped.set()
        controller.join()
    assert finished.outcome is Outcome.COMPLETED, finished.findings
    assert seen["net-2-bandwidth"]["spec"]["bandwidth"]["rate"] == "51250000bit"
    assert seen["net-2-delay"]["spec"]["delay"]["latency"] == "20000us"
    (owner,) = seen["net-2-delay"]["metadata"]["ownerReferences"]
    assert owner["uid"] == server.objects["jobs", "net-2"]["metadata"]["uid"]
    assert not [key for key in server.objects if key[0] == "networkchaos"]
    assert NODES == []
    assert json.loads((run.folder / "network.json").read_text())["method"] == "chaos-mesh"
    assert (run.folder / "manifests" / "networkchaos-delay.yaml").exists()


def test_chaos_mesh_that_does_nothing_is_the_reason(server: KubeApi, tmp_path: Path) -> None:
    run = a_run(tmp_path, Store(tmp_path), method="chaos-mesh")
    engine = start(server, run)
    documents = [item for item in engine.render(run.spec).documents if item["kind"] == "NetworkChaos"]
    with server.access.client() as api, pytest.raises(CapacityError, match="its controller is not running"):
        chaos.inject(api, documents, server.objects["jobs", "net-2"], seconds=0)
    failed = {"type": "Failed", "message": "unable to set tcs: exit status 2"}
    status = {"experiment": {"containerRecords": [{"events": [failed]}]}}
    item = server.objects["networkchaos", "net-2-bandwidth"]
    server.put("networkchaos", {**item, "status": status})
    with server.access.client() as api, pytest.raises(CapacityError, match="unable to set tcs"):
        chaos.inject(api, documents, server.objects["jobs", "net-2"], seconds=0)
    engine.delete(run, force=True)
    assert not server.objects


def test_a_cluster_without_chaos_mesh_refuses_before_anything_is_created(server: KubeApi, tmp_path: Path) -> None:
    from tests.fakes.kube_api import Fault

    server.faults.append(Fault("GET .*networkchaos", times=1000, status=404))
    run = a_run(tmp_path, Store(tmp_path), method="chaos-mesh")
    with pytest.raises(UsageError, match="has no NetworkChaos resource"):
        start(server, run)
    assert not server.objects


def test_no_pod_has_a_right_over_the_network(server: KubeApi, tmp_path: Path) -> None:
    for method in ("nsenter", "annotation", "chaos-mesh"):
        folder = tmp_path / method
        folder.mkdir()
        run = a_run(folder, Store(folder), "50mbit", method)
        for document in KubernetesEngine(server.access).render(run.spec).documents:
            assert "NET_ADMIN" not in json.dumps(document)
            if document["kind"] == "Job":
                containers = document["spec"]["template"]["spec"]["containers"]
                assert [item["securityContext"]["capabilities"] for item in containers] == [{"drop": ["ALL"]}]


@pytest.mark.parametrize(("share", "probes"), [(1.3, 2), (20.0, 1)], ids=["a busy moment", "no limit at all"])
def test_a_link_that_is_too_fast_is_probed_again_unless_it_is_not_limited(
    server: KubeApi, tmp_path: Path, share: float, probes: int
) -> None:
    """A late reader of a busy machine finds up to half as much again."""
    run = a_run(tmp_path, Store(tmp_path))
    link = {"rtt_p50_seconds": 0.04, "alone_bits_per_second": 50e6, "together_bits_per_second": 50e6}
    reports = [{"links": [{**link, "alone_bits_per_second": share * 50e6}]}, {"links": [link]}]

    class Probed(gate.NetworkGate):
        taken = 0

        def _order(self, pods: Any, text: str) -> None:
            self.taken += 1

        def _await_report(self, api: Any, pod: Any, number: str, ahead: float) -> Any:
            return reports[self.taken - 1]

    tried = Probed(server.access, "default", run, (), run_on_node)
    with server.access.client() as api:
        _, _, problems = tried._prove(api, {0: {}}, 0.0)
    assert (tried.taken, bool(problems)) == (probes, probes == 1)
