"""One run at a time on this machine: real agents, real clients, another MLBENCH_HOME, kills at bad moments."""

import fcntl
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.agent.lock import VARIABLE, find_holder, lock_path
from mlbench_cli.app import run as mlbench
from mlbench_cli.engines.local.engine import LocalEngine, read_state
from mlbench_cli.errors import DeadlineError
from mlbench_cli.model.run import Run
from mlbench_cli.storage.store import Store
from tests.contract.local_runs import PATIENCE, SLEEP, Lab, processes_of, shell, until

Captured = pytest.CaptureFixture[str]
QUICK = shell("true")
UNTIL_BURNT = 'until test -e "$MLBENCH_OUTPUT_DIR/burnt"; do sleep 0.02; done'


@pytest.fixture(autouse=True)
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A lock file of this test alone."""
    path = tmp_path / "machine.lock"
    monkeypatch.setenv(VARIABLE, str(path))
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path / "home"))
    for name in ("home", "other"):
        (tmp_path / name).mkdir()
    return path


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    lab = Lab(tmp_path / "home")
    yield lab
    lab.close()


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Lab]:
    """Another person with a folder of their own."""
    lab = Lab(tmp_path / "other")
    lab.engine = LocalEngine(report=lab_sentences.append)
    lab_sentences.clear()
    yield lab
    lab.close()


lab_sentences: list[str] = []


def is_free(path: Path) -> bool:
    with open(path, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def start_in_another_process(run: Run, home: Path, **options: Any) -> "subprocess.Popen[str]":
    script = (
        "import sys\nfrom mlbench_cli.engines.local.engine import LocalEngine\n"
        "from mlbench_cli.storage.store import Store\n"
        "run = Store().run(sys.argv[1]).run\n"
        "engine = LocalEngine(report=lambda sentence: print(sentence, flush=True))\n"
        "engine.submit(run, engine.render(run.spec))"
    )
    environment = {**os.environ, "MLBENCH_HOME": str(home)}
    words = [sys.executable, "-c", script, run.name]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment, **options)


def test_the_lock_is_held_while_ranks_run_and_free_afterwards(lab: Lab, lock: Path) -> None:
    run = lab.start(SLEEP)
    assert not is_free(lock)
    holder = find_holder()
    assert holder is not None
    assert holder.run == run.name
    assert holder.deadline - holder.since == pytest.approx(run.spec.timeout)
    lab.engine.cancel(run)
    lab.end(run)
    until(lambda: is_free(lock))
    assert find_holder() is None


def test_a_run_waits_for_the_run_of_somebody_else(lab: Lab, other: Lab, tmp_path: Path) -> None:
    first = lab.start(shell(f"until test -e {tmp_path}/go; do sleep 0.02; done"))
    second = other.record(QUICK)
    waiting = start_in_another_process(second, tmp_path / "other")
    assert waiting.stdout is not None
    sentence = waiting.stdout.readline()
    assert f"{second.name} is waiting for this machine: {first.name} of user " in sentence
    assert "Timeout 24 h; mlbench run --share-machine" in sentence
    assert "--share-machine" in sentence
    assert read_state(second) is None
    observation = other.engine.look(second)
    assert {worker.reason for worker in observation.workers} == {"waiting for the runs before it"}
    (tmp_path / "go").touch()
    assert waiting.wait(PATIENCE) == 0
    assert other.end(second).ended == "exited"
    first_end, second_start = (read_state(run) for run in (first, second))
    assert first_end is not None
    assert second_start is not None
    assert first_end["finished"] <= second_start["started"]


def test_runs_that_wait_are_served_in_the_order_in_which_they_came(lab: Lab, other: Lab, tmp_path: Path) -> None:
    first = lab.start(shell(f"until test -e {tmp_path}/go; do sleep 0.02; done"))
    runs, clients = [], []
    for number in range(4):
        run = other.record(QUICK, name=f"queued-{number}")
        client = start_in_another_process(run, tmp_path / "other")
        assert client.stdout is not None
        place = "next in line" if number == 0 else f"behind {number} other"
        assert place in client.stdout.readline()  # so that the next one comes later
        runs.append(run)
        clients.append(client)
    clients[1].kill()  # its place is free at once
    clients[1].wait(PATIENCE)
    assert [other.engine.look(run).ended for run in runs] == [None, "never_started", None, None]
    assert clients[2].stdout is not None
    assert "behind 1 other" in clients[2].stdout.readline()
    (tmp_path / "go").touch()
    assert [client.wait(PATIENCE) for client in (clients[0], clients[2], clients[3])] == [0, 0, 0]
    lab.end(first)
    for run in (runs[0], runs[2], runs[3]):
        assert other.end(run).ended == "exited"
    served = [read_state(run) for run in (runs[0], runs[2], runs[3])]
    times = [state["started"] for state in served if state is not None]
    assert len(times) == 3
    assert times == sorted(times)


def test_a_client_that_was_stopped_is_passed_and_has_its_turn_later(lab: Lab, other: Lab, tmp_path: Path) -> None:
    first = lab.start(shell(f"until test -e {tmp_path}/go; do sleep 0.02; done"))
    runs = [other.record(QUICK, name=f"queued-{number}") for number in range(3)]
    clients = []
    for run, place in zip(runs, ("next in line", "behind 1 other", "behind 2 other"), strict=True):
        clients.append(start_in_another_process(run, tmp_path / "other"))
        assert clients[-1].stdout is not None
        assert place in clients[-1].stdout.readline()
    clients[0].send_signal(signal.SIGSTOP)  # as Ctrl-Z does
    (tmp_path / "go").touch()
    assert [client.wait(PATIENCE) for client in clients[1:]] == [0, 0]
    lab.end(first)
    assert [other.end(run).ended for run in runs[1:]] == ["exited"] * 2
    states = [read_state(run) for run in runs]
    assert states[0] is None
    assert states[1] is not None
    assert states[2] is not None
    assert states[1]["started"] < states[2]["started"]
    clients[0].send_signal(signal.SIGCONT)
    assert clients[0].wait(PATIENCE) == 0
    assert other.end(runs[0]).ended == "exited"


@pytest.mark.parametrize("victim", ["client", "agent"])
def test_whoever_is_killed_the_lock_is_held_as_long_as_ranks_run(lab: Lab, lock: Path, victim: str) -> None:
    run = lab.record(SLEEP)
    client = start_in_another_process(run, lab.store.folder)
    assert client.wait(PATIENCE) == 0  # the client is gone; the run was detached
    state = read_state(run)
    assert state is not None
    assert not is_free(lock)
    if victim == "agent":
        os.kill(state["pid"], signal.SIGKILL)
    else:
        lab.engine.cancel(run)
    until(lambda: not processes_of(run))
    until(lambda: is_free(lock))


@pytest.mark.parametrize("shared", [False, True])
def test_the_wait_has_an_end(lab: Lab, other: Lab, shared: bool) -> None:
    for _ in range(1 + shared):  # two that share keep others waiting
        lab.start(SLEEP, share_machine=shared)
    run = other.record(QUICK, timeout=1.5)
    with pytest.raises(DeadlineError, match=r"waited 2 s for this machine: run-\d of user"):
        other.engine.submit(run, other.engine.render(run.spec))
    assert [sentence for sentence in lab_sentences if "is waiting for this machine" in sentence]


def test_a_run_that_waits_can_be_canceled(lab: Lab, other: Lab, tmp_path: Path) -> None:
    lab.start(SLEEP)
    run = other.record(QUICK)
    waiting = start_in_another_process(run, tmp_path / "other", stderr=subprocess.PIPE)
    assert waiting.stdout is not None
    assert waiting.stdout.readline()
    other.engine.cancel(run)
    _, problem = waiting.communicate(timeout=120)
    assert waiting.returncode != 0
    assert "was canceled before it started" in problem
    assert read_state(run) is None


def test_a_run_that_shares_starts_at_once_and_says_so(lab: Lab, other: Lab) -> None:
    runs = [other.start(QUICK, share_machine=True)]  # alone: another run might have come
    other.end(runs[0])
    lab.start(SLEEP)
    runs.append(other.start(QUICK, share_machine=True))
    assert other.end(runs[1]).ended == "exited"
    assert [machine_rows(run)[0]["lock"] for run in runs] == ["shared", "shared"]


@pytest.mark.parametrize("obstacle", ["folder", "link", "hard link", "no folder"])
def test_a_lock_that_cannot_be_used_is_a_label_and_no_error(
    lab: Lab, lock: Path, monkeypatch: pytest.MonkeyPatch, obstacle: str
) -> None:
    victim = lock.with_name("victim")
    victim.write_text("precious")
    if obstacle == "folder":
        lock.mkdir()
    elif obstacle == "link":
        lock.symlink_to(victim)
    elif obstacle == "hard link":
        os.link(victim, lock)
    else:
        monkeypatch.setenv(VARIABLE, str(lock / "deep"))
    run = lab.start(QUICK)
    assert lab.end(run).ended == "exited"
    first = machine_rows(run)[0]
    assert first["lock"] == "unavailable"
    assert str(lock) in first["lock_reason"]
    assert victim.read_text() == "precious"


def test_every_user_may_lock_whatever_the_umask(lab: Lab, lock: Path) -> None:
    before = os.umask(0o077)
    try:
        lab.end(lab.start(QUICK))
    finally:
        os.umask(before)
    assert stat.S_IMODE(lock.stat().st_mode) == 0o666


def test_foreign_text_in_the_lock_never_reaches_a_terminal(lab: Lab, other: Lab, lock: Path) -> None:
    lab.start(SLEEP)
    for text in ('{"run": "\\u001b[2J", "user": "x", "since": 1, "deadline": 2}', "[", "9" * 9000, "null"):
        lock.write_text(text)
        lab_sentences.clear()
        run = other.record(QUICK, timeout=1.2)
        with pytest.raises(DeadlineError) as caught:
            other.engine.submit(run, other.engine.render(run.spec))
        assert "another run is using it" in caught.value.message
        assert "another run is using it" in lab_sentences[0]


def test_the_default_file_is_the_same_for_all_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE)
    for variable in ("TMPDIR", "HOME", "XDG_RUNTIME_DIR", "MLBENCH_HOME"):
        monkeypatch.setenv(variable, "/elsewhere")
    assert lock_path() in ("/run/lock/mlbench-machine.lock", "/tmp/mlbench-machine.lock")
    monkeypatch.setenv(VARIABLE, "none")
    assert lock_path() is None


@pytest.mark.usefixtures("quick_torch")
def test_doctor_says_who_has_this_machine(lab: Lab, lock: Path, capsys: Captured) -> None:
    def find_lock_check() -> tuple[str, str]:
        assert mlbench(["doctor", "-o", "json"]) == 0
        checks = json.loads(capsys.readouterr().out)["checks"]
        return next((check["state"], check["found"]) for check in checks if check["what"] == "machine lock")

    assert find_lock_check() == ("ok", f"{lock}: free")
    shared = lab.start(SLEEP, share_machine=True)
    assert find_lock_check() == ("ok", f"{lock}: free")  # for others that share it
    lab.engine.cancel(shared)
    lab.end(shared)
    run = lab.start(SLEEP)
    assert f"{run.name} of user" in find_lock_check()[1]
    lab.engine.delete(run, force=True)
    lab.runs.clear()
    lock.unlink()
    lock.mkdir()
    assert find_lock_check()[0] == "missing"


def test_a_detached_run_queues_in_the_background(lab: Lab, capsys: Captured, tmp_path: Path) -> None:
    first = lab.start(shell(f"until test -e {tmp_path}/go; do sleep 0.02; done"))
    assert mlbench(["run", "later", "1", "--detach", "--command", "true"]) == 0
    out, err = capsys.readouterr()
    assert out == "later-1\n"
    assert f"later-1 is waiting for this machine: {first.name} of user" in err
    assert mlbench(["run", "now", "1", "--share-machine", "--command", "true", "-o", "json"]) == 0
    assert read_state(Store().run("later-1").run) is None
    (tmp_path / "go").touch()
    assert mlbench(["wait", "later-1"]) == 0


def test_an_attached_run_says_what_it_waits_for_and_can_be_interrupted(lab: Lab, tmp_path: Path) -> None:
    first = lab.start(SLEEP)
    words = [sys.executable, "-m", "mlbench_cli", "run", "mine", "1", "--command", "true"]
    waiting = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    assert _next_sentence(waiting, f"mine-1 is waiting for this machine: {first.name} of user")
    waiting.send_signal(signal.SIGINT)
    waiting.communicate(timeout=120)
    assert waiting.returncode == 130
    assert read_state(Store().run("mine-1").run) is None


def _next_sentence(client: "subprocess.Popen[str]", start: str) -> str:
    """The next line on a client's stderr that begins so."""
    assert client.stderr is not None
    return next(line for line in client.stderr if line.startswith(start))


