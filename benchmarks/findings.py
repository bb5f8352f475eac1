"""Troubles provoked on a real cluster: what they are called, and how soon after its API shows them.

usage: KUBECONFIG=... python benchmarks/findings.py IMAGE [TROUBLE...]

Needs a cluster with two worker nodes that have IMAGE (sh, coreutils, python3). "node" pauses a node, which can be done
where the nodes are containers of this machine. Without a cluster: left out. Wanted: the right name, within 10 s.
"""

import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from mlbench_cli.kube.access import Access
from tests.e2e.runs import Cluster, Runs, restricted_namespace
from tests.e2e.troubles import TROUBLES, WANTS_DOCKER, nodes_can_be_paused, provoke

LIMIT = 10.0


def main(image: str, names: list[str]) -> None:
    access = Access.from_kubeconfig()
    with access.client() as api:
        pausable = nodes_can_be_paused(api)
    print(f"{'provoked':14} {'named':20} {'seconds after the API showed it':>32}")
    rows = []
    with restricted_namespace(access) as inside:
        cluster = Cluster(inside, image, image, Path(os.environ["KUBECONFIG"]))
        for name in names or TROUBLES:
            if name in WANTS_DOCKER and not pausable:
                print(f"{name:14} left out: the nodes cannot be paused")
                continue
            rows.append(row(name, cluster))
    right = sum(named for named, _ in rows)
    print(
        f"{right} of {len(rows)} named rightly, the slowest after {max(after for _, after in rows):.1f} s ({LIMIT:.0f})"
    )


def row(name: str, cluster: Cluster) -> tuple[bool, float]:
    """Whether it was called by its names and by those alone, and after how many seconds at most."""
    trouble, runs = TROUBLES[name], Runs(cluster)
    try:
        with tempfile.TemporaryDirectory() as folder:
            seen, delays = provoke(trouble, name, runs, Path(folder))
    finally:
        runs.remove()
    codes = [finding.code for finding in seen.findings]
    right = codes == [trouble.code] and list(delays) == [*dict(trouble.before), trouble.code]
    for code, seconds in delays.items():
        print(f"{name:14} {code:20} {seconds:32.1f}", flush=True)
    if not right:
        print(f"{name:14} WANTED {trouble.code}, and had at the end: {', '.join(codes) or 'nothing'}", flush=True)
    return right, max(delays.values(), default=0.0)


if __name__ == "__main__":
    given = sys.argv[1:] or [word for word in [os.environ.get("LAB_TEST_IMAGE")] if word]
    if not given or not os.environ.get("KUBECONFIG"):
        print("left out: KUBECONFIG is not set, or no image is named")
    else:
        main(given[0], given[1:])
