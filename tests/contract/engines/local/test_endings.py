"""What is special to the end of a local run; ../test_contract.py has what every engine promises."""

import json
import os
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.engines.follow import read_log
from mlbench_cli.errors import UsageError
from mlbench_cli.model.run import Finding, Run
from mlbench_cli.results.archive.verify import find_problems
from task_images.cores import effective_cores
from tests.contract.local_runs import SLEEP, Lab, bind_superuser, client, processes_of, python, shell, until


def state_of(run: Run) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((run.folder / ".state/state.json").read_bytes())
    return state


def change_state(run: Run, **changes: Any) -> None:
    (run.folder / ".state/state.json").write_text(json.dumps({**state_of(run), **changes}))


def finding(findings: tuple[Finding, ...], code: str) -> Finding:
    (found,) = [found for found in findings if found.code == code]
    return found


def is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


# --- a rank ends --------------------------------------------------------------------------------------------------


def test_the_first_to_fail_is_known_even_to_a_late_supervisor(lab: Lab) -> None:
    gate = str(lab.store.folder / "gate")
    run = lab.start(shell(f"while [ ! -e {gate}-$RANK ]; do sleep 0.01; done; exit 4"), workers=3)
    state = state_of(run)
    os.kill(state["pid"], signal.SIGSTOP)
    for rank in (1, 2, 0):
        Path(f"{gate}-{rank}").touch()
        until(partial(is_zombie, state["ranks"][rank]["pid"]))
    os.kill(state["pid"], signal.SIGCONT)
    assert lab.end(run).first_failed == 1


@pytest.mark.parametrize(
    ("script", "code", "finding_code", "words"),
    [
        ("exit 64", 64, "usage", "rejected its arguments (exit code 64)"),
        (
            "echo training; echo 'rank 0: no such file' >&2; echo 'rank 0: mlbench data' >&2; exit 64",
            *(64, "usage", "rejected its arguments: no such file (exit"),
        ),
        ("exit 70", 70, "wrong_result", "wrong results"),
        ("exit 75", 75, "retryable", "may be temporary"),
        ("exit 78", 78, "bad_environment", "environment"),
        ("no-such-command-in-here", 127, "command_not_found", "127"),
        ("kill -SEGV $$", 139, "rank_crashed", "SIGSEGV"),
        ("kill -KILL $$", 137, "rank_crashed", "SIGKILL"),
        ("exit 255", 255, "rank_crashed", "255"),
    ],
)
def test_exit_codes_pass_through_and_are_explained(
    lab: Lab, script: str, code: int, finding_code: str, words: str
) -> None:
    end = lab.end(lab.start(shell(script)))
    assert (end.ended, end.workers[0].exit_code) == ("failed", code)
    found = finding(end.findings, finding_code)
    assert words in found.summary
    assert found.retryable == (code == 75)


@pytest.mark.parametrize(("program", "code"), [("no-such-program", 127), ("/etc/passwd", 126)])
def test_a_program_that_cannot_be_started_is_named(lab: Lab, program: str, code: int) -> None:
    end = lab.end(lab.start((program, "x"), workers=2))
    assert (end.ended, end.first_failed, end.workers[0].exit_code) == ("failed", 0, code)
    assert program in finding(end.findings, "command_not_found").summary


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"#!/bin/sh\r\n", "names '/bin/sh\\r', which"),
        (b"#!/no/python -u\n", "'/no/python -u', which"),
        (b"x=1\n", "#!/bin/sh"),
    ],
)
def test_a_script_that_is_there_and_cannot_be_started_is_told_why(
    lab: Lab, tmp_path: Path, line: bytes, words: str
) -> None:
    """The system says of the first two that there is no such file. Of those on other machines only the agent knows."""
    (tmp_path / "script").write_bytes(line + b"echo hi\n")
    (tmp_path / "script").chmod(0o755)
    end = lab.end(lab.start((str(tmp_path / "script"),)))
    assert words in finding(end.findings, "command_not_found").summary


def test_what_a_rank_has_started_ends_with_it_and_not_with_the_run(lab: Lab) -> None:
    run = lab.start(shell('[ "$RANK" = 1 ] && exec sleep 600; sleep 600 & exit 0'), workers=2)
    until(lambda: lab.engine.look(run).workers[0].phase == "succeeded")
    until(lambda: len(processes_of(run)) == 1)


