"""`mlbench run --create kind`, killed with -9 at moments spread over all of it, then given again: nothing may be left.

usage: python benchmarks/create_kills.py [--moments N] IMAGE [OPTION OF RUN]...

Needs Docker and kind. IMAGE, of this machine's Docker, is loaded onto the nodes and runs there what the options say; it
has torch for those that are used without any. MLBENCH_TEST_NODE_IMAGE is the node image, if not kind's own. A first
run without a kill shows how long each phase takes: a cluster is made, gets the image, runs, its results are fetched and
sealed, it is deleted. In each phase the same number of clients is killed. What then exists in Docker has to be listed
in this data folder and, with --cloud, from an empty one. At the end nothing may be left: containers, volumes and
networks of Docker, temporary files, programs that work on the cluster, its record, runs without a sealed archive.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from providers import registry

ROOT = Path(__file__).resolve().parents[1]
NAME, CLUSTER = "killed", "killed-1"
TASK = ["--task", "digits_resnet", "--preset", "tiny", "--backend", "gloo"]
PHASES = ("making", "image", "running", "fetching", "deleting")
LIMIT = 900.0  # seconds for one command


class Trial:
    """A data folder, and the command that is killed in it and given again."""

    def __init__(self, folder: Path, words: list[str]) -> None:
        self.folder, self.words = folder, words
        self.home, self.temporary, self.log = folder / "home", folder / "tmp", folder / "stderr"
        self.temporary.mkdir(parents=True)

    def start(self) -> subprocess.Popen[bytes]:
        with self.log.open("wb") as log:
            command = [sys.executable, "-m", "mlbench_cli", *self.words]
            return subprocess.Popen(command, env=self._environment(self.home), stdout=log, stderr=log, cwd=ROOT)

    def ask(self, *words: str, home: Path | None = None) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "mlbench_cli", *words]
        environment = self._environment(home or self.home)
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT, cwd=ROOT)

    def phase(self) -> str:
        """What the command is doing, by what it has printed and what is in the run's folder."""
        said = self.log.read_text()
        if "Verified" in said:
            return "deleting"
        if list(self.home.glob("runs/*/observation.json")):
            return "fetching"
        if list(self.home.glob("runs/*/manifests/job.yaml")):
            return "running"
        return "image" if f"KIND cluster {CLUSTER} is ready" in said else "making"

    def wait_for(self, client: subprocess.Popen[bytes], phase: str) -> bool:
        """Wait until the command has come to `phase` or further. Whether it still runs then."""
        end = time.monotonic() + LIMIT
        while client.poll() is None and time.monotonic() < end:
            if PHASES.index(self.phase()) >= PHASES.index(phase):
                return True
            time.sleep(0.02)
        return False

    def lists(self) -> bool:
        """Whether this data folder shows the cluster, and whether an empty one finds it."""
        known = json.loads(self.ask("list-clusters", "-o", "json").stdout)["clusters"]
        empty = self.folder / "empty"
        found = json.loads(self.ask("list-clusters", "--cloud", "-o", "json", home=empty).stdout)["clusters"]
        return all(CLUSTER in [item["name"] for item in clusters] for clusters in (known, found))

    def list_left(self, before: set[str]) -> list[str]:
        """All that is left of the cluster, and runs that are not sealed. `before` was in Docker before all trials."""
        end = time.monotonic() + 5
        while programs := list_programs():  # those that were killed with their containers take a moment
            if time.monotonic() > end:
                break
            time.sleep(0.2)
        left = [*sorted(list_in_docker() - before), *programs]
        left += [f"file {path.name}" for path in self.temporary.iterdir() if not path.name.startswith("mlbench-kind-")]
        if (self.home / "clusters" / CLUSTER).exists():
            left.append("folder of the cluster")
        records = json.loads(self.ask("list-clusters", "-o", "json").stdout)["clusters"]
        left += [f"record {item['name']}" for item in records if item["name"] != "local"]
        folders = [path for path in self.home.glob("runs/*") if path.is_dir()]
        left += ["run not sealed" for folder in folders if not (folder / "SHA256SUMS").exists()]
        return left if folders else [*left, "no run"]

    def _environment(self, home: Path) -> dict[str, str]:
        return {**os.environ, "MLBENCH_HOME": str(home), "TMPDIR": str(self.temporary), "NO_COLOR": "1"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("image", metavar="IMAGE")
    parser.add_argument("--moments", type=int, default=30, metavar="N")
    given, options = parser.parse_known_args()
    words = ["run", NAME, "1", *(options or TASK), "--yes"]
    words += ["--create", "kind", "--image", given.image, "--load", given.image]
    if node_image := os.environ.get("MLBENCH_TEST_NODE_IMAGE"):
        words += ["--cluster-image", node_image]
    with tempfile.TemporaryDirectory(prefix="create-kills-") as folder:
        lasts = time_phases(Trial(Path(folder, "calm"), words))
        before = list_in_docker()  # among it kind's network, which is made with the first cluster and stays
        print(f"\n{'killed while':<12}{'after':>8}{'existed':>9}{'shown':>7}{'exit':>6}{'again':>8}  left", flush=True)
        trials = leaks = hidden = failed = 0
        for phase, after in spread(lasts, given.moments):
            trials += 1
            row = kill(Trial(Path(folder, str(trials)), words), phase, after, before)
            leaks, hidden, failed = leaks + bool(row[0]), hidden + row[1], failed + row[2]
    print(f"{trials} moments: {leaks} left something, {hidden} were invisible, {failed} ended with an error")
    return 1 if leaks or hidden or failed else 0


def time_phases(calm: Trial) -> dict[str, float]:
    """The seconds of each phase of a run that nobody kills; prints them, and what the clouds' plans say."""
    begun = time.monotonic()
    client, starts = calm.start(), {}
    for phase in PHASES:
        if not calm.wait_for(client, phase):
            sys.exit(f"The run ended before {phase}:\n{calm.log.read_text()}")
        starts[phase] = time.monotonic() - begun
    if code := client.wait(timeout=LIMIT):
        sys.exit(f"The run ended with {code}:\n{calm.log.read_text()}")
    ends = [*list(starts.values())[1:], time.monotonic() - begun]
    lasts = {phase: end - start for (phase, start), end in zip(starts.items(), ends, strict=True)}
    phases = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in lasts.items())
    print(f"KIND: from nothing to a verified result, and no cluster: 1 command, {ends[-1] / 60:.1f} min ({phases})")
    for name in registry.PAID:
        up, down = registry.load(name).minutes
        print(f"{name}, as its plan says: 1 command, {up} min to create and {down} min to delete, beside the run")
    return lasts


