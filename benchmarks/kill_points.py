"""Clients killed at every step of a run on a real cluster, and what another one then has.

usage: KUBECONFIG=... python benchmarks/kill_points.py IMAGE

Needs a cluster whose nodes have IMAGE (sh, coreutils). Without one: left out. Each client is killed (SIGKILL) right
before its n-th HTTP request or connection; another one goes on, in the same folder or in another one.
"""

import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from mlbench_cli.kube.access import Access
from tests.e2e.kills import KILLS, survive
from tests.e2e.runs import Cluster, Runs, restricted_namespace


def main(image: str) -> None:
    print(f"{'killed before':20} {'gone on in':16} {'ended':8} {'log':8} {'output':24} {'released':8}")
    well = 0
    with restricted_namespace(Access.from_kubeconfig()) as access:
        cluster = Cluster(access, image, image, Path(os.environ["KUBECONFIG"]))
        for event, number in KILLS:
            for elsewhere in (False, True):
                well += row(cluster, event, number, elsewhere)
    print(f"{well} of {2 * len(KILLS)} survived")


def row(cluster: Cluster, event: str, number: int, elsewhere: bool) -> bool:
    runs = Runs(cluster)
    try:
        with tempfile.TemporaryDirectory() as folder:
            found = survive(runs, Path(folder), event, number, elsewhere)
    finally:
        runs.remove()
    what = f"{'request' if event == 'http.client.send' else 'connection'} {number}"
    where = "another folder" if elsewhere else "the same folder"
    log = "whole" if found.whole_log else "NOT WHOLE"
    released = "yes" if found.acknowledged else "NO"
    print(f"{what:20} {where:16} {found.ended!s:8} {log:8} {found.output:24} {released:8}", flush=True)
    return found.well


if __name__ == "__main__":
    image = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("LAB_TEST_IMAGE")
    if not image or not os.environ.get("KUBECONFIG"):
        print("left out: KUBECONFIG is not set, or no image is named")
    else:
        main(image)
