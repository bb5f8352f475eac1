"""worker.sh in every shell that is here: variables, exit codes, output, deadline, signals, hold."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import templates

SCRIPT = templates.FOLDER / "kubernetes" / "worker.sh"
SHELLS = [shell for shell in (["dash"], ["bash", "--posix"], ["busybox", "sh"]) if shutil.which(shell[0])]
MARKER = "@mlbench-worker "
SAMPLE = "@mlbench-sample "

pytestmark = pytest.mark.skipif(not Path("/proc/uptime").exists(), reason="worker.sh runs in Linux containers")


@pytest.fixture(params=SHELLS, ids=[shell[0] for shell in SHELLS])
def shell(request: pytest.FixtureRequest) -> list[str]:
    return list(request.param)


class Worker:
    """A worker as a process: `folder` is its /results."""

    def __init__(self, shell: list[str], folder: Path, *argv: str, **changes: str) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        environ = {
            "PATH": os.environ["PATH"],
            "JOB_COMPLETION_INDEX": "0",
            "MLBENCH_WORK_DIR": str(folder),
            "MLBENCH_TERMINATION_LOG": str(folder / "termination"),
            "LOCAL_WORLD_SIZE": "1",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "r-0.r",
            "MASTER_PORT": "29500",
            "MLBENCH_WORKERS": "2",
            "MLBENCH_RUN_ID": "r",
            "MLBENCH_BACKEND": "gloo",
            "MLBENCH_TIMEOUT": "60",
            "MLBENCH_RUN_ON_ALL": "1",
            "MLBENCH_COLLECT": "rank0",
            "MLBENCH_HOLD": "0",
        }
        environ |= changes
        self.index = int(environ["JOB_COMPLETION_INDEX"]) + int(environ.get("MLBENCH_FIRST_UNIT", "0"))
        self.samples: list[dict[str, Any]] = []
        self.process = subprocess.Popen(
            [*shell, str(SCRIPT), *argv], env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def end(self) -> tuple[int, str, dict[str, Any]]:
        """Exit code, output without the worker's own words, the last word."""
        output, _ = self.process.communicate(timeout=60)
        first, output = output.split("\n", 1)
        began = json.loads(first.removeprefix(MARKER))
        assert (sorted(began), began["worker"]) == (["began", "worker"], self.index)
        own, _, said = output.rpartition(MARKER)
        summary = json.loads(said)
        assert summary["told_begin"] is True
        own, *told = own.split(SAMPLE)
        self.samples = [json.loads(line)["sample"] for line in told]
        assert (self.folder / "termination").read_text() == said.strip()
        assert json.loads((self.folder / "summary.json").read_text()) == summary
        return self.process.returncode, own, summary

    def until(self, name: str) -> None:
        while not (self.folder / name).exists():
            assert self.process.poll() is None
            time.sleep(0.02)


def run(shell: list[str], folder: Path, *argv: str, **changes: str) -> tuple[int, str, dict[str, Any]]:
    return Worker(shell, folder, *argv, **changes).end()


