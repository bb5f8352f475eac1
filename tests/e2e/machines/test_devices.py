"""GPUs, switches, memory limits and containers on a real Slurm: what the fleet's own one lacks, a second one has."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.machines.fleet import Client, Fleet
from tests.e2e.machines.second_slurm import GPUS, second_slurm


@pytest.fixture(scope="module")
def configuration(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with second_slurm(tmp_path_factory.mktemp("slurm")) as conf:
        yield conf


@pytest.fixture
def second(configuration: Path, client: Client, fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> Client:
    monkeypatch.setenv("SLURM_CONF", str(configuration))
    client.ok("attach-slurm", "gpus", "--shared", str(fleet.shared), "--python", sys.executable, "--no-probe")
    return client


def test_ranks_see_the_gpus_that_slurm_gives_to_them(second: Client) -> None:
    assert f"{GPUS} GPUs each" in second.ok("doctor", "slurm")
    words = ["--gpu", "--gpus-per-worker", "2", "--backend", "gloo", "--yes"]
    second.ok("run", "dev", "3", "--command", "sh -c 'echo $LOCAL_RANK of $CUDA_VISIBLE_DEVICES'", *words)
    logs = second.folder("dev-3") / "logs"
    assert [(logs / f"rank-{rank}.log").read_text() for rank in range(6)] == ["0 of 0,1\n", "1 of 0,1\n"] * 3
    placement = json.loads((second.folder("dev-3") / "manifests/placement.json").read_text())["nodes"]
    assert [node["gpus"] for node in placement] == [[]] * 3  # these machines have no files of devices
    assert [entry["gpus"] for node in placement for entry in node["bound"]] == [["0", "1"]] * 6
    assert [node["slurm"]["SLURM_TOPOLOGY_ADDR"] for node in placement] == ["s0.s1.n1", "s0.s1.n2", "s0.s2.n3"]
    done = second.run("run", "many", "1", "--command", "true", "--gpu", "--gpus-per-worker", "5", "--yes")
    assert done.returncode == 5
    assert f"have {GPUS}" in done.stderr


def test_a_run_that_slurm_kills_for_its_memory_is_named_so(second: Client) -> None:
    script = "import time; time.sleep(2); x = bytearray(700 << 20); time.sleep(60)"
    done = second.run("run", "oom", "2", "--command", f"python3 -c '{script}'", "--yes")
    assert done.returncode == 7, done.stderr
    findings = json.loads((second.folder("oom-2") / "findings.json").read_text())["findings"]
    assert findings[0]["code"] == "out_of_memory"
    assert second.result("oom-2")["outcome"] == "failed"


APPTAINER = """#!/bin/bash
# Stands in for apptainer, which no package repository of the tests has: its command line, and a namespace of mounts.
[ "$1" = exec ] || exit 64; shift
while [[ $1 = --* ]]; do case $1 in --bind) binds+="$2 "; shift 2;; --nv) nv=yes; shift;; *) exit 64;; esac; done
export CONTAINER_IMAGE=$1 CONTAINER_BINDS=$binds CONTAINER_NV=$nv; shift
exec unshare -m "$@"
"""


def test_ranks_start_in_the_container_that_the_image_names(
    fleet: Fleet, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "apptainer").write_text(APPTAINER)
    (folder / "apptainer").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    setup = tmp_path / "setup.sh"  # jobs begin with a login shell, which sets PATH anew
    setup.write_text(f"export PATH={folder}:$PATH\n")
    words = ["--shared", str(fleet.shared), "--python", sys.executable, "--setup", str(setup)]
    client.ok("attach-slurm", "lab", *words, "--no-probe")
    script = 'echo "$CONTAINER_IMAGE $RANK $CONTAINER_BINDS"; echo $RANK > $MLBENCH_OUTPUT_DIR/file; exit $RANK'
    done = client.run("run", "box", "2", "--image", "me/image:1", "--command", f"sh -c '{script}'", "--yes")
    assert done.returncode == 7, done.stderr
    log = (client.folder("box-2") / "logs/rank-1.log").read_text()
    assert log == f"docker://me/image:1 1 {fleet.shared} \n"
    assert (client.folder("box-2") / "output/rank-1/file").read_text() == "1\n"
    assert client.observation("box-2")["first_failed"] == 1
