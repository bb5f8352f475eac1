"""Options of faults and restarts: what they become in the spec, and which runs cannot have them."""

import sys
from dataclasses import replace
from typing import Any

import pytest

from mlbench_cli.config.settings import data_dir
from mlbench_cli.errors import UsageError
from mlbench_cli.model.spec import RunSpec
from mlbench_cli.runs import fault_options
from mlbench_cli.runs.fault_options import check_faults, resolve_faults
from mlbench_cli.runs.request import Request

SPEC = RunSpec(*("x-4", "c", "local", "digits_resnet", "spec", ("python",), "gloo", 4), parameters={"batch_size": 12})


def refusal(**changes: Any) -> UsageError:
    with pytest.raises(UsageError) as caught:
        check_faults(replace(SPEC, **changes))
    return caught.value


# --- what the spec says ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({}, {}),
        ({"on_failure": "fail"}, {}),
        ({"checkpoint_copy": "disk"}, {}),
        ({"checkpoint_copy": "peer"}, {"checkpoint_copy": "peer"}),
        ({"faults": "AT 1m  kill rank 1 # comment"}, {"faults": "at 60s kill rank 1"}),
        ({"on_failure": "restart"}, {"on_failure": "restart", "checkpoint_every": "60s"}),
        ({"on_failure": "shrink", "checkpoint_every": "90s"}, {"on_failure": "shrink", "checkpoint_every": "90s"}),
        ({"on_failure": "replace", "checkpoint_every": "7"}, {"on_failure": "replace", "checkpoint_every": "7"}),
        ({"detect": "1s"}, {"detect_seconds": 1.0}),
        ({"detect": "1.5m"}, {"detect_seconds": 90.0}),
    ],
)
def test_only_options_that_change_a_run_get_into_its_spec(options: dict[str, str], fields: dict[str, object]) -> None:
    assert resolve_faults(Request(**options)) == fields  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("faults", "interval"),
    [
        # Daly 2006, eq. 37, worked out by hand for checkpoints that take 50 ms.
        ("every ~600s kill any rank", "7.7s"),
        ("every 60s kill any rank", "2.4s"),
        ("every 120s kill rank 0; every 120s kill rank 1", "2.4s"),  # together every 60 s
        ("every 1s kill any rank", "1s"),  # not below a second
        ("at 60s kill rank 1", "60s"),  # a fault that does not repeat has no mean time between faults
        ("every 60s for 5s stop rank 1", "60s"),  # the rank survives
    ],
)
def test_checkpoints_are_as_frequent_as_the_faults_require(faults: str, interval: str) -> None:
    assert resolve_faults(Request(faults=faults, on_failure="restart"))["checkpoint_every"] == interval


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"on_failure": "retry"}, 'There is no --on-failure "retry", only fail, restart, replace, shrink.'),
        ({"checkpoint_copy": "s3"}, 'There is no --checkpoint-copy "s3", only disk, peer.'),
        ({"checkpoint_every": "30s"}, "--checkpoint-every needs --on-failure restart, replace or shrink."),
        ({"checkpoint_every": "soon", "on_failure": "restart"}, '"soon" is neither a time nor a number of updates.'),
        ({"detect": "0.9s"}, "--detect 0.9s: the minimum is 1 s."),
        ({"faults": "at 60s kil rank 1"}, 'Did you mean "kill"?'),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve_faults(Request(**options))  # type: ignore[arg-type]
    assert words in caught.value.message


