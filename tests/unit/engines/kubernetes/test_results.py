"""Where a worker's output is fetched from, and what is said of output that is lost."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlbench_cli.engines.fetch import FetchError
from mlbench_cli.engines.kubernetes import results as fetching
from mlbench_cli.engines.kubernetes.fetch import HeldArchive
from mlbench_cli.engines.kubernetes.follower import RunFollower
from mlbench_cli.engines.kubernetes.keeper import KeptResults, KeptWorker
from mlbench_cli.engines.kubernetes.logs import LogFile, samples_file
from mlbench_cli.engines.kubernetes.results import Results, Source, _hands_over, is_fetched
from mlbench_cli.kube.access import Access
from mlbench_cli.kube.api import ApiError, NodeUnreachable
from mlbench_cli.model.run import Run
from mlbench_cli.model.spec import KubernetesOptions, RunSpec
from tests.unit.engines.kubernetes.memory_api import MemoryApi
from tests.unit.engines.kubernetes.test_worker_states import RUNNING, a_pod, ended

ARCHIVE = HeldArchive(7, "aa")
HELD = {"exit_code": 0, "held": True, "archive": {"size": 7, "sha256": "aa"}}
JOB = "/apis/batch/v1/namespaces/team/jobs/x-2"


class Lab:
    """Results of a run with two workers; `words` are what workers say in their own files, `now` moves by sleeping."""

    def __init__(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        *,
        pods: dict[int, Any] | None = None,
        said: dict[int, Any] | None = None,
        words: dict[str, Any] | None = None,
        kept: KeptResults | None = None,
        has_keeper: bool = True,
        **spec: Any,
    ) -> None:
        self.now, self.stops = 1000.0, 0
        self.words = words or {}
        self.api = MemoryApi({JOB: {"metadata": {"name": "x-2"}}})
        self.acknowledged: list[str] = []
        self.released = 0
        names = ("x-2", "c", "kubernetes", "custom", "custom", ("true",), "gloo", 2)
        self.run = Run("abc", RunSpec(*names, **spec), folder, "2027")
        self.said, self.pods = said or {}, pods or {}
        collector = SimpleNamespace(summary=self.said.get, complete=lambda worker: False, failure=None, gaps={})
        following = SimpleNamespace(pods=lambda: self.pods, summaries=lambda: self.said, collector=collector)
        self.keeper = SimpleNamespace(read=lambda after=None: kept, is_given_up=False, pods=list, release=self.release)
        monkeypatch.setattr(fetching, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep))
        monkeypatch.setattr(fetching, "read_summary", self.read_summary)
        monkeypatch.setattr(fetching, "acknowledge", lambda access, namespace, pod: self.acknowledged.append(pod))
        self.results = Results(
            cast(Access, None),
            self.api.api,
            "team",
            self.run,
            cast(RunFollower, following),
            cast(Any, self.keeper) if has_keeper else None,
            self.stop,
        )

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def stop(self) -> None:
        self.stops += 1

    def release(self) -> None:
        self.released += 1

    def read_summary(self, access: Any, namespace: str, pod: str) -> Any:
        found = self.words.get(pod)
        if isinstance(found, Exception):
            raise found
        return found() if callable(found) else found

    def codes(self) -> list[str]:
        return [finding.code for finding in self.results._findings]


def pod(state: Any = RUNNING, phase: str = "Running", name: str = "p0", **more: Any) -> dict[str, Any]:
    found = a_pod(state, phase, **more)
    found["metadata"]["name"] = name
    return found


DONE = pod(ended(0), "Succeeded")
KEPT = KeptResults("k", None, {0: KeptWorker(HELD, ARCHIVE)})

# --- where an archive is ---------------------------------------------------------------------------------------------


def test_the_keeper_goes_before_the_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(tmp_path, monkeypatch, pods={0: pod()}, words={"p0": HELD}, kept=KEPT)
    assert lab.results._find_source(0) == Source("k", "/results/0/archive.tar", ARCHIVE)
    gone = Lab(tmp_path, monkeypatch, kept=KEPT)
    assert gone.results._find_source(0) == Source("k", "/results/0/archive.tar", ARCHIVE)


def test_a_worker_that_holds_is_fetched_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(tmp_path, monkeypatch, pods={0: pod()}, said={0: HELD}, has_keeper=False)
    assert lab.results._find_source(0) == Source("p0", "/results/archive.tar", ARCHIVE)
    silent = {**HELD, "archive": None}
    nothing = Lab(tmp_path, monkeypatch, pods={0: pod()}, words={"p0": silent}, has_keeper=False)
    assert nothing.results._find_source(0) == Source("p0", "/results/archive.tar", None)


@pytest.mark.parametrize("pods", [{}, {0: DONE}, {0: pod(gone=True)}])
def test_a_worker_that_is_gone_has_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pods: Any) -> None:
    lab = Lab(tmp_path, monkeypatch, pods=pods, said={0: HELD}, has_keeper=False)
    assert (lab.results._find_source(0), lab.now) == (None, 1000.0)


def test_a_worker_that_hands_over_to_the_keeper_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = KeptResults("k", None, {})
    lab = Lab(tmp_path, monkeypatch, pods={0: pod()}, words={"p0": HELD}, kept=empty)
    assert lab.results._find_source(0) == Source("p0", "/results/archive.tar", ARCHIVE)
    assert 1060.0 < lab.now < 1061.0
    failed = {**HELD, "handover": "rejected"}
    lab = Lab(tmp_path, monkeypatch, pods={0: pod()}, words={"p0": failed}, kept=empty)
    lab.results._find_source(0)
    assert lab.now == 1000.0


@pytest.mark.parametrize(
    ("summary", "seconds", "waits"),
    [
        ({}, -0.1, True),
        ({}, 0.0, False),
        ({"handover": "kept"}, -0.1, True),
        ({"handover": "rejected"}, -9.0, False),
        ({"held": True, "archive": {"size": 20 << 20, "sha256": "a"}}, 9.9, True),  # 2 MiB a second
        ({"held": True, "archive": {"size": 20 << 20, "sha256": "a"}}, 10.0, False),
    ],
)
def test_a_handover_may_take_as_long_as_its_size_allows(
    monkeypatch: pytest.MonkeyPatch, summary: dict[str, Any], seconds: float, waits: bool
) -> None:
    monkeypatch.setattr(fetching, "time", SimpleNamespace(monotonic=lambda: 1000.0 + seconds))
    assert _hands_over(summary, 1000.0) is waits


def test_a_worker_that_is_being_stopped_has_a_minute_to_pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(tmp_path, monkeypatch, pods={0: pod()}, has_keeper=False)
    assert (lab.results._find_source(0), lab.now) == (None, 1000.0)
    lab.results._stopping = True
    assert lab.results._find_source(0) is None
    assert 1060.0 < lab.now < 1061.0


def test_a_worker_that_has_spoken_and_cannot_be_reached_is_tried_for_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = Lab(tmp_path, monkeypatch, pods={0: pod()}, said={0: HELD}, words={"p0": ApiError("away", status=500)})
    assert lab.results._find_source(0) is None
    assert 1060.0 < lab.now < 1061.0


@pytest.mark.parametrize("other", [HeldArchive(8, "aa"), HeldArchive(7, "bb"), None])
def test_a_copy_that_is_not_what_the_worker_packed_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: HeldArchive | None
) -> None:
    kept = KeptResults("k", None, {0: KeptWorker(HELD, other)})
    lab = Lab(tmp_path, monkeypatch, said={0: HELD}, kept=kept)
    assert lab.results._find_source(0) is None
    (finding,) = lab.results._findings
    assert finding.code == "results_replaced"
    assert finding.evidence == {"worker": 0, "packed": "aa", "kept": other and other.sha256}
    message = json.dumps(HELD)
    lab = Lab(tmp_path, monkeypatch, pods={0: pod(ended(0, message=message))}, kept=kept)
    assert lab.results._find_source(0) is None
    assert (lab.results._missing(0), lab.codes()) == (None, ["results_replaced"])  # which says why it is missing


# --- what is lost ----------------------------------------------------------------------------------------------------


def test_a_worker_that_never_ran_has_lost_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(tmp_path, monkeypatch, pods={0: pod(None, "Pending")})
    assert (lab.results._missing(0), lab.results._missing(1), lab.codes()) == ((0, 0), (0, 0), [])


def test_a_worker_is_known_to_have_run_by_its_pod_or_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = LogFile(tmp_path, 1, 1)
    log.take("2027-01-15T08:00:05Z", b"x")
    log.save()
    log.close()
    lab = Lab(tmp_path, monkeypatch, pods={0: DONE})
    assert (lab.results._missing(0), lab.results._missing(1)) == (None, None)
    assert lab.codes() == ["results_lost", "results_lost"]
    plain = Lab(tmp_path, monkeypatch, pods={0: DONE}, has_keeper=False)
    assert (plain.results._missing(0), plain.codes()) == (None, [])


@pytest.mark.parametrize(
    ("said", "is_given_up", "words"),
    [
        ({"handover": "kept"}, False, "The keeper lost the output of worker 0: its pod is gone."),
        ({}, True, "The output of worker 0 cannot be reached: its pod is gone."),
        ({"handover": "rejected"}, False, "Worker 0 could not hand over its output (rejected), and has ended."),
        ({"exit_code": 3}, False, "Worker 0 could not hand over its output (it was stopped), and has ended."),
        ({}, False, "Worker 0 ended without packing its output."),
    ],
)
def test_why_output_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: dict[str, Any], is_given_up: bool, words: str
) -> None:
    lab = Lab(tmp_path, monkeypatch, pods={0: DONE}, said={0: said})
    lab.keeper.is_given_up = is_given_up
    assert lab.results._missing(0) is None
    (finding,) = lab.results._findings
    assert (finding.summary, finding.evidence) == (words, {"worker": 0, "handover": said.get("handover"), "keeper": []})


# --- stopping and letting go -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pods", "said", "spec", "stopping", "stops"),
    [
        ({0: DONE, 1: DONE}, {}, {}, False, 0),
        ({0: pod(), 1: DONE}, {0: HELD}, {}, False, 0),
        ({0: pod(), 1: DONE}, {}, {}, True, 1),
        ({0: pod(), 1: pod(ended(3), "Failed")}, {}, {}, True, 0),  # the Job controller stops it
        ({0: pod(), 1: pod()}, {1: {**HELD, "exit_code": 3}}, {}, True, 0),
        ({0: pod(), 1: pod()}, {0: HELD}, {"run_on_all": False}, False, 0),  # the other only waits
        ({0: pod(), 1: pod()}, {}, {"run_on_all": False}, True, 1),
    ],
)
def test_workers_that_would_run_for_ever_are_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pods: Any, said: Any, spec: Any, stopping: bool, stops: int
) -> None:
    lab = Lab(tmp_path, monkeypatch, pods=pods, said=said, **spec)
    assert (lab.results._stop_those_who_wait(), lab.stops) == (stopping, stops)


def test_workers_and_keeper_are_let_go_when_the_cluster_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pods = {0: pod(), 1: pod(name="p1")}
    lab = Lab(tmp_path, monkeypatch, pods=pods, said={0: HELD, 1: HELD})
    lab.results._release()
    assert "mlbench/fetched" in lab.api.objects[JOB]["metadata"]["annotations"]
    assert (lab.acknowledged, lab.released) == (["p0"], 1)
    every = Lab(tmp_path, monkeypatch, pods=pods, said={0: HELD}, kubernetes=KubernetesOptions(collect="all"))
    every.results._release()
    assert every.acknowledged == ["p0"]  # the other has not spoken
    gone = Lab(tmp_path, monkeypatch, pods={0: DONE}, said={0: HELD})
    gone.results._release()
    assert (gone.acknowledged, gone.released) == ([], 1)


def test_results_are_fetched_when_those_of_all_holders_are(tmp_path: Path) -> None:
    names = ("x-2", "c", "kubernetes", "custom", "custom", ("true",), "gloo", 2)
    one = Run("abc", RunSpec(*names), tmp_path, "2027")
    both = Run("abc", RunSpec(*names, kubernetes=KubernetesOptions(collect="all")), tmp_path, "2027")
    (tmp_path / ".state").mkdir()
    assert not is_fetched(one)
    (tmp_path / ".state" / "fetched-0.json").touch()
    assert (is_fetched(one), is_fetched(both)) == (True, False)
    (tmp_path / ".state" / "fetched-1.json").touch()
    assert is_fetched(both)


def test_samples_of_resources_are_those_fetched_or_those_in_the_log_or_the_last_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".state").mkdir()
    lab = Lab(tmp_path, monkeypatch, said={1: {"resources": {"cpu": 3}}})
    (tmp_path / ".state" / "resources-0.jsonl").write_text('{"cpu":1}\n{"cpu":2}\n')
    samples_file(tmp_path, 0).write_text('{"no":1}\n')
    lab.results._write_resources()
    assert (tmp_path / "resources.jsonl").read_text() == '{"cpu":1}\n{"cpu":2}\n{"cpu":3}\n'
    samples_file(tmp_path, 1).write_text('{"told":1}\n')
    lab.results._write_resources()
    assert (tmp_path / "resources.jsonl").read_text() == '{"cpu":1}\n{"cpu":2}\n{"told":1}\n'
    empty = tmp_path / "empty"
    empty.mkdir()
    Lab(empty, monkeypatch, said={0: {"resources": "much"}}).results._write_resources()
    assert not (empty / "resources.jsonl").exists()


# --- a whole fetch ---------------------------------------------------------------------------------------------------


class Whole(Lab):
    """Results that are downloaded in memory: `files` by pod and path, and what was taken of logs."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        super().__init__(folder, monkeypatch, **options)
        self.installed: list[tuple[int, bytes, bool, Any]] = []
        self.downloads: list[tuple[str, str]] = []
        self.errors: list[Exception] = []
        self.complete: set[int] = {0, 1}
        self.gaps: dict[int, list[int]] = {}
        self.waits = 0
        collector = self.results._following.collector
        collector.complete = lambda worker: worker in self.complete  # type: ignore[method-assign]
        collector.install = self.install  # type: ignore[method-assign]
        collector.wait = self.wait  # type: ignore[method-assign]
        monkeypatch.setattr(collector, "gaps", self.gaps)
        watch = SimpleNamespace(wait=lambda version, seconds: self.sleep(0.0))
        monkeypatch.setattr(self.results._following, "watch", watch, raising=False)
        monkeypatch.setattr(fetching, "download", self.download)
        monkeypatch.setattr("mlbench_cli.engines.fetch.unpack", self.unpack)
        (folder / ".state").mkdir(exist_ok=True)

    def wait(self, seconds: float) -> None:
        self.waits += 1
        self.now += 10.0

    def install(self, worker: int, part: Path, truncated: bool, summary: Any) -> bool:
        self.installed.append((worker, part.read_bytes(), truncated, summary))
        return True

    def download(self, access: Any, namespace: str, pod: str, what: HeldArchive, part: Path, path: str) -> None:
        self.downloads.append((pod, path))
        if self.errors:
            raise self.errors.pop(0)
        part.write_bytes(f"{pod}{path}".encode())

    def unpack(self, part: Path, folder: Path, split: Any, resources: Path, *, marker: Path, first: bool) -> Any:
        assert (resources.name, marker.name) == (
            f"resources-{0 if first else 1}.jsonl",
            f"fetched-{0 if first else 1}.json",
        )
        marker.write_text('{"files": 2, "bytes": 30}')
        return 2, 30


