"""Documents of an archive: run.json as it is recorded, and the parts that follow from a single fact."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli import __version__
from mlbench_cli.errors import UsageError
from mlbench_cli.model.run import Observation, Run, WorkerState
from mlbench_cli.results.archive import documents
from mlbench_cli.results.archive.documents import (
    KEPT_VARIABLES,
    complete_run_document,
    environment_document,
    find_exit_code,
    label_of,
    price_of,
    run_document,
    worker_document,
    write_run_document,
)
from tests.unit.results.runs import START, spec


def make_run(folder: Path, **changes: Any) -> Run:
    return Run("7f", spec(**changes), folder, "2025-10-09T08:53:19.000Z")


# --- run.json ---------------------------------------------------------------------------------------------------------


def test_a_run_is_recorded_with_its_spec_and_provenance(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    write_run_document(run, {"mlbench": "4.0.0"})
    document = json.loads((tmp_path / "run" / "run.json").read_bytes())
    plain = json.loads(json.dumps(run.spec.to_dict()))
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    assert document == {
        "schema_version": 1,
        "id": "7f",
        "name": "demo-2",
        "created": "2025-10-09T08:53:19.000Z",
        "spec_hash": hashlib.sha256(text.encode()).hexdigest()[:16],
        "spec": plain,
        "task": None,  # unknown-task is in no catalog
        "mlbench": __version__,
        "provenance": {"mlbench": "4.0.0"},
    }
    assert next(iter(document)) == "schema_version"
    assert run_document(run)["provenance"] is None


def test_the_rules_of_a_known_task_are_recorded(tmp_path: Path) -> None:
    rules = run_document(make_run(tmp_path, task="digits_resnet", preset="tiny"))["task"]
    assert rules is not None
    assert rules["name"] == "digits_resnet"
    assert rules["goal"]["metric"] == "Prec@1"
    assert rules["preset"] != rules["spec"]


def test_a_folder_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"The folder .*file/run of the run cannot be created: ") as caught:
        write_run_document(make_run(tmp_path / "file" / "run"))
    assert "MLBENCH_HOME" in str(caught.value.hint)


def test_a_record_of_the_run_is_kept_as_it_is(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_run_document(run, {"mlbench": "4.0.0"})
    before = (tmp_path / "run.json").read_bytes()
    assert complete_run_document(run)["provenance"] == {"mlbench": "4.0.0"}
    assert (tmp_path / "run.json").read_bytes() == before


@pytest.mark.parametrize(
    "change",
    [
        {"id": "80"},
        {"name": "demo-3"},
        {"created": "2025-10-09T08:53:20.000Z"},
        {"spec": {}},
        {"spec": None},
    ],
)
def test_a_record_of_another_run_is_replaced_without_its_provenance(tmp_path: Path, change: dict[str, Any]) -> None:
    run = make_run(tmp_path)
    write_run_document(run, {"mlbench": "4.0.0"})
    document = json.loads((tmp_path / "run.json").read_bytes())
    (tmp_path / "run.json").write_text(json.dumps({**document, **change}))
    found = complete_run_document(run)
    assert found == {**document, "provenance": None}
    assert json.loads((tmp_path / "run.json").read_bytes()) == found
    assert list(found) == list(document)


@pytest.mark.parametrize("text", [None, "", "[]", "{}"])
def test_a_record_that_is_missing_or_damaged_is_written_again(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "run.json").write_text(text)
    run = make_run(tmp_path)
    found = complete_run_document(run)
    assert (found["schema_version"], found["id"], found["provenance"]) == (1, "7f", None)
    assert complete_run_document(run) == found


# --- exit codes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codes", "first_failed", "code"),
    [
        ([0, 0], None, 0),
        ([0, None], None, 0),
        ([None, None], None, None),
        ([], None, None),
        ([0, 3, 5], 2, 5),
        ([0, 3, 5], None, 3),
        ([7, None], 1, 7),  # rank 1 failed first, but its exit code is unknown
        ([7, 0], 1, 7),
        ([0, 0], 1, 0),
        ([None, 137], 1, 137),
        ([3, 5], 9, 3),  # no such rank
    ],
)
def test_the_exit_code_is_that_of_the_rank_that_failed_first(
    codes: Iterable[int | None], first_failed: int | None, code: int | None
) -> None:
    workers = tuple(WorkerState(rank, exit_code=each) for rank, each in enumerate(codes))
    assert find_exit_code(Observation(0.0, workers, first_failed=first_failed)) == code


# --- prices and labels ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("price", "seconds", "found"),
    [
        ({}, 3600.0, None),
        ({"per_hour": 2.5, "currency": "USD"}, 3600.0, {"per_hour": 2.5, "currency": "USD", "amount": 2.5}),
        ({"per_hour": 2.5}, 90.0, {"per_hour": 2.5, "amount": 0.0625}),
        ({"per_hour": 1.0}, 0.2, {"per_hour": 1.0, "amount": 0.0001}),  # four decimals
        ({"per_hour": 1.0}, 0.0, {"per_hour": 1.0, "amount": 0.0}),
        ({"per_hour": 0.0}, 60.0, {"per_hour": 0.0, "amount": 0.0}),
        ({"per_hour": None}, 60.0, {"per_hour": None, "amount": None}),
        ({"currency": "USD"}, 60.0, {"currency": "USD", "amount": None}),
        ({"per_hour": 1.0}, None, {"per_hour": 1.0, "amount": None}),
    ],
)
def test_a_run_costs_its_hours_at_the_price_of_the_cluster(
    price: dict[str, Any], seconds: float | None, found: dict[str, Any] | None
) -> None:
    assert price_of(price, seconds) == found


def test_figures_are_functional_for_a_reason() -> None:
    assert label_of(None) == {"word": "performance", "reason": None}
    assert label_of("one machine") == {"word": "functional", "reason": "one machine"}


def test_a_worker_has_its_times_as_timestamps() -> None:
    worker = WorkerState(1, "failed", "OOMKilled", "n1", 137, START, START + 2.5, 1, "sha256:a", 2.25)
    assert worker_document(worker) == {
        "rank": 1,
        "phase": "failed",
        "reason": "OOMKilled",
        "node": "n1",
        "exit_code": 137,
        "started": "2025-10-09T08:53:20.000Z",
        "finished": "2025-10-09T08:53:22.500Z",
        "restarts": 1,
        "image_digest": "sha256:a",
        "seconds": 2.25,
    }
    unknown = worker_document(replace(worker, started=None, finished=0.0, seconds=None))
    assert (unknown["started"], unknown["finished"], "seconds" in unknown) == (None, "1970-01-01T00:00:00.000Z", False)


# --- environment.json -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["env", "environ", "environment", "variables"])
def test_only_variables_that_are_known_to_be_harmless_are_kept(key: str) -> None:
    variables = {
        "NCCL_DEBUG": "INFO",
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMPI_MCA_btl": "tcp",
        "UCX_TLS": "rc",
        "TORCH_NCCL_BLOCKING_WAIT": "1",
        **dict.fromkeys(sorted(KEPT_VARIABLES), "2"),
    }
    secret = {"HF_TOKEN": "hush", "NCCL": "hush", "MY_NCCL_X": "hush", "OMP_NUM_THREADS_TOKEN": "hush", "": "hush"}
    found = environment_document({0: {key: {**variables, **secret}, "threads": 1}})
    assert found == {"ranks": {"0": {key: variables, "threads": 1}}, "ranks_left_out": 0}


def test_facts_of_a_rank_are_kept_except_for_those_of_the_event() -> None:
    facts = {"v": 1, "event": "environment", "rank": 3, "time": 5.0, "torch": "2.9", "x": float("inf"), "env": "text"}
    assert environment_document({3: facts})["ranks"] == {"3": {"torch": "2.9", "x": "inf", "env": "text"}}


def test_ranks_are_in_order_and_those_beyond_the_limit_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {rank: {"x": "a" * 10} for rank in (10, 2, 0, 1)}
    assert list(environment_document(facts)["ranks"]) == ["0", "1", "2", "10"]
    each = len(repr({"x": "a" * 10}))
    monkeypatch.setattr(documents, "_MAX_ENVIRONMENT", 3 * each)
    assert environment_document(facts) == {
        "ranks": {str(rank): {"x": "a" * 10} for rank in (0, 1, 2)},
        "ranks_left_out": 1,
    }
    monkeypatch.setattr(documents, "_MAX_ENVIRONMENT", 3 * each - 1)
    assert environment_document(facts)["ranks_left_out"] == 2
    assert environment_document({}) == {"ranks": {}, "ranks_left_out": 0}


def test_environments_of_many_megabytes_are_bounded() -> None:
    document = environment_document({rank: {"text": "x" * 3_000_000} for rank in (3, 2, 1)})
    assert (list(document["ranks"]), document["ranks_left_out"]) == (["1", "2"], 1)