def members(folder: Path, summary: Mapping[str, Any]) -> dict[str, bytes]:
    """The archive's files, after a check of what the worker says of it."""
    data = (folder / "archive.tar").read_bytes()
    assert summary["archive"] == {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    with tarfile.open(folder / "archive.tar") as archive:
        files = {member.name: archive.extractfile(member) for member in archive.getmembers() if member.isfile()}
        return {name: file.read() for name, file in files.items() if file is not None}


def test_variables_placeholders_and_output(shell: list[str], tmp_path: Path) -> None:
    show = 'echo "$RANK $LOCAL_RANK $NODE_RANK|$1|$2"; echo made > "$MLBENCH_OUTPUT_DIR/a file"; printf end'
    arguments = ("{rank}{rank} of {hosts}", "$HOME `x` 'q' \"{run_id}\" {backend} {other}\nline")
    code, output, summary = run(shell, tmp_path, "sh", "-c", show, "_", *arguments, JOB_COMPLETION_INDEX="0")
    assert output == "0 0 0|00 of r-0.r,r-1.r|$HOME `x` 'q' \"r\" gloo {other}\nline\nend"
    assert (code, summary["exit_code"], summary["reason"], summary["held"]) == (0, 0, "exited", True)
    files = members(tmp_path, summary)
    assert files["output/a file"] == b"made\n"
    samples = [json.loads(line) for line in files["resources.jsonl"].splitlines()]
    assert samples[-1] == summary["resources"]
    assert all(abs(sample["time"] - time.time()) < 300 for sample in samples)
    assert {sample.get("rank") for sample in samples if "kind" not in sample} == {0}
    assert abs(summary["ended"] - time.time()) < 300


@pytest.mark.parametrize("entry", [{}, {"MLBENCH_HOSTS": "foreign"}, {"MLBENCH_FIRST_UNIT": "3"}])
def test_each_process_knows_the_names_of_all_workers(shell: list[str], tmp_path: Path, entry: dict[str, str]) -> None:
    show = 'echo "$MLBENCH_HOSTS"'
    _, output, _ = run(shell, tmp_path, "sh", "-c", show, MLBENCH_WORKERS="3", MLBENCH_RUN_ON_ALL="1", **entry)
    assert output == "r-0.r,r-1.r,r-2.r\n"
    _, output, _ = run(shell, tmp_path, "sh", "-c", show, MLBENCH_WORKERS="1", WORLD_SIZE="1")
    assert output == "r-0.r\n"


@pytest.mark.parametrize("code", [0, 1, 64, 75, 78, 255])
def test_exit_codes_pass_through(shell: list[str], tmp_path: Path, code: int) -> None:
    got, _, summary = run(shell, tmp_path, "sh", "-c", f"exit {code}")
    assert (got, summary["exit_code"]) == (code, code)


def test_a_signal_and_a_command_that_is_not_there(shell: list[str], tmp_path: Path) -> None:
    assert run(shell, tmp_path, "sh", "-c", "kill -SEGV $$")[0] == 139
    code, output, _ = run(shell, tmp_path, "no-such-command")
    assert code in (126, 127)
    assert "no-such-command" in output


def test_another_worker_holds_nothing(shell: list[str], tmp_path: Path) -> None:
    _, output, summary = run(shell, tmp_path, "sh", "-c", "echo $RANK $NODE_RANK", JOB_COMPLETION_INDEX="1")
    assert output == "1 1\n"
    assert (summary["worker"], summary["held"], summary["archive"]) == (1, False, None)
    assert not (tmp_path / "archive.tar").exists()
    assert run(shell, tmp_path, "true", JOB_COMPLETION_INDEX="1", MLBENCH_COLLECT="all")[2]["held"] is True


def test_the_hold_ends_with_the_acknowledgement(shell: list[str], tmp_path: Path) -> None:
    worker = Worker(shell, tmp_path, "sh", "-c", "exit 7", MLBENCH_HOLD="600")
    worker.until("summary.json")
    assert worker.process.poll() is None
    (tmp_path / "ack").touch()
    assert worker.end()[0] == 7


def test_a_stopped_worker_packs_what_it_has(shell: list[str], tmp_path: Path) -> None:
    command = 'echo half > "$MLBENCH_OUTPUT_DIR/part"; echo on; sleep 100 & wait'
    worker = Worker(shell, tmp_path, "sh", "-c", command, MLBENCH_HOLD="600")
    worker.until("output/part")
    worker.process.send_signal(signal.SIGTERM)
    worker.until("summary.json")
    time.sleep(0.3)
    assert worker.process.poll() is None  # it still holds
    worker.process.send_signal(signal.SIGTERM)
    (tmp_path / "ack").touch()
    code, output, summary = worker.end()
    assert (code, summary["reason"]) == (143, "terminated")
    assert output.startswith("on\n")
    assert members(tmp_path, summary)["output/part"] == b"half\n"


def test_the_deadline_stops_the_command(shell: list[str], tmp_path: Path) -> None:
    command = 'echo x > "$MLBENCH_OUTPUT_DIR/part"; sleep 100'
    code, _, summary = run(shell, tmp_path, "sh", "-c", command, MLBENCH_TIMEOUT="1")
    assert (code, summary["exit_code"], summary["reason"]) == (124, 124, "deadline")
    assert "output/part" in members(tmp_path, summary)


def test_what_the_command_leaves_behind_is_ended(shell: list[str], tmp_path: Path) -> None:
    begun = time.monotonic()
    code, _, _ = run(shell, tmp_path, "sh", "-c", "sleep 50 & exit 0")
    assert code == 0
    assert time.monotonic() - begun < 45  # its output would stay open as long as the one left behind lives


def test_settings_of_a_fast_network_come_from_its_script_unless_the_run_has_them(
    shell: list[str], tmp_path: Path
) -> None:
    """The scripts of Google's plugins are for bash, and switch off the log that tells the network that NCCL chose."""
    profile = tmp_path / "set_nccl_env.sh"
    profile.write_text(
        "words=(gIB '$HOME \"x\" `y`')\nexport NCCL_NET=${words[0]} NCCL_ODD=${words[1]} NCCL_MINE=theirs\n"
        "export NCCL_DEBUG=WARN CUDA_VISIBLE_DEVICES=0\necho noise\nexport UNRELATED=1\n"
    )
    libraries = tmp_path / "gib"
    libraries.mkdir()
    show = (
        'echo "$NCCL_NET|$NCCL_ODD|$NCCL_MINE|${NCCL_DEBUG:-}|${CUDA_VISIBLE_DEVICES:-}${UNRELATED:-}|$LD_LIBRARY_PATH"'
    )
    given = {"MLBENCH_NCCL_PROFILE": str(profile), "MLBENCH_FABRIC_LIBRARIES": str(libraries), "NCCL_MINE": "own"}
    code, output, _ = run(shell, tmp_path / "work", "sh", "-c", show, **given)
    assert (code, output) == (0, f'gIB|$HOME "x" `y`|own|||{libraries}\n')
    missing = {**given, "MLBENCH_NCCL_PROFILE": "/nowhere", "MLBENCH_FABRIC_LIBRARIES": "/nowhere"}
    code, output, _ = run(shell, tmp_path / "other", "sh", "-c", "echo ${NCCL_NET:-none}", **missing)
    assert (code, output) == (0, "none\n")


@pytest.mark.parametrize(("given", "end"), [("", ""), ("/image/lib", "/image/lib:"), ("{driver}/lib64", "")])
def test_a_mounted_driver_is_found_after_the_libraries_of_the_image(
    shell: list[str], tmp_path: Path, given: str, end: str
) -> None:
    driver = tmp_path / "nvidia"
    (driver / "lib64").mkdir(parents=True)
    variables = {"MLBENCH_DRIVER_DIR": str(driver)}
    if given:
        variables["LD_LIBRARY_PATH"] = given.format(driver=driver)
    _, output, _ = run(shell, tmp_path / "w", "sh", "-c", 'echo "$LD_LIBRARY_PATH"; echo "$PATH"', **variables)
    libraries, programs = output.splitlines()
    assert libraries == f"{end}{driver}/lib64"
    assert programs.endswith(f":{driver}/bin")


def test_without_a_mounted_driver_nothing_is_added(shell: list[str], tmp_path: Path) -> None:
    missing = str(tmp_path / "none")
    _, output, _ = run(shell, tmp_path, "sh", "-c", 'echo "${LD_LIBRARY_PATH-unset}"', MLBENCH_DRIVER_DIR=missing)
    assert output == "unset\n"


def test_only_worker_0_runs_the_command(shell: list[str], tmp_path: Path) -> None:
    worker = Worker(shell, tmp_path, "sh", "-c", "echo never", JOB_COMPLETION_INDEX="1", MLBENCH_RUN_ON_ALL="0")
    worker.until("resources.jsonl")
    time.sleep(0.3)
    worker.process.send_signal(signal.SIGTERM)
    code, output, summary = worker.end()
    assert (code, output, summary["reason"]) == (0, "", "exited")


def test_torchrun_starts_several_processes_each_with_its_own_rank_and_folder(shell: list[str], tmp_path: Path) -> None:
    """A torchrun that starts one process of four: placeholders and folder are that process's, as on this machine."""
    tools = tmp_path / "bin"
    tools.mkdir()
    script = 'echo "$RANK: $*"; while [ "$1" != --no-python ]; do shift; done; shift; RANK=6 LOCAL_RANK=2 exec "$@"'
    (tools / "torchrun").write_text(f"#!/bin/sh\n{script}\n")
    (tools / "torchrun").chmod(0o755)
    path = f"{tools}:{os.environ['PATH']}"
    command = ("sh", "-c", 'echo "$1"; echo "$RANK" > "$MLBENCH_OUTPUT_DIR/mine"', "_", "{rank} it's {backend}\n2")
    _, output, summary = run(
        shell,
        tmp_path / "w",
        *command,
        LOCAL_WORLD_SIZE="4",
        JOB_COMPLETION_INDEX="1",
        MLBENCH_COLLECT="all",
        PATH=path,
    )
    wanted = "--nnodes 2 --node-rank 1 --nproc-per-node 4 --master-addr r-0.r --master-port 29500 --no-python sh"
    assert output.startswith(f"4: {wanted} {SCRIPT} sh -c ")
    assert output.endswith("6 it's gloo\n2\n")
    assert members(tmp_path / "w", summary)["output/rank-6/mine"] == b"6\n"


@pytest.mark.parametrize(("given", "seen"), [({}, "open"), ({"OMP_NUM_THREADS": "3"}, "3")])
def test_torchruns_single_thread_is_nobodys_choice(
    shell: list[str], tmp_path: Path, given: dict[str, str], seen: str
) -> None:
    """torchrun sets OMP_NUM_THREADS=1 for several processes if it is not set; a task then takes its share of CPUs."""
    tools = tmp_path / "bin"
    tools.mkdir()
    script = 'while [ "$1" != --no-python ]; do shift; done; shift; : "${OMP_NUM_THREADS:=1}"; export OMP_NUM_THREADS'
    (tools / "torchrun").write_text(f'#!/bin/sh\n{script}\nRANK=0 LOCAL_RANK=0 exec "$@"\n')
    (tools / "torchrun").chmod(0o755)
    path = f"{tools}:{os.environ['PATH']}"
    environment = {"LOCAL_WORLD_SIZE": "4", "PATH": path, "OMP_NUM_THREADS": "", **given}
    _, output, _ = run(shell, tmp_path / "w", "sh", "-c", 'echo "${OMP_NUM_THREADS:-open}"', **environment)
    assert output == f"{seen}\n"


def test_a_command_that_was_killed_for_memory_is_told_from_one_that_was_not(shell: list[str], tmp_path: Path) -> None:
    _, _, summary = run(shell, tmp_path, "true")
    assert isinstance(summary["memory_kills"], int)


def test_a_worker_that_is_not_held_tells_its_samples(shell: list[str], tmp_path: Path) -> None:
    worker = Worker(shell, tmp_path, "printf", "no end", JOB_COMPLETION_INDEX="1")
    assert worker.end()[1] == "no end"
    written = [json.loads(line) for line in (tmp_path / "resources.jsonl").read_text().splitlines()]
    load = [sample for sample in written if "kind" in sample]
    ends = [load[0], load[-1]] if len(load) > 1 else load  # the command may end before the first of them
    assert worker.samples == [*ends, *(sample for sample in written if "kind" not in sample)]


def test_a_worker_measures_what_others_use_of_its_node(shell: list[str], tmp_path: Path) -> None:
    worker = Worker(shell, tmp_path, "sleep", "3")
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        worker.end()
        other.kill()
    written = [json.loads(line) for line in (tmp_path / "resources.jsonl").read_text().splitlines()]
    last = [sample for sample in written if sample.get("kind") == "machine"][-1]
    assert (last["worker"], last["cores"]) == (0, os.cpu_count())
    assert last["elapsed_seconds"] >= 3
    assert last["busy_seconds"] > 0
    assert {name for name in last if name.endswith(("_seconds", "_periods"))} == {
        *("elapsed_seconds", "busy_seconds", "own_seconds", "throttled_seconds", "throttled_periods")
    }
    assert 0 <= last["busy_seconds"] <= (last["elapsed_seconds"] + 1) * last["cores"]


def test_of_many_samples_it_tells_some(shell: list[str], tmp_path: Path) -> None:
    many = (
        'i=0; while [ $i -lt 1000 ]; do i=$((i+1)); echo "{\\"time\\":$i}"; done >>"$MLBENCH_WORK_DIR/resources.jsonl"'
    )
    worker = Worker(shell, tmp_path, "sh", "-c", many, JOB_COMPLETION_INDEX="1")
    worker.end()
    assert 200 <= len(worker.samples) <= 302
    times = [sample["time"] for sample in worker.samples[3:-1] if sample["time"] <= 1000]
    # Evenly spread, every fourth line; the worker's own samples are among the lines, and may be the fourth.
    assert max(later - earlier for earlier, later in pairwise(times)) <= 8


def test_a_pod_of_the_servers_job_comes_after_those_of_the_workers(shell: list[str], tmp_path: Path) -> None:
    """It is one process, also if workers are several, and has no output that is worth a hold."""
    words = ("sh", "-c", 'echo "$RANK of $WORLD_SIZE, $MLBENCH_ROLE, node $NODE_RANK"')
    changes = {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4", "MLBENCH_COLLECT": "all", "MLBENCH_HOLD": "60"}
    code, output, summary = run(shell, tmp_path, *words, **changes, JOB_COMPLETION_INDEX="1", MLBENCH_FIRST_UNIT="2")
    assert (code, output) == (0, "5 of 4, server, node 3\n")
    assert (summary["held"], summary["archive"]) == (False, None)