# --- which runs can have them ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"run_on_all": False},  # without faults it does not matter who starts the ranks
        {"faults": "at 60s kill rank 3"},
        {"faults": "at 60s for 20s stop rank 1"},
        {"faults": "at 60s stop rank 1", "detect_seconds": 10.0},
        {"faults": "at 60s for 20s link 3 down", "network": "1gbit"},
        {"faults": "at 60s node 1 gone"},  # the run fails, as asked
        {"faults": "at 60s node 1 gone", "on_failure": "restart"},  # on this machine, a node is not really gone
        {"faults": "at 60s node 1 gone", "on_failure": "shrink", "engine": "hosts"},
        {"faults": "at 60s kill rank 1", "on_failure": "restart", "engine": "kubernetes"},
        {"faults": "at 60s for 20s slow storage of rank 1 to 5MB/s", "engine": "hosts"},
        {"on_failure": "restart"},
        {"on_failure": "restart", "preset": "custom", "backend": "mpi"},
        {"on_failure": "replace"},
        {"on_failure": "shrink"},
        {"on_failure": "shrink", "workers": 2},
        {"on_failure": "shrink", "checkpoint_copy": "peer", "engine": "hosts"},
        {"on_failure": "shrink", "checkpoint_copy": "peer", "engine": "slurm"},
        {"on_failure": "restart", "processes_per_worker": 2},
        {"on_failure": "restart", "parameters": {"blocks": 0, "resume": ""}},
    ],
)
def test_runs_that_can_have_their_faults(changes: dict[str, Any]) -> None:
    check_faults(replace(SPEC, **changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"faults": "at 60s kill rank 4"}, "there is no rank 4; the run has 4, from 0 to 3."),
        ({"faults": "at 60s link 4 down", "network": "1gbit"}, "there is no link 4; the run has 4"),
        ({"faults": "at 60s link 1 down"}, "link faults need a shaped network"),
        ({"faults": "at 60s link 1 down", "network": "model:1gbit"}, "link faults need a shaped network"),
        ({"faults": "at 60s link 0 down", "network": "1gbit", "workers": 1}, "link faults need a shaped network"),
        ({"faults": "at 60s link 1 down", "network": "1gbit", "engine": "kubernetes"}, "pods have no right"),
        ({"faults": "at 60s slow storage of rank 1 to 5MB/s", "engine": "kubernetes"}, "pods have no right"),
        ({"faults": "at 60s stop rank 1"}, '"at 60s stop rank 1": the rank would stay stopped'),
        ({"faults": "at 9s for 1s stop rank 0; at 60s stop rank 1"}, '"at 60s stop rank 1": the rank would stay'),
        ({"faults": "at 60s kill rank 1", "run_on_all": False}, "--faults: mlbench starts only rank 0"),
        ({"on_failure": "restart", "run_on_all": False}, "--on-failure: mlbench starts only rank 0"),
        ({"detect_seconds": 9.0, "run_on_all": False}, "--detect: mlbench starts only rank 0"),
        ({"on_failure": "restart", "method": {"name": "ps", "servers": "1"}}, "the method ps has parameter servers"),
        ({"on_failure": "restart", "parameters": {"blocks": 3}}, "throughput runs write no checkpoints"),
        ({"on_failure": "restart", "parameters": {"resume": "/x"}}, "--set resume exclude each other"),
        ({"on_failure": "replace", "backend": "mpi"}, "with --backend mpi, a rank that loses another one ends"),
        ({"on_failure": "replace", "preset": "custom"}, "with your own command, a rank that loses another one ends"),
        ({"on_failure": "shrink", "processes_per_worker": 2}, "needs one process per worker"),
        ({"on_failure": "shrink", "parameters": {}}, "the parameter batch_size, which this run does not have"),
        ({"on_failure": "shrink", "parameters": {"batch_size": 1.5}}, "which this run does not have"),
        ({"on_failure": "shrink", "preset": "open"}, "which this run does not have"),
        ({"on_failure": "shrink", "workers": 1}, "a global batch of 12 samples cannot be divided evenly among 0"),
        ({"on_failure": "shrink", "parameters": {"batch_size": 5}}, "a global batch of 20 samples cannot be divided"),
        ({"faults": "at 9s node 1 gone", "on_failure": "restart", "engine": "hosts"}, "there is no spare machine"),
        ({"faults": "at 9s node 1 gone", "on_failure": "restart", "engine": "kubernetes"}, "its Job fails"),
        ({"faults": "at 9s node any gone", "on_failure": "shrink", "engine": "hosts"}, "a node is gone only once"),
        ({"faults": "every 9m node 1 gone", "on_failure": "shrink", "engine": "hosts"}, "a node is gone only once"),
        ({"checkpoint_copy": "peer"}, "needs --on-failure shrink"),
        ({"on_failure": "shrink", "checkpoint_copy": "peer"}, "this machine has no peer"),
        ({"on_failure": "shrink", "checkpoint_copy": "peer", "engine": "kubernetes"}, "a pod that is lost ends"),
    ],
)
def test_runs_that_cannot_have_their_faults(changes: dict[str, Any], words: str) -> None:
    assert words in refusal(**changes).message


