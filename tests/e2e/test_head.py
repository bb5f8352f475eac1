"""Results that outlive their workers on a real cluster, with nobody connected."""

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.engines.base import LOG_GAP, FoundRun
from mlbench_cli.engines.kubernetes.ending import is_over
from mlbench_cli.engines.kubernetes.engine import KubernetesEngine, discover_runs
from mlbench_cli.kube.api import ObjectNotFound
from mlbench_cli.kube.objects import collection_path, object_path
from mlbench_cli.model.run import Run
from tests.e2e.runs import Runs, all_run, has_ended, log, until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(2400)]
OUTPUT = 'echo "rank $RANK"; echo "$RANK" > "$MLBENCH_OUTPUT_DIR/rank"; sleep 1; echo end'


def job_of(runs: Runs, run: Run) -> dict[str, Any]:
    with runs.cluster.access.client() as api:
        return api.get(object_path("Job", runs.cluster.access.namespace, run.name))


def pods_of(runs: Runs, run: Run, role: str) -> list[dict[str, Any]]:
    with runs.cluster.access.client() as api:
        path = collection_path("Pod", runs.cluster.access.namespace)
        items: list[dict[str, Any]] = api.get(path, labelSelector=f"mlbench/run={run.name},mlbench/role={role}")[
            "items"
        ]
    return items


def delete_pods(runs: Runs, run: Run, role: str) -> None:
    """Delete the pods, and wait until they are gone."""
    pods = pods_of(runs, run, role)
    with runs.cluster.access.client() as api:
        for pod in pods:
            api.delete(object_path("Pod", runs.cluster.access.namespace, pod["metadata"]["name"]))
    gone = {pod["metadata"]["uid"] for pod in pods}
    while gone & {pod["metadata"]["uid"] for pod in pods_of(runs, run, role)}:
        time.sleep(0.3)


def wait_for_end(runs: Runs, run: Run) -> None:
    """Until the Job is over, as only the cluster sees it."""
    while not is_over(job_of(runs, run)):
        time.sleep(0.5)


def wait_for_pods(runs: Runs, run: Run, role: str, phase: str) -> None:
    while not any(pod["status"].get("phase") == phase for pod in pods_of(runs, run, role)):
        time.sleep(0.3)


def on_another_machine(runs: Runs, run: Run, folder: Path) -> tuple[KubernetesEngine, Run]:
    found = {item.spec.name: item for item in discover_runs(runs.cluster.access) if isinstance(item, FoundRun)}
    same = found[run.name]
    assert (same.id, same.created, same.spec) == (run.id, run.created, run.spec)
    return KubernetesEngine(runs.cluster.access), Run(same.id, same.spec, folder, same.created)


def test_another_machine_fetches_after_the_workers_pods_are_gone(runs: Runs, tmp_path: Path) -> None:
    spec = runs.cluster.spec("kept-2", "sh", "-c", OUTPUT, options={"collect": "all"})
    _, run = runs.start(spec, tmp_path / "first")
    wait_for_end(runs, run)
    delete_pods(runs, run, "worker")
    engine, again = on_another_machine(runs, run, tmp_path / "second")
    until_when = engine.kept_until(again)
    assert until_when is not None
    assert abs(until_when - time.time() - 86400) < 120
    seen = until(engine, again, has_ended)
    assert (seen.ended, [worker.exit_code for worker in seen.workers]) == ("exited", [0, 0])
    fetched = engine.head(again).fetch()
    assert (fetched.complete, fetched.findings) == (True, ())
    for rank in (0, 1):
        assert (again.folder / f"output/rank-{rank}/rank").read_text() == f"{rank}\n"
        assert log(again, rank) == f"rank {rank}\nend\n"
    assert (again.folder / "resources.jsonl").read_text().count('"rank":1') >= 1
    with pytest.raises(ObjectNotFound), runs.cluster.access.client() as api:
        api.get(object_path("Job", runs.cluster.access.namespace, "kept-2-head"))


def test_a_crash_with_nobody_connected_keeps_what_all_workers_wrote(runs: Runs, tmp_path: Path) -> None:
    """The Job controller deletes the pods of the workers that it stops, and their logs with them."""
    script = """
        echo part > "$MLBENCH_OUTPUT_DIR/partial"; echo "begun $RANK"
        trap 'echo stopped; exit 3' TERM
        if [ "$RANK" = 1 ]; then sleep 2; echo boom; exit 5; fi
        while :; do sleep 0.2; done
    """
    _, run = runs.start(runs.cluster.spec("keptcrash-2", "sh", "-c", script), tmp_path / "first")
    wait_for_end(runs, run)
    engine, again = on_another_machine(runs, run, tmp_path / "second")
    seen = until(engine, again, has_ended)
    assert (seen.ended, seen.first_failed) == ("failed", 1)
    assert seen.workers[0].exit_code == 3
    assert engine.head(again).fetch().complete
    assert (again.folder / "output/rank-0/partial").read_text() == "part\n"
    assert (log(again, 0), log(again, 1)) == ("begun 0\nstopped\n", "begun 1\nboom\n")