def test_what_all_holders_have_is_fetched_and_then_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every = KubernetesOptions(collect="all")
    pods = {0: pod(), 1: pod(name="p1")}
    said = {0: {**HELD, "resources": {"cpu": 1}}, 1: HELD}
    lab = Whole(tmp_path, monkeypatch, pods=pods, said=said, has_keeper=False, kubernetes=every)
    found = lab.results.fetch()
    assert (tmp_path / "resources.jsonl").read_text() == '{"cpu":1}\n'
    assert (found.files, found.bytes, found.complete, found.findings) == (4, 60, True, ())
    assert sorted(lab.downloads) == [("p0", "/results/archive.tar"), ("p1", "/results/archive.tar")]
    assert sorted(lab.acknowledged) == ["p0", "p1"]
    again = lab.results.fetch()
    assert (again.files, len(lab.downloads)) == (4, 2)  # it is here already


@pytest.mark.parametrize(
    "error", [ApiError("ended", status=400), ApiError("gone", status=404), NodeUnreachable("silent")]
)
def test_a_worker_that_hands_over_while_it_is_fetched_from_is_looked_for_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: ApiError
) -> None:
    lab = Whole(tmp_path, monkeypatch, pods={0: pod()}, said={0: HELD}, has_keeper=False)
    lab.errors = [error]
    assert lab.results.fetch().files == 2
    other = tmp_path / "other"
    other.mkdir()
    twice = Whole(other, monkeypatch, pods={0: pod()}, said={0: HELD}, has_keeper=False)
    twice.errors = [error, error]
    found = twice.results.fetch()
    assert (found.files, found.complete, len(twice.downloads)) == (0, False, 2)


