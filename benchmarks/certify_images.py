"""Nodes of a cluster with a wrong image: whom does certify name? `certify_images.py IMAGE [FAULT ...] [--trials N]`.

Makes a KIND cluster of five workers with IMAGE, which has torch (Docker, kind). Before each trial one of its nodes gets
another image under that name:
torch    another version of torch: drift, and nobody is named
image    no torch: no_answer, because nothing can be measured there
healthy  none
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from certify_trials import MLBENCH, Trial, judge_names

from mlbench_cli.results.archive.verify import verify

NODES = 5
CLUSTER = "trials"
OTHER_VERSION = "2.9.9"
_TORCH = "$(python3 -c 'import importlib.util as u; print(u.find_spec(\"torch\").submodule_search_locations[0])')"
CHANGES = {
    "torch": f"sed -i \"s/^__version__ = .*/__version__ = '{OTHER_VERSION}'/\" {_TORCH}/version.py",
    "image": f"rm -r {_TORCH}",
}
FAULTS = ("healthy", *CHANGES)
_LIMIT_SECONDS = 900


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("image", metavar="IMAGE", help="with torch, in the local Docker")
    parser.add_argument("faults", nargs="*", choices=[*FAULTS, []])
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--first", type=int, default=0, help="number of the first trial, which chooses the node")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        home = Path(folder)
        node_image = os.environ.get("LAB_NODE_IMAGE")
        mlbench(
            home,
            "create-cluster",
            "kind",
            str(NODES),
            CLUSTER,
            "--load",
            options.image,
            "--yes",
            *(["--image", node_image] if node_image else []),
        )
        try:
            load_images(options.faults or FAULTS, options.image)
            for fault in options.faults or FAULTS:
                counts: Counter[str] = Counter()
                for number in range(options.first, options.first + options.trials):
                    begun = time.monotonic()
                    word, said = run_trial(fault, options.image, home, number)
                    counts[word] += 1
                    load, seconds = os.getloadavg()[0], time.monotonic() - begun
                    print(f"{fault} {number + 1}: {word}, {seconds:.0f} s, load {load:.1f}; {said}", flush=True)
                print(f"{fault}: {dict(counts)} of {options.trials}", flush=True)
        finally:
            mlbench(home, "delete-cluster", "kind", f"{CLUSTER}-{NODES}", "--yes", "--force")


def run_trial(fault: str, image: str, home: Path, number: int) -> Trial:
    """Whether the right node, nobody, or another one was named, and what the certificate says."""
    victim = random.Random(number).choice(find_nodes())
    words = ["run", fault, str(NODES), "--task", "certify", "--preset", "tiny", "--image", image]
    words += ["--cluster", f"{CLUSTER}-{NODES}", "--yes", "--timeout", "15m"]
    words += ["--set", "run.absent=60s", "--set", "limit_seconds=60", "--set", "stages=drift,node"]
    with other_image(fault, victim, image):
        mlbench(home, *words, may_fail=True)
    archive = next(home.glob("runs/*/certificate.json")).parent
    document = json.loads((archive / "certificate.json").read_text())
    is_verified = verify(archive).ok
    mlbench(home, "delete", f"{fault}-{NODES}", "--yes")
    if not is_verified:
        return "not verified", ""
    if fault == "torch":
        drift = {row["key"]: row["others"] for row in document["drift"]}
        if not any(victim in names for names in drift.get("torch", {}).values()):
            return "nobody", str(drift)
        return judge_names(document, set(), set(), ())
    if fault == "image":
        return judge_names(document, {victim}, {"no_answer"}, ())
    return judge_names(document, set(), set(), ())


def find_nodes() -> list[str]:
    """The cluster's nodes without its control plane, whose containers have their names."""
    words = ["docker", "ps", "--format", "{{.Names}}", "--filter", f"label=io.x-k8s.kind.cluster={CLUSTER}-{NODES}"]
    names = subprocess.run([*words, "--filter", "label=io.x-k8s.kind.role=worker"], check=True, capture_output=True)
    return sorted(names.stdout.decode().split())


@contextmanager
def other_image(fault: str, node: str, image: str) -> Iterator[None]:
    """While it lasts, a node has a changed image under the name of `image`."""
    if fault not in CHANGES:
        yield
        return
    try:
        name(changed(fault), image, node)
        yield
    finally:
        name(changed("healthy"), image, node)


def changed(fault: str) -> str:
    """The name under which every node has the image of a fault."""
    return f"mlbench-trials:{fault}"


def load_images(faults: Iterable[str], image: str) -> None:
    """Give all nodes the changed images of the faults, and keep theirs under another name."""
    for fault in CHANGES.keys() & set(faults):
        do("docker", "build", "--tag", changed(fault), "-", given=f"FROM {image}\nRUN {CHANGES[fault]}\n")
        for node in find_nodes():
            with subprocess.Popen(["docker", "save", changed(fault)], stdout=subprocess.PIPE) as saving:
                subprocess.run([*images_of(node), "import", "-"], stdin=saving.stdout, check=True, capture_output=True)
    for node in find_nodes():
        name(image, changed("healthy"), node)


def name(source: str, image: str, node: str) -> None:
    """Let `image` be what the node has under the name `source`."""
    places = (f"docker.io/{one}" if "/" in one else f"docker.io/library/{one}" for one in (source, image))
    do(*images_of(node), "tag", "--force", *places)


def images_of(node: str) -> list[str]:
    """The command for the images of a node's containerd."""
    return ["docker", "exec", "--interactive", node, "ctr", "--namespace", "k8s.io", "images"]


def do(*words: str, given: str = "") -> None:
    """Run a command."""
    subprocess.run(words, input=given, check=True, capture_output=True, text=True)


def mlbench(home: Path, *words: str, may_fail: bool = False) -> None:
    """Run a command of mlbench with its data in `home`."""
    environment = {**os.environ, "MLBENCH_HOME": str(home)}
    done = subprocess.run([*MLBENCH, *words], env=environment, capture_output=True, text=True, timeout=_LIMIT_SECONDS)
    if done.returncode and not may_fail:
        sys.exit(f"mlbench {' '.join(words)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    main()
