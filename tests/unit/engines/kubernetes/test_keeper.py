"""What a keeper has, and how long it is waited for."""

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlbench_cli.engines.kubernetes import keeper as keeping
from mlbench_cli.engines.kubernetes.fetch import HeldArchive
from mlbench_cli.engines.kubernetes.keeper import Keeper, KeptResults, KeptWorker, _parse, kept_file, why_gone
from mlbench_cli.kube.access import Access
from mlbench_cli.kube.api import AccessDenied, ApiError, NodeUnreachable
from mlbench_cli.kube.execute import Executed
from tests.unit.engines.kubernetes.memory_api import MemoryApi
from tests.unit.engines.kubernetes.test_worker_states import RUNNING, a_pod, ended, is_

INDEX = {
    "until": 1800.5,
    "workers": {
        "0": {
            "summary": {"exit_code": 0},
            "archive": {"size": 7, "sha256": "aa"},
            "log": {"size": "8", "sha256": "bb", "truncated": True},
            "samples": {"size": 9, "sha256": "cc"},
        },
        "3": {},
    },
}
RESULTS = KeptResults(
    "k",
    1800.5,
    {
        0: KeptWorker({"exit_code": 0}, HeldArchive(7, "aa"), HeldArchive(8, "bb"), HeldArchive(9, "cc"), True),
        3: KeptWorker({}),
    },
)


def test_the_index_of_a_keeper() -> None:
    assert _parse("k", json.dumps(INDEX).encode()) == RESULTS
    assert _parse("k", b'{"until": null, "workers": {}}') == KeptResults("k", None, {})
    assert _parse("k", b'{"until": 1, "workers": {"0": {"summary": 3}}}') == KeptResults("k", 1.0, {0: KeptWorker({})})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b'{"until": 1}',
        b'{"workers": {}}',
        b'{"until": "x", "workers": {}}',
        b'{"until": 1, "workers": {"x": {}}}',
        b'{"until": 1, "workers": {"0": 3}}',
        b'{"until": 1, "workers": {"0": {"archive": {"size": 7}}}}',
    ],
)
def test_a_damaged_index_is_none(data: bytes) -> None:
    assert _parse("k", data) is None


def test_files_of_a_keeper_are_in_folders_of_workers() -> None:
    assert kept_file(3, "log") == "/results/3/log"


# --- asking ----------------------------------------------------------------------------------------------------------

SILENT = a_pod(RUNNING, conditions=(is_("Ready", "False"),), uid="u")