def test_a_canceled_run_is_kept(runs: Runs, tmp_path: Path) -> None:
    script = 'echo half > "$MLBENCH_OUTPUT_DIR/part"; echo begun; sleep 100'
    engine, run = runs.start(runs.cluster.spec("keptcancel-2", "sh", "-c", script), tmp_path / "first")
    until(engine, run, all_run)
    wait_for_pods(runs, run, "head", "Running")
    time.sleep(2)
    engine.cancel(run)
    while pods_of(runs, run, "worker"):
        time.sleep(0.5)
    other, again = on_another_machine(runs, run, tmp_path / "second")
    assert until(other, again, has_ended).ended == "canceled"
    assert other.head(again).fetch().complete
    assert (again.folder / "output/rank-0/part").read_text() == "half\n"
    assert (log(again, 0), log(again, 1)) == ("begun\n", "begun\n")


def test_a_head_killed_before_the_end_comes_back(runs: Runs, tmp_path: Path) -> None:
    script = f"sleep 8; {OUTPUT}"
    _, run = runs.start(runs.cluster.spec("keptagain-2", "sh", "-c", script), tmp_path / "first")
    wait_for_pods(runs, run, "head", "Running")
    delete_pods(runs, run, "head")
    wait_for_end(runs, run)
    engine, again = on_another_machine(runs, run, tmp_path / "second")
    assert until(engine, again, has_ended).ended == "exited"
    assert engine.head(again).fetch().complete
    assert (again.folder / "output/rank-0/rank").read_text() == "0\n"


def test_a_head_killed_after_the_end_is_a_finding(runs: Runs, tmp_path: Path) -> None:
    _, run = runs.start(runs.cluster.spec("keptlost-2", "sh", "-c", OUTPUT), tmp_path / "first")
    wait_for_end(runs, run)
    delete_pods(runs, run, "head")
    wait_for_pods(runs, run, "head", "Running")  # a new one, which has nothing
    engine, again = on_another_machine(runs, run, tmp_path / "second")
    assert until(engine, again, has_ended).ended == "exited"
    fetched = engine.head(again).fetch()
    assert fetched.complete is False
    assert [finding.code for finding in fetched.findings] == ["results_lost"]


def test_without_a_head_the_worker_holds(runs: Runs, tmp_path: Path) -> None:
    _, run = runs.start(runs.cluster.spec("keptnot-2", "sh", "-c", f"sleep 3; {OUTPUT}"), tmp_path)
    with runs.cluster.access.client() as api, suppress(ObjectNotFound):
        api.delete(object_path("Job", runs.cluster.access.namespace, "keptnot-2-head"))
    engine = runs.cluster.engine
    time.sleep(10)
    assert not is_over(job_of(runs, run))  # it waits, with its results
    engine.resume(run)  # makes another head
    assert until(engine, run, has_ended).ended == "exited"
    assert engine.head(run).fetch().complete
    assert (run.folder / "output/rank-0/rank").read_text() == "0\n"


def test_a_log_that_the_node_has_thrown_away_is_whole_all_the_same(runs: Runs, tmp_path: Path) -> None:
    """While nobody follows, the log grows beyond what the kubelet keeps."""
    script = "echo first; seq 2000000; sleep 15; echo last"
    engine, run = runs.start(runs.cluster.spec("keptlog-1", "sh", "-c", script, workers=1), tmp_path)
    wait_for_end(runs, run)
    fetched = engine.head(run).fetch()
    assert LOG_GAP not in [finding.code for finding in fetched.findings]
    lines = log(run, 0).splitlines()
    assert (lines[0], lines[-1], len(lines)) == ("first", "last", 2_000_002)


def test_two_runs_never_measure_on_one_node(runs: Runs, tmp_path: Path) -> None:
    """The second run's workers wait for the first one's nodes, and that is no reason to give it up."""
    engine, first = runs.start(runs.cluster.spec("alone1-2", "sh", "-c", "sleep 12"), tmp_path / "1")
    until(engine, first, all_run)
    _, second = runs.start(runs.cluster.spec("alone2-2", "true"), tmp_path / "2")
    seen = until(engine, second, lambda seen: bool(seen.findings))
    assert [(finding.code, finding.permanent) for finding in seen.findings] == [("nodes_busy", False)]
    assert until(engine, second, has_ended).ended == "exited"
    ends = {run.name: until(engine, run, has_ended).workers for run in (first, second)}
    last = max(worker.finished or 0 for worker in ends["alone1-2"])
    assert min(worker.started or 0 for worker in ends["alone2-2"]) >= last - 1
    for run in (first, second):
        engine.head(run).fetch()


def test_the_kubelets_digest_of_the_image_is_observed(runs: Runs, tmp_path: Path) -> None:
    engine, run = runs.start(runs.cluster.spec("digest-2", "true"), tmp_path)
    seen = until(engine, run, has_ended)
    digests = {worker.image_digest for worker in seen.workers}
    assert len(digests) == 1
    assert str(digests.pop()).startswith("sha256:")
    engine.head(run).fetch()
