"""Documents of an archive: run.json as it is recorded, and the parts that follow from a single fact."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.model.run import Observation, Run, WorkerState
from mlbench_cli.results.archive.judge import KEPT_VARIABLES, environment_document, find_exit_code, price_of
from mlbench_cli.results.archive.record import write_run_document
from mlbench_cli.results.archive.seal import complete_run_document
from tests.unit.results.runs import spec


def make_run(folder: Path, **changes: Any) -> Run:
    return Run("7f", spec(**changes), folder, "2025-10-09T08:53:19.000Z")


# --- run.json ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"id": "80"},
        {"name": "demo-3"},
        {"created": "2025-10-09T08:53:20.000Z"},
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


@pytest.mark.parametrize("written_before", [{}, None])
def test_a_spec_in_the_form_of_an_earlier_version_is_written_again_with_its_provenance(
    tmp_path: Path, written_before: dict[str, Any] | None
) -> None:
    run = make_run(tmp_path)
    write_run_document(run, {"mlbench": "4.0.0"}, repeats=2)
    document = json.loads((tmp_path / "run.json").read_bytes())
    (tmp_path / "run.json").write_text(json.dumps({**document, "spec": written_before}))
    assert complete_run_document(run) == document
    assert json.loads((tmp_path / "run.json").read_bytes()) == document


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
