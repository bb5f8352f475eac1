"""What the ranks of an anonymous run write: no names of hosts and users, no addresses, no local paths."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from task_images.gpu import describe, log_to
from tests.contract.task_images.ranks import ROOT, launch_within

PROGRAM = """
import sys
sys.path.append({root!r})
from task_images.run import run

def main(contract):
    print(open(__file__).name, {output!r} + "/tensor.pt", "loss 0.25, version 2.30.7", flush=True)
    print("waiting for plum.example, which is 10.0.0.7, at [fd00::7]:29500", file=sys.stderr)
    raise RuntimeError("no answer from " + {host!r})

run(main)
"""


def test_messages_and_tracebacks_name_neither_machines_nor_local_paths(tmp_path: Path) -> None:
    program, output = tmp_path / "home" / "train.py", tmp_path / "home" / "out"
    output.mkdir(parents=True)
    program.write_text(PROGRAM.format(root=str(ROOT), output=str(output), host=socket.gethostname()))
    variables = {"MLBENCH_ANONYMOUS": "1", "MLBENCH_OUTPUT_DIR": str(output), "HOME": str(program.parent)}
    variables |= {"WORLD_SIZE": "2", "MLBENCH_HOSTS": f"{socket.gethostname()},plum.example"}
    command = [sys.executable, str(program)]
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout == "~/train.py OUTPUT/tensor.pt loss 0.25, version 2.30.7\n"
    first, *trace = done.stderr.splitlines()
    assert first == "waiting for node-1, which is ADDRESS, at ADDRESS:29500"
    assert trace[0].startswith("Traceback")
    assert trace[-1] == "RuntimeError: no answer from node-0"
    assert not [line for line in trace if str(tmp_path) in line or str(ROOT) in line]


@pytest.mark.slow
def test_events_have_digests_instead_of_paths(tmp_path: Path) -> None:
    library = next(word for word in Path("/proc/self/maps").read_text().split() if word.endswith("/libc.so.6"))
    data = tmp_path / "data"
    data.mkdir()
    (data / "train-images-idx3-ubyte.gz").touch()  # the other files are missing
    for anonymous in ("", "1"):
        changes = {"LD_PRELOAD": library, "MLBENCH_DATA_DIR": str(data), "MLBENCH_ANONYMOUS": anonymous}
        [ended] = launch_within(280, "task_images.run mnist", 1, tmp_path, {}, changes)
        assert ended.code == 78, ended.stderr
        [facts] = ended.events("environment")
        written = ended.stdout + ended.stderr
        named = (library in written, str(data) in written, facts["host"] is not None)
        assert named == (not anonymous,) * 3
        assert facts["variables"]["LD_PRELOAD"]  # that something was loaded is said in both


def test_variables_and_log_of_nccl_reveal_no_machine(tmp_path: Path) -> None:
    variables = {"MLBENCH_ANONYMOUS": "1", "NCCL_TOPO_FILE": "/home/ann/topology.xml"}
    variables |= {"NCCL_HOSTID": "plum", "NCCL_NTHREADS": "256"}
    log_to(tmp_path, variables)
    log = Path(variables["NCCL_DEBUG_FILE"])
    assert log.parent != tmp_path  # what is in there is collected
    log.write_text("plum:51:77 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.7<0>\n")
    facts: Any = describe(variables)
    assert facts["variables"]["NCCL_NTHREADS"] == "256"
    assert facts["interfaces"] == "[0]eth0"
    assert not [word for word in ("plum", "ann", "10.0.0.7", str(log)) if word in str(facts)]
