"""The agent and the head of a run in pods: from what Kubernetes gives a container to what node.py and head.py expect.

`main(["node"])` in the pods of workers, `main(["head"])` in that of the head; templates'
start.sh unpacks the code and calls it. The ConfigMap of the run has plan.json.gz; its folder is $MLBENCH_WORK_DIR/run.
If it has the files of a user's command, too, ranks start in a folder that has them.
Standard library only, of Python 3.9 or later.
"""

from __future__ import annotations

import gzip
import os
import tarfile

from mlbench_cli.agent import head, link, node

OWN_VARIABLES = [f"MLBENCH_{name}" for name in ("HEAD", "HEAD_TOKEN", "CODE", "KEEP", "IDLE")]


def main(arguments: list[str]) -> int:
    """Be a node or the head, to the end of the run; returns the exit code of the container."""
    given = dict(os.environ)
    for name in OWN_VARIABLES:  # ranks must not see them
        os.environ.pop(name, None)
    folder = os.path.join(given["MLBENCH_WORK_DIR"], "run")
    os.makedirs(folder, exist_ok=True)
    mount = given.get("MLBENCH_MOUNT", "/mlbench")
    with gzip.open(os.path.join(mount, "plan.json.gz")) as packed:
        plan = packed.read()
    with open(f"{folder}/plan.json", "wb") as file:
        file.write(plan)
    host, _, port = given["MLBENCH_HEAD"].rpartition(":")
    link.write_note(folder, link.HEAD, [host], int(port), given["MLBENCH_HEAD_TOKEN"])
    if arguments == ["head"]:
        keep = float(given["MLBENCH_KEEP"])
        return head.serve(folder, idle_seconds=float(given["MLBENCH_IDLE"]), keep_seconds=keep)
    own = os.path.join(folder, "nodes", given.get("JOB_COMPLETION_INDEX") or "0")
    os.makedirs(own, exist_ok=True)
    if os.path.exists(files := os.path.join(mount, "files.tar.gz")):
        with tarfile.open(files) as archive:
            archive.extractall(f"{folder}/files")
        os.chdir(f"{folder}/files")
    return node.main([own])