def test_other_errors_end_the_fetch_before_anything_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Whole(tmp_path, monkeypatch, pods={0: pod()}, said={0: HELD}, has_keeper=False)
    lab.errors = [ApiError("busy", status=500)]
    with pytest.raises(ApiError, match="busy"):
        lab.results.fetch()
    assert (lab.acknowledged, lab.api.writes) == ([], [])


def test_logs_that_do_not_come_in_time_are_gaps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Whole(tmp_path, monkeypatch, pods={0: pod()}, said={0: HELD}, has_keeper=False)
    lab.complete, lab.gaps[0] = {0}, [7]
    (finding,) = lab.results.fetch().findings
    assert finding.evidence == {"missing_before_byte": {"logs/rank-0.log": [7]}, "unfinished": ["logs/rank-1.log"]}
    assert lab.waits == 9  # a minute of grace and half a minute more, ten seconds each


LOG = HeldArchive(20, "1111111111111111ff")
SAMPLES = HeldArchive(5, "2222222222222222ff")


@pytest.mark.parametrize(
    ("complete", "local", "is_taken"), [(set(), 20, True), ({0, 1}, 19, True), ({0, 1}, 20, False)]
)
def test_logs_of_the_keeper_take_the_place_of_shorter_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, complete: set[int], local: int, is_taken: bool
) -> None:
    kept = KeptResults("k", None, {0: KeptWorker(HELD, ARCHIVE, LOG, SAMPLES, True), 9: KeptWorker({}, None, LOG)})
    lab = Whole(tmp_path, monkeypatch, pods={0: DONE}, said={0: HELD}, kept=kept)
    lab.complete = complete
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-0.log").write_bytes(b"x" * local)
    lab.results._take_kept_logs()
    assert lab.installed == ([(0, b"k/results/0/log", True, HELD)] if is_taken else [])
    assert (tmp_path / ".state" / "resources-0.jsonl").exists() is is_taken
    assert ("k", "/results/0/resources.jsonl") in lab.downloads or not is_taken
    lab.results._take_kept_logs()
    assert lab.downloads.count(("k", "/results/0/resources.jsonl")) == int(is_taken)


def test_a_log_that_another_client_copies_is_left_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = KeptResults("k", None, {0: KeptWorker(HELD, ARCHIVE, LOG)})
    lab = Whole(tmp_path, monkeypatch, kept=kept)
    monkeypatch.setattr(lab.results._following.collector, "install", lambda *_: False)
    with pytest.raises(FetchError, match="Another client is copying the logs"):
        lab.results._take_kept_logs()
    lab.errors = [ApiError("gone", status=404)]
    lab.results._take_kept_logs()  # what the node gave stays
    lab.errors = [ApiError("busy", status=500)]
    with pytest.raises(ApiError, match="busy"):
        lab.results._take_kept_logs()
