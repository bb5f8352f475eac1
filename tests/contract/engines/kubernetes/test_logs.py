"""The copy of a log is the log: no line lost, none doubled, whatever is cut, killed or rotated in between."""

import json
import random
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
import urllib3

from mlbench_cli.engines.base import LOG_GAP
from mlbench_cli.engines.kubernetes.collector import LogCollector
from mlbench_cli.engines.kubernetes.engine import KubernetesEngine
from mlbench_cli.engines.kubernetes.logs import (
    Copying,
    LogFile,
    last_lines,
    log_gap,
    position_file,
    read_position,
    samples_file,
)
from mlbench_cli.engines.kubernetes.workers import INDEX_LABEL
from mlbench_cli.kube.api import Api, ApiError
from mlbench_cli.model.spec import KubernetesOptions
from tests.contract.engines.kubernetes.test_engine import a_run, put_pod, submit, terminated_pod
from tests.fakes.kube_api import Fault, KubeApi, Log, stamp

POD = "r-0-x"
BEGIN = 1_800_000_000.0
SUMMARY = b'@mlbench-worker {"worker":0,"exit_code":3,"reason":"exited","held":false}'


@pytest.fixture
def server() -> Iterator[KubeApi]:
    with KubeApi() as server:
        server.put("pods", {"metadata": {"name": POD, "labels": {INDEX_LABEL: "0"}}})
        yield server


def copy(server: KubeApi, folder: Path, follow: bool = False, uid: str = "u") -> None:
    """One process's attempt: what it has in memory is gone afterwards."""
    with closing(LogFile(folder, 0, 0)) as log:
        log.start(uid)
        Copying(server.access.client(), "default").run(POD, log, follow)


def gaps_of(folder: Path) -> list[int]:
    position = read_position(position_file(folder, 0))
    assert position is not None
    return position.gaps


def copy_logs(folder: Path) -> bytes:
    return (folder / "logs/rank-0.log").read_bytes()


def test_a_log_is_copied_byte_for_byte(server: KubeApi, tmp_path: Path) -> None:
    lines = [b"plain", b"", b" leading and trailing ", b"\xff\x00 bytes", b"50%\r100%", "日本".encode(), b"x" * 300_000]
    server.write(POD, *lines)
    copy(server, tmp_path)
    copy(server, tmp_path)
    server.write(POD, b"later")
    copy(server, tmp_path)
    assert copy_logs(tmp_path) == b"\n".join([*lines, b"later"]) + b"\n"


@pytest.mark.parametrize("seed", range(6))
def test_cuts_lose_and_double_nothing(server: KubeApi, tmp_path: Path, seed: int) -> None:
    """Many lines in few seconds, some with the same time stamp, the two streams a little out of order."""
    chance = random.Random(seed)
    moment, lines = BEGIN, []
    for number in range(4000):
        moment += chance.choice([0, 0, 0.0004, 0.002])
        text = f"line {number} {'x' * chance.randrange(80)}".encode()
        lines.append(text)
        server.write(POD, text, at=stamp(moment - chance.choice([0, 0, 0.3])))
    server.end_log(POD)
    for _ in range(12):
        server.faults[:] = [Fault("/log", cut=chance.randrange(400_000))]
        with suppress(urllib3.exceptions.HTTPError):
            copy(server, tmp_path, follow=chance.random() < 0.5)
    server.faults.clear()
    copy(server, tmp_path)
    assert copy_logs(tmp_path) == b"".join(line + b"\n" for line in lines)


def test_a_cut_in_the_middle_of_a_line_or_character(server: KubeApi, tmp_path: Path) -> None:
    server.write(POD, "één".encode(), "twéé".encode(), at=stamp(BEGIN))
    for cut in range(80):
        folder = tmp_path / str(cut)
        server.faults[:] = [Fault("/log", cut=cut)]
        with suppress(urllib3.exceptions.HTTPError):
            copy(server, folder)
        server.faults.clear()
        copy(server, folder)
        assert copy_logs(folder) == "één\ntwéé\n".encode()


def test_a_client_killed_between_the_copy_and_its_note(server: KubeApi, tmp_path: Path) -> None:
    server.write(POD, b"one", b"two")
    copy(server, tmp_path)
    note = position_file(tmp_path, 0).read_bytes()
    server.write(POD, b"three", b"four")
    copy(server, tmp_path)
    position_file(tmp_path, 0).write_bytes(note)
    with open(tmp_path / "logs/rank-0.log", "ab") as file:
        file.write(b"half a li")
    copy(server, tmp_path)
    assert copy_logs(tmp_path) == b"one\ntwo\nthree\nfour\n"


