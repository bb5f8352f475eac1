"""A client that is killed at a chosen step, and another one that goes on with its run."""

import json
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from mlbench_cli.engines.base import FoundRun
from mlbench_cli.engines.kubernetes.engine import discover_runs
from mlbench_cli.engines.kubernetes.manifests import FETCHED_ANNOTATION
from mlbench_cli.kube.objects import object_path
from mlbench_cli.model.run import Run
from mlbench_cli.util.times import now
from tests.e2e.runs import Runs, has_ended, log, until

CLIENT = """
import os, signal, sys
from pathlib import Path
from mlbench_cli.engines.follow import watch
from mlbench_cli.engines.kubernetes.engine import KubernetesEngine
from mlbench_cli.kube.access import Access
from mlbench_cli.model.run import Run
from mlbench_cli.model.spec import RunSpec
import json
kubeconfig, namespace, folder, event, last, spec = sys.argv[1:]
seen = 0
def count(name, arguments):
    global seen
    if name == event:
        seen += 1
        if seen == int(last):
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(count)
engine = KubernetesEngine(Access.from_kubeconfig(kubeconfig, namespace=namespace))
run = Run("id", RunSpec.from_dict(json.loads(spec)), Path(folder), "2026-01-01T00:00:00Z")
engine.submit(run, engine.render(run.spec))
for seen_now in watch(engine, run):
    pass
engine.head(run).fetch()
"""
SCRIPT = 'i=0; while [ $i -lt 200 ]; do i=$((i+1)); echo line $i; done; echo 42 > "$MLBENCH_OUTPUT_DIR/answer"'
# Requests before the n-th of which the client is killed, and connections: those of exec are the last ones.
KILLS = [("http.client.send", number) for number in (1, 2, 3, 4, 5, 6, 8, 10, 14)]
KILLS += [("socket.connect", number) for number in (4, 5, 6, 7, 8)]


@dataclass(frozen=True)
class Survived:
    """What the second client has: the run's end, whether its log is whole, and who has its output."""

    killed: bool
    ended: str | None
    whole_log: bool
    output: str  # here | with the first client | nowhere
    acknowledged: bool

    @property
    def well(self) -> bool:
        return (
            self.killed and self.ended == "exited" and self.whole_log and self.output != "nowhere" and self.acknowledged
        )


def survive(runs: Runs, folder: Path, event: str, number: int, elsewhere: bool) -> Survived:
    """Start a run, kill the client before its n-th request or connection, and go on, perhaps from another folder."""
    cluster, name = runs.cluster, f"kill-{event[0]}{number}-{'b' if elsewhere else 'a'}"
    spec = cluster.spec(name, "sh", "-c", SCRIPT, workers=1)
    words = [str(cluster.kubeconfig), cluster.access.namespace, str(folder / "first"), event, str(number)]
    done = subprocess.run([sys.executable, "-c", CLIENT, *words, json.dumps(spec.to_dict())], check=False, timeout=120)
    run = Run("id", spec, folder / ("second" if elsewhere else "first"), now())
    runs.started.append(run)
    engine = cluster.engine
    found = discover_runs(cluster.access)
    if spec not in [item.spec for item in found if isinstance(item, FoundRun)]:
        engine.submit(run, engine.render(spec))  # nothing had been started
    engine.resume(run)  # as every command does that follows a run
    word = until(engine, run, has_ended).ended
    engine.head(run).fetch()
    with cluster.access.client() as api:
        annotations = api.get(object_path("Job", cluster.access.namespace, name))["metadata"]["annotations"]
    return Survived(
        done.returncode == -signal.SIGKILL,
        word,
        log(run, 0) == "".join(f"line {number}\n" for number in range(1, 201)),
        _owner(run.folder, folder / "first"),
        FETCHED_ANNOTATION in annotations,
    )


def _owner(own: Path, first: Path) -> str:
    for folder, words in ((own, "here"), (first, "with the first client")):
        answer = folder / "output/rank-0/answer"
        if answer.exists() and answer.read_text() == "42\n":
            return words
    return "nowhere"