def test_a_rank_begins_with_the_usual_signals_its_share_of_the_cores_and_the_users_variables(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin(**options: Any) -> list[str]:
        variables = "$OMP_NUM_THREADS $GLOO_SOCKET_IFNAME $PYTHONPATH"
        return lab.log(lab.start(shell(f"grep SigIgn /proc/self/status; echo {variables}"), **options)).decode().split()

    monkeypatch.delenv("OMP_NUM_THREADS")
    _, ignored, threads, interface, *_ = begin(workers=2)
    assert not int(ignored, 16) & 1 << (signal.SIGPIPE - 1)  # or `yes | head` never ends
    assert (threads, interface) == (str(max(1, effective_cores() // 2)), "lo")
    for name, value in {"OMP_NUM_THREADS": "5", "GLOO_SOCKET_IFNAME": "eth7", "PYTHONPATH": "/mine"}.items():
        monkeypatch.setenv(name, value)
    _, _, threads, interface, path = begin()
    assert (threads, interface, path.rpartition(":")[2]) == ("5", "eth7", "/mine")
    assert begin(cpus=3.0)[2:4] == ["3", "eth7"]  # what the record says wins


@pytest.mark.parametrize("is_late", [True, False])
def test_a_signal_to_agent_and_ranks_alike_is_no_failure_of_a_rank(lab: Lab, is_late: bool) -> None:
    """As a batch system, systemd and a shutdown send it, to all processes of a job."""
    run = lab.start(SLEEP, workers=2)
    state = state_of(run)
    if is_late:  # the agent learns of both at once
        os.kill(state["pid"], signal.SIGSTOP)
    for rank in state["ranks"]:
        os.kill(rank["pid"], signal.SIGTERM)
    if is_late:
        until(lambda: all(is_zombie(rank["pid"]) for rank in state["ranks"]))
    for number in (signal.SIGTERM, signal.SIGCONT):
        os.kill(state["pid"], number)
    end = lab.end(run)
    assert (end.ended, end.first_failed, end.findings) == ("canceled", None, ())


# --- the client dies ----------------------------------------------------------------------------------------------


def test_a_detached_run_holds_no_descriptor_of_its_client(lab: Lab, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    script = f"lab.start({SLEEP!r}, name='theirs'); os._exit(0)"
    with client(tmp_path, script, pass_fds=[writer]) as other:
        os.close(writer)
        assert other.wait() == 0
    assert os.read(reader, 1) == b""
    os.close(reader)
    lab.engine.delete(lab.store.run("theirs").run, force=True)


# --- the agent dies ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["start_time", "boot_id"])
def test_another_process_with_the_same_number_is_not_the_supervisor(lab: Lab, change: str) -> None:
    run = lab.start(SLEEP)
    real = state_of(run)["pid"]
    with subprocess.Popen(["sleep", "600"]) as bystander:
        try:
            if change == "start_time":
                os.kill(real, signal.SIGKILL)
                change_state(run, pid=bystander.pid)
            else:
                change_state(run, boot_id="another boot")
            assert lab.end(run).ended == "lost"
            lab.engine.cancel(run)
            lab.engine.delete(run, force=True)
            assert bystander.poll() is None
        finally:
            bystander.kill()
            if change == "boot_id":
                with suppress(ProcessLookupError):  # it ends with its ranks
                    os.kill(real, signal.SIGKILL)


def test_a_recorded_run_that_nobody_starts_is_told(lab: Lab) -> None:
    run = lab.record(SLEEP)
    end = lab.end(run)
    assert end.ended == "never_started"
    assert finding(end.findings, "not_started")
    assert list(read_log(lab.engine, run, 0, follow=True)) == []


# --- the disk is full ---------------------------------------------------------------------------------------------


def test_a_disk_that_is_full_from_the_start_is_a_usage_error(lab: Lab, small_disk: Path) -> None:
    planned = lab.record(SLEEP)
    run = Run(planned.id, planned.spec, small_disk / "run", planned.created)
    with open(small_disk / "ballast", "wb") as file:
        file.write(b"\0" * ((1 << 20) - 32768))
    with pytest.raises(UsageError, match="No space left") as caught:
        lab.engine.submit(run, lab.engine.render(run.spec))
    assert caught.value.hint
    assert processes_of(run) == []


FOREIGN = """
import os
os.chdir(os.environ["MLBENCH_OUTPUT_DIR"])
os.mkdir("folder")
for name in ("file", "folder/file"):
    open(name, "w").close()
    os.chmod(name, 0o600)
    os.chown(name, 12345, -1)
os.chmod("folder", 0o700)
os.chown("folder", 12345, -1)
"""


def test_output_of_another_user_does_not_keep_an_archive_from_being_completed(tmp_path: Path) -> None:
    """As of a container that the task has started."""
    words = [*bind_superuser(), sys.executable, "-m", "mlbench_cli"]
    options: dict[str, Any] = {"env": {**os.environ, "MLBENCH_HOME": str(tmp_path)}, "capture_output": True}
    command = ["--share-machine", "--command", shlex.join(python(FOREIGN))]
    done = subprocess.run([*words, "run", "x", "1", *command], **options)
    assert done.returncode == 8
    (folder,) = tmp_path.glob("runs/*/output/rank-0/folder")
    assert f"cannot be completed: {folder}: Permission denied" in done.stderr.decode()
    folder.chmod(0o755)
    os.chown(folder, os.geteuid(), -1)
    assert subprocess.run([*words, "wait", "x-1"], **options).returncode == 0
    archive = folder.parents[2]
    assert find_problems(archive) == []
    found = json.loads((archive / "findings.json").read_bytes())["findings"]
    summaries = {finding["summary"] for finding in found if finding["code"] == "file_left_out"}
    assert summaries == {f"output/rank-0/{name} may not be read; it was left out." for name in ("file", "folder/file")}