def spread(lasts: dict[str, float], moments: int) -> Iterator[tuple[str, float]]:
    """Moments, as a phase and seconds after its begin: in each phase the same number, evenly, in turns."""
    each = -(-moments // len(PHASES))
    for number in range(each):
        for phase in PHASES:
            yield phase, lasts[phase] * (number + 0.5) / each


def kill(trial: Trial, phase: str, after: float, before: set[str]) -> tuple[list[str], bool, bool]:
    """Kill the command, give it again, and print what was found: what is left, and whether anything was invisible, or
    failed."""
    client = trial.start()
    if trial.wait_for(client, phase):
        time.sleep(after)
    client.kill()
    was_running = client.wait() < 0
    exists = bool(list_in_docker() - before)
    is_hidden = exists and not trial.lists()
    begun = time.monotonic()
    code = trial.start().wait(timeout=LIMIT)
    seconds = time.monotonic() - begun
    left = trial.list_left(before)
    shown = ("NO" if is_hidden else "yes") if exists else "-"
    killed = f"{after:6.1f} s" if was_running else "ended"
    there = "yes" if exists else "no"
    print(f"{phase:<12}{killed:>8}{there:>9}{shown:>7}{code:>6}{seconds:6.0f} s  {', '.join(left) or '-'}", flush=True)
    if code or left:
        print(trial.log.read_text(), file=sys.stderr, flush=True)
    if list_in_docker() - before:  # the next moment begins with nothing
        trial.ask("delete-cluster", "kind", CLUSTER, "--yes", "--force")
    return left, is_hidden, code != 0


def list_in_docker() -> set[str]:
    """All containers, volumes and networks; the volumes of kind's nodes have no names of the cluster's."""
    kinds = {"container": ["ps", "-aq"], "volume": ["volume", "ls", "-q"], "network": ["network", "ls", "-q"]}
    return {f"{kind} {line}" for kind, words in kinds.items() for line in read("docker", *words).split()}


def list_programs() -> list[str]:
    """Programs of docker, kind or mlbench that still work on the cluster."""
    lines = [line.split(None, 1) for line in read("ps", "-eo", "comm=,args=").splitlines()]
    return [f"program {line[0]}" for line in lines if line[0] in ("docker", "kind") and CLUSTER in line[1]]


def read(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    raise SystemExit(main())