def test_a_copy_that_was_removed_is_made_anew(server: KubeApi, tmp_path: Path) -> None:
    server.write(POD, b"one")
    copy(server, tmp_path)
    (tmp_path / "logs/rank-0.log").unlink()
    server.write(POD, b"two")
    copy(server, tmp_path)
    assert copy_logs(tmp_path) == b"one\ntwo\n"


def test_a_rotation_between_two_readings_is_noticed(server: KubeApi, tmp_path: Path) -> None:
    server.write(POD, b"one", b"two", at=stamp(BEGIN))
    copy(server, tmp_path)
    server.logs[POD] = Log([(stamp(BEGIN + 0.1), b"three"), (stamp(BEGIN + 0.2), b"four")])
    copy(server, tmp_path)
    assert copy_logs(tmp_path) == b"one\ntwo\nthree\nfour\n"
    position = read_position(position_file(tmp_path, 0))
    assert position is not None
    assert position.gaps == [len(b"one\ntwo\n")]
    (finding,) = log_gap({0: position.gaps}, [0])
    assert (finding.code, finding.evidence) == (LOG_GAP, {"missing_before_byte": {"logs/rank-0.log": [8]}})


def test_a_rotation_is_noticed_by_the_first_line_that_is_too_young(server: KubeApi, tmp_path: Path) -> None:
    """Not only when as many lines have come as were copied before, which may be never."""
    server.write(POD, *[b"old"] * 50, at=stamp(BEGIN))
    copy(server, tmp_path)
    server.logs[POD] = Log([(stamp(BEGIN + 0.1), b"young")])
    server.end_log(POD)
    copy(server, tmp_path, follow=True)
    assert copy_logs(tmp_path) == b"old\n" * 50 + b"young\n"


def test_a_rotation_is_noticed_if_the_last_copied_line_is_another_one(server: KubeApi, tmp_path: Path) -> None:
    """As many lines as were copied, none of them too young, but the last one was not the last."""
    server.logs[POD] = Log([(stamp(BEGIN), b"one"), (stamp(BEGIN + 0.2), b"two")])
    copy(server, tmp_path)
    server.logs[POD] = Log([(stamp(BEGIN), b"one"), (stamp(BEGIN + 0.1), b"late"), (stamp(BEGIN + 0.2), b"two")])
    copy(server, tmp_path)
    assert gaps_of(tmp_path) == [len(b"one\ntwo\n")]


def test_fewer_lines_than_were_copied_are_a_gap(server: KubeApi, tmp_path: Path) -> None:
    """All that the server still has was copied before, and lines behind it are gone."""
    server.logs[POD] = Log([(stamp(BEGIN), b"one"), (stamp(BEGIN), b"two"), (stamp(BEGIN), b"three")])
    copy(server, tmp_path)
    server.logs[POD] = Log([(stamp(BEGIN), b"three")])
    copy(server, tmp_path)
    assert gaps_of(tmp_path) == [len(b"one\ntwo\nthree\n")]
    assert copy_logs(tmp_path) == b"one\ntwo\nthree\n"


def test_as_many_lines_as_were_copied_are_no_gap(server: KubeApi, tmp_path: Path) -> None:
    server.logs[POD] = Log([(stamp(BEGIN), b"one"), (stamp(BEGIN), b"two")])
    for _ in range(2):
        copy(server, tmp_path)
    server.logs[POD].lines.append((stamp(BEGIN + 0.1), b"three"))
    copy(server, tmp_path)
    assert gaps_of(tmp_path) == []
    assert copy_logs(tmp_path) == b"one\ntwo\nthree\n"


@pytest.mark.parametrize("rotated", [False, True])
def test_whether_the_beginning_was_there_is_known_at_the_end(server: KubeApi, tmp_path: Path, rotated: bool) -> None:
    """Nobody had copied anything when the log was rotated: what is there now begins without the worker's first word."""
    began = [] if rotated else [b'@mlbench-worker {"worker":0,"began":1.5}']
    server.write(POD, *began, b"at work", SUMMARY.replace(b'"exit_code"', b'"told_begin":true,"exit_code"'))
    copy(server, tmp_path)
    position = read_position(position_file(tmp_path, 0))
    assert position is not None
    assert position.gaps == ([0] if rotated else [])
    assert copy_logs(tmp_path) == b"at work\n"