class Lab:
    """A keeper whose pods and answers are played; `now` moves only by sleeping."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *pods: dict[str, Any], is_lost: bool = False) -> None:
        self.now, self.asked = 1000.0, 0
        self.list = list(pods)
        self.answer: Callable[[], Executed] = lambda: Executed(0, json.dumps(INDEX).encode(), "")
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep)
        monkeypatch.setattr(keeping, "time", clock)
        monkeypatch.setattr(keeping, "list_pods", lambda api, namespace, selector: self.list)
        monkeypatch.setattr(keeping, "execute", self.execute)
        self.api = MemoryApi()
        self.keeper = Keeper(cast(Access, None), self.api.api, "team", "x-2", is_lost=is_lost)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def execute(self, *_: Any) -> Executed:
        self.asked += 1
        return self.answer()

    def fail(self, error: ApiError) -> None:
        def answer() -> Executed:
            raise error

        self.answer = answer


def test_the_running_keeper_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    old = a_pod(ended(1), "Failed", creationTimestamp="2026")
    lab = Lab(monkeypatch, a_pod(RUNNING, creationTimestamp="2027"), old)
    found = lab.keeper.read()
    assert found is not None
    assert (found.pod, found.workers) == ("x", RESULTS.workers)
    assert [pod["metadata"]["creationTimestamp"] for pod in lab.keeper.pods()] == ["2026", "2027"]


@pytest.mark.parametrize("pods", [[], [a_pod(ended(0), "Succeeded")], [a_pod(None, "Pending")]])
def test_a_keeper_that_does_not_run_has_nothing(monkeypatch: pytest.MonkeyPatch, pods: list[dict[str, Any]]) -> None:
    lab = Lab(monkeypatch, *pods)
    assert (lab.keeper.read(), lab.asked, lab.keeper.is_given_up) == (None, 0, False)


def test_an_answer_is_good_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(monkeypatch, a_pod(RUNNING))
    lab.keeper.read()
    lab.now += 0.3
    lab.keeper.read()
    assert lab.asked == 1
    lab.now += 0.01
    lab.keeper.read()
    assert lab.asked == 2
    lab.keeper.read(after=lab.now)
    assert lab.asked == 2
    lab.keeper.read(after=lab.now + 1)
    assert lab.asked == 3


def test_a_keeper_that_has_no_index_yet_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(monkeypatch, a_pod(RUNNING))
    lab.answer = lambda: Executed(*((1, b"", "no file") if lab.now < 1005 else (0, json.dumps(INDEX).encode(), "")))
    assert lab.keeper.read() is not None
    assert lab.now == 1005.0


@pytest.mark.parametrize(("patience", "seconds"), [(60.0, 60.0), (2.0, 2.0), (0.0, 0.0)])
def test_a_keeper_that_does_not_answer_is_an_error_after_a_while(
    monkeypatch: pytest.MonkeyPatch, patience: float, seconds: float
) -> None:
    lab = Lab(monkeypatch, a_pod(RUNNING))
    lab.answer = lambda: Executed(1, b"", "")
    with pytest.raises(ApiError, match="The keeper x does not list its contents: no index"):
        lab.keeper.read(patience=patience)
    assert lab.now == 1000.0 + seconds


def test_a_credential_that_is_rejected_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(monkeypatch, a_pod(RUNNING))
    lab.fail(AccessDenied("forbidden", status=403))
    with pytest.raises(AccessDenied):
        lab.keeper.read()
    assert lab.now == 1000.0


@pytest.mark.parametrize(("is_lost", "seconds"), [(False, 600.0), (True, 30.0)])
def test_a_silent_node_is_given_up_after_a_while_and_not_asked_again(
    monkeypatch: pytest.MonkeyPatch, is_lost: bool, seconds: float
) -> None:
    lab = Lab(monkeypatch, SILENT, is_lost=is_lost)
    lab.fail(NodeUnreachable("silent"))
    assert lab.keeper.read() is None
    assert (lab.now, lab.keeper.is_given_up) == (1000.0 + seconds, True)
    before = lab.asked
    assert lab.keeper.read(after=lab.now + 1) is None
    assert lab.asked == before


def test_a_look_does_not_wait_for_a_silent_node(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(monkeypatch, SILENT)
    with pytest.raises(NodeUnreachable, match="The node of the keeper x is not responding"):
        lab.keeper.read(patience=0)
    assert (lab.asked, lab.now, lab.keeper.is_given_up) == (0, 1000.0, False)


def test_a_keeper_is_let_go_with_its_job(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(monkeypatch)
    lab.keeper.release()
    assert lab.api.writes == ["DELETE /apis/batch/v1/namespaces/team/jobs/x-2-keeper"]


@pytest.mark.parametrize(
    ("pods", "words"),
    [
        ([], "its pod is gone"),
        ([a_pod(None, "Pending"), SILENT], "its node n1 does not answer"),
        ([a_pod(ended(0, message="its time is up."), "Succeeded")], "its time is up"),
        ([a_pod(ended(0), "Succeeded")], "it had expired"),
        ([a_pod(ended(137, "OOMKilled"), "Failed")], "OOMKilled"),
        ([a_pod(None, "Failed", status={"reason": "Evicted", "message": "disk full"})], "Evicted: disk full"),
        ([a_pod(None, "Pending")], "Pending"),
        ([{"metadata": {}}], "unknown"),
    ],
)
def test_how_a_keeper_ended(pods: list[dict[str, Any]], words: str) -> None:
    assert why_gone(pods) == words