def machine_rows(run: Run) -> list[dict[str, Any]]:
    rows = map(json.loads, (run.folder / "resources.jsonl").read_text().splitlines())
    return [row for row in rows if row.get("kind") == "machine"]


def test_the_load_of_the_machine_is_sampled(lab: Lab) -> None:
    run = lab.start(
        ("python", "-c", "import time\nend = time.process_time() + 0.4\nwhile time.process_time() < end: 0")
    )
    lab.end(run)
    first, *_, last = machine_rows(run)
    assert first["cores"] == len(os.sched_getaffinity(0)) or first["quota"]
    assert (first["lock"], first["lock_reason"]) == ("held", None)
    assert last["own_seconds"] >= 0.39
    assert last["busy_seconds"] >= last["own_seconds"] - 0.1
    assert last["elapsed_seconds"] >= 0.4


@pytest.mark.slow
def test_processes_that_lost_their_parent_are_the_runs_own(lab: Lab) -> None:
    end = 'import os; open(os.environ["MLBENCH_OUTPUT_DIR"] + "/burnt", "x")'
    burn = f"import time\nwhile time.process_time() < 0.8: pass\n{end}"
    run = lab.start(shell(f"(setsid {sys.executable} -c '{burn}' &); {UNTIL_BURNT}"))
    lab.end(run)
    assert machine_rows(run)[-1]["own_seconds"] >= 0.8