def test_samples_that_a_worker_tells_are_no_lines_of_its_log(server: KubeApi, tmp_path: Path) -> None:
    samples = [b'@mlbench-sample {"worker":0,"sample":{"rank":0,"time":%d}}' % number for number in range(5)]
    foreign = b'@mlbench-sample {"worker":1,"sample":{}}'
    server.write(POD, b"begun", foreign, b"without an end" + samples[0], *samples[1:3])
    copy(server, tmp_path)
    with open(samples_file(tmp_path, 0), "ab") as file:
        file.write(b"half a sam")  # killed before the note was written
    server.write(POD, *samples[3:], SUMMARY)
    copy(server, tmp_path)
    assert copy_logs(tmp_path) == b"begun\n" + foreign + b"\nwithout an end"
    printed = [json.loads(line)["time"] for line in samples_file(tmp_path, 0).read_text().splitlines()]
    assert printed == [0, 1, 2, 3, 4]


REFUSALS = (
    "unable to retrieve container logs for containerd://994394c2",
    "failed to create fsnotify watcher: too many open files",
    'failed to open log file "/var/log/pods/x/main/0.log": no such file or directory',
)


@pytest.mark.parametrize("words", REFUSALS)
def test_a_node_that_cannot_give_a_log_leaves_a_gap_and_no_line(
    server: KubeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    monkeypatch.setattr("mlbench_cli.engines.kubernetes.collector.REFUSED_SECONDS", 0.0)
    run = a_run(tmp_path, workers=1, kubernetes=KubernetesOptions(keep_seconds=0))
    submit(server, run)
    put_pod(server, 0, **terminated_pod(1))
    first, _, rest = words.partition(" ")
    server.logs["r-2-0-x"] = Log([(stamp(BEGIN), b"step 1"), (first, rest.encode())], ended=True)
    engine = KubernetesEngine(server.access)
    seen = engine.look(run)
    assert not any(words[:20] in str(finding.evidence.get("log")) for finding in seen.findings)
    fetched = engine.fetch(run)
    assert [line.text for line in engine.logs(run, 0)] == [b"step 1\n"]
    (gap,) = engine.log_gaps(run)
    assert gap.code == LOG_GAP
    assert words in gap.summary
    assert not any("contains the logs" in str(finding.hint) for finding in fetched.findings)


def test_a_running_containers_log_is_asked_for_again_after_the_node_refused_it(server: KubeApi, tmp_path: Path) -> None:
    server.logs[POD] = Log([(stamp(BEGIN), b"step 1"), ("failed", b"to create fsnotify watcher: too many open files")])
    with suppress(Exception):
        copy(server, tmp_path)
    server.logs[POD].lines[1:] = [(stamp(BEGIN + 1), b"step 2")]
    copy(server, tmp_path)
    assert copy_logs(tmp_path) == b"step 1\nstep 2\n"


def test_time_stamps_with_an_offset_lose_no_line_when_clocks_are_set_back(server: KubeApi, tmp_path: Path) -> None:
    """Of nodes whose container runtime writes local times: at 03:00 +02:00 it is 02:00 +01:00."""
    local = [f"2026-10-25T02:59:{second:02d}.000000000+02:00" for second in range(40, 60)]
    local += [f"2026-10-25T02:00:{second:02d}.000000000+01:00" for second in range(20)]
    for number, moment in enumerate(local):
        server.write(POD, b"line %d" % number, at=moment)
        if number % 7 == 0:
            copy(server, tmp_path)
    copy(server, tmp_path)
    assert copy_logs(tmp_path) == b"".join(b"line %d\n" % number for number in range(40))
    assert gaps_of(tmp_path) == []


def test_the_workers_last_word_is_taken_out(server: KubeApi, tmp_path: Path) -> None:
    server.write(POD, b"a", b'no summary: @mlbench-worker {"worker":7}', b"last, without an end" + SUMMARY, b"too late")
    copy(server, tmp_path)
    assert copy_logs(tmp_path) == b'a\nno summary: @mlbench-worker {"worker":7}\nlast, without an end'
    position = read_position(position_file(tmp_path, 0))
    assert position is not None
    assert position.summary == {"worker": 0, "exit_code": 3, "reason": "exited", "held": False}


def test_another_pod_of_the_worker_appends(server: KubeApi, tmp_path: Path) -> None:
    server.write(POD, b"one", at=stamp(BEGIN))
    copy(server, tmp_path)
    server.logs[POD] = Log([(stamp(BEGIN), b"again")])
    copy(server, tmp_path, uid="v")
    assert copy_logs(tmp_path) == b"one\nagain\n"


# --- all workers ----------------------------------------------------------------------------------------------------


class Cluster:
    """Pods whose state a test sets, as the collector sees them."""

    def __init__(self, server: KubeApi, workers: int) -> None:
        self.server, self.over = server, False
        self.pods = {index: self._pod(index, {"running": {"startedAt": "x"}}) for index in range(workers)}

    def _pod(self, index: int, state: dict[str, object]) -> dict[str, object]:
        name = f"r-{index}"
        self.server.put("pods", {"metadata": {"name": name, "labels": {}}})
        status = {"phase": "Running", "containerStatuses": [{"name": "main", "state": state}]}
        return {"metadata": {"name": name, "uid": str(index), "labels": {}}, "spec": {}, "status": status}

    def end(self, index: int) -> None:
        self.server.end_log(f"r-{index}")
        self.pods[index] = self._pod(index, {"terminated": {"exitCode": 0, "startedAt": "x"}})

    def collector(self, folder: Path) -> LogCollector:
        ranks = range(len(self.pods))
        return LogCollector(self.server.access, "default", folder, ranks, lambda: self.pods, lambda: self.over)


def test_all_logs_are_followed_to_their_ends(server: KubeApi, tmp_path: Path) -> None:
    cluster = Cluster(server, 5)
    collector = cluster.collector(tmp_path)
    collector.start()
    server.faults += [Fault("/log", times=7, cut=200), Fault("/log", times=2, status=500)]
    for number in range(50):
        for index in range(5):
            server.write(f"r-{index}", f"{index}: {number}".encode())
    for index in range(5):
        cluster.end(index)
    while not all(collector.complete(index) for index in range(5)):
        collector.wait(0.1)
    collector.close()
    for index in range(5):
        expected = [f"{index}: {number}" for number in range(50)]
        assert (tmp_path / f"logs/rank-{index}.log").read_text().splitlines() == expected


def test_one_process_copies_and_the_next_takes_over(server: KubeApi, tmp_path: Path) -> None:
    cluster = Cluster(server, 1)
    first, second = cluster.collector(tmp_path), cluster.collector(tmp_path)
    first.start()
    server.write("r-0", b"one")
    while not (tmp_path / "logs/rank-0.log").exists() or copy_logs(tmp_path) != b"one\n":
        first.wait(0.05)
    second.start()
    assert second.sweep([0]) is False
    first.close()
    server.write("r-0", b"two", SUMMARY)
    while second.summary(0) is None:
        second.wait(0.05)
    second.close()
    assert copy_logs(tmp_path) == b"one\ntwo\n"
    assert second.complete(0)
    assert first.complete(0)  # it reads what the other has noted


def test_a_pod_that_never_was_has_an_empty_log(server: KubeApi, tmp_path: Path) -> None:
    cluster = Cluster(server, 2)
    del cluster.pods[1]
    cluster.end(0)
    collector = LogCollector(server.access, "default", tmp_path, [0, 1], lambda: cluster.pods, lambda: cluster.over)
    collector.start()
    while not collector.complete(0):
        collector.wait(0.05)
    assert not collector.complete(1)
    cluster.over = True
    while not collector.complete(1):
        collector.wait(0.05)
    collector.close()


def test_missing_rights_end_the_copying(server: KubeApi, tmp_path: Path) -> None:
    server.faults.append(Fault("/log", times=100, status=403))
    collector = Cluster(server, 1).collector(tmp_path)
    collector.start()
    while collector.failure is None:
        collector.wait(0.05)
    collector.close()
    assert isinstance(collector.failure, ApiError)


def test_the_end_of_a_log(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"x" * 200_000 + b"\n" + b"".join(b"%d\n" % number for number in range(100)))
    assert last_lines(path, 3) == "97\n98\n99"
    assert last_lines(tmp_path / "none") == ""


def test_foreign_state_is_no_state(server: KubeApi, tmp_path: Path) -> None:
    server.write(POD, b"one")
    position_file(tmp_path, 0).parent.mkdir(parents=True)
    for text in ("", "[]", "{}}", '{"offset": 3, "unknown": 1}'):
        position_file(tmp_path, 0).write_text(text)
        copy(server, tmp_path)
        assert copy_logs(tmp_path) == b"one\n"


def test_an_api_error_goes_through(tmp_path: Path) -> None:
    with KubeApi() as server, closing(LogFile(tmp_path, 0, 0)) as log:
        api: Api = server.access.client()
        with pytest.raises(ApiError) as caught:
            Copying(api, "default").run("nobody", log, follow=False)
        assert caught.value.status == 404