@pytest.mark.parametrize("workers", [3, 4, 5, 6])
def test_the_hinted_batch_size_can_be_divided_among_any_number_of_workers(workers: int) -> None:
    error = refusal(on_failure="shrink", workers=workers, parameters={"batch_size": 1})
    batch = int((error.hint or "").partition("batch_size=")[2].partition(",")[0])
    assert all(batch * workers % left == 0 for left in range(1, workers))
    check_faults(replace(SPEC, on_failure="shrink", workers=workers, parameters={"batch_size": batch}))


def test_a_run_that_would_hardly_reach_a_checkpoint_is_refused_with_its_odds() -> None:
    """Of attempts that need 10 s, one in ten survives if faults come every 10 / ln 10 = 4.343 s."""
    often = {"on_failure": "restart", "checkpoint_every": "5.95s"}
    check_faults(replace(SPEC, faults="every 4.35s kill any rank", **often))  # type: ignore[arg-type]
    error = refusal(faults="every 4.34s kill any rank", **often)
    assert "a fault every 4.34 s on average, and 9.95 s from a start to the first checkpoint" in error.message
    assert "it takes 10 attempts" in error.message
    refusal(faults="every 2.17s kill any rank; every 60s for 5s stop rank 1", **often)


@pytest.mark.parametrize(
    "changes",
    [
        {"faults": "every 1s kill any rank; anyway", "checkpoint_every": "60s"},
        {"faults": "every 1s kill any rank", "checkpoint_every": "200"},  # updates, whose duration is not known
        {"faults": "at 1s kill rank 1", "checkpoint_every": "60s"},
        {"faults": "every 1s for 1s stop rank 1", "checkpoint_every": "60s"},
    ],
)
def test_the_odds_of_a_run_do_not_matter_if_they_are_accepted_or_unknown(changes: dict[str, str]) -> None:
    check_faults(replace(SPEC, on_failure="restart", **changes))  # type: ignore[arg-type]


def test_checkpoints_every_minute_are_assumed_unless_a_spec_says_otherwise() -> None:
    """A start and a minute take 64.05 s, so that faults may come every 64.05 / ln 10 = 27.82 s."""
    check_faults(replace(SPEC, faults="every 27.9s kill any rank", on_failure="restart"))
    refusal(faults="every 27.8s kill any rank", on_failure="restart")


@pytest.mark.parametrize("asked", [{"faults": "at 9s kill rank 1"}, {"on_failure": "restart"}, {"detect_seconds": 9.0}])
def test_faults_on_this_machine_need_linux(asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "needs Linux" in refusal(**asked).message
    check_faults(replace(SPEC, engine="hosts", **asked))
    check_faults(SPEC)


def test_this_machine_is_asked_whether_its_storage_can_be_slowed(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = "at 60s for 20s slow storage of rank 1 to 5MB/s"
    asked: list[str] = []
    monkeypatch.setattr(fault_options, "try_to_slow", asked.append)
    check_faults(replace(SPEC, faults=slow))
    assert asked == [str(data_dir())]
    check_faults(replace(SPEC, faults=slow, engine="slurm"))
    check_faults(replace(SPEC, faults="at 60s disk full"))
    assert len(asked) == 1  # other machines are asked when the fault is due

    def refuse(folder: str) -> None:
        raise PermissionError("not root")

    monkeypatch.setattr(fault_options, "try_to_slow", refuse)
    assert "storage cannot be slowed here: not root." in refusal(faults=slow).message
