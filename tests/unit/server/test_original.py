"""MLBench 3's API: forms, times and series, without a server."""

import json
from typing import Any

import pytest

pytest.importorskip("starlette")

from mlbench_cli.errors import UsageError
from mlbench_cli.server.original import (
    OriginalSample,
    number_of,
    parse_form,
    parse_since,
    request_of_form,
    select_samples,
)

FORM = {"name": "mine-2", "num_workers": "2", "image_name": "mlbench/pytorch-backend-benchmark:latest"}
CUSTOM = {**FORM, "image_name": "custom_image", "custom_image_command": "train"}


def series(*values: str) -> dict[str, list[OriginalSample]]:
    dates = (f"2026-01-01T00:00:{second:02d}.000Z" for second in range(60))
    return {
        "loss @ 0": [
            {"date": date, "value": value, "cumulative": False} for date, value in zip(dates, values, strict=False)
        ]
    }


def values_of(found: dict[str, list[OriginalSample]]) -> list[str]:
    return [sample["value"] for sample in found["loss @ 0"]]


def select(found: dict[str, list[OriginalSample]], **changes: Any) -> dict[str, list[OriginalSample]]:
    options: dict[str, Any] = {"since": None, "summarize": 0, "name": None, "last": 0, **changes}
    return select_samples(found, **options)


def test_a_form_becomes_a_request_of_a_task() -> None:
    assert request_of_form(FORM) == {"name": "mine", "workers": [2], "task": "allreduce"}
    other = request_of_form({**FORM, "name": "mine-3", "backend": "MPI", "gpu_enabled": "true", "light_target": "true"})
    assert other == {**request_of_form(FORM), "name": "mine-3", "backend": "mpi", "gpu": True, "light": True}
    off = request_of_form({**FORM, "gpu_enabled": "false", "light_target": "false", "run_all_nodes": "true"})
    assert off == request_of_form(FORM)  # a task of ours runs on all workers anyway


@pytest.mark.parametrize(("given", "wanted"), [("true", True), ("false", False)])
def test_a_form_with_an_own_image_says_whether_all_workers_run_its_command(given: str, wanted: bool) -> None:
    asked = request_of_form({**CUSTOM, "custom_image_name": "any:1", "run_all_nodes": given})
    assert asked == {"name": "mine", "workers": [2], "command": "train", "image": "any:1", "run-on-all": wanted}
    plain = request_of_form(CUSTOM)
    assert "image" not in plain
    assert "run-on-all" not in plain


def test_an_own_backend_keeps_its_name() -> None:
    asked = request_of_form({**CUSTOM, "backend": "custom_backend", "custom_backend": "MyOwn"})
    assert asked["backend"] == "custom:MyOwn"
    assert "backend" not in request_of_form({**CUSTOM, "backend": "custom_backend"})


@pytest.mark.parametrize(
    "changes", [{"name": ""}, {"num_workers": ""}, {"num_workers": "two"}, {"num_workers": "-1"}, {"image_name": "x/y"}]
)
def test_an_incomplete_form_is_refused(changes: dict[str, str]) -> None:
    with pytest.raises(UsageError):
        request_of_form({**FORM, **changes})


def test_a_form_has_at_most_a_hundred_fields_of_utf8() -> None:
    assert parse_form(b"a=&b=1&a=2") == [("a", ""), ("b", "1"), ("a", "2")]
    assert len(parse_form(b"&".join([b"a=1"] * 100))) == 100
    for body in (b"&".join([b"a=1"] * 101), b"a=\xff\xfe"):
        with pytest.raises(UsageError, match="not a form"):
            parse_form(body)


def test_the_number_of_a_run_is_its_id_in_decimal() -> None:
    assert number_of("00000000002a") == 42
    assert number_of("not hexadecimal") == number_of("not hexadecimal") > 0


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1970-01-01 00:00:01", 1.0),
        ("1970-01-01T00:00:01Z", 1.0),
        ("1970-01-01T01:00:01+01:00", 1.0),
        ("1970-01-02", 86400.0),
    ],
)
def test_times_without_a_zone_are_utc(text: str, seconds: float) -> None:
    assert parse_since(text) == seconds


def test_samples_of_the_very_time_are_kept() -> None:
    found = series("1", "2", "3")
    assert values_of(select(found, since="2026-01-01 00:00:01")) == ["2", "3"]
    assert select(found, since="2026-01-01 00:00:03") == {}
    assert values_of(select(found, since="")) == ["1", "2", "3"]  # an empty field of a form


def test_an_incomplete_last_group_is_dropped_as_in_mlbench_3() -> None:
    found = series("1", "2", "3", "4", "5")
    assert values_of(select(found, summarize=5)) == ["1", "2", "3", "4", "5"]
    assert values_of(select(found, summarize=2)) == ["2.0"]
    assert values_of(select(found, summarize=3)) == ["1.5", "3.5"]
    assert select(found, summarize=2)["loss @ 0"][0]["date"] == "2026-01-01T00:00:00.000Z"
    assert values_of(select(series("a", "b", "3", "4"), summarize=2)) == ["nan", "3.5"]


def test_only_the_named_series_and_its_last_samples_are_returned() -> None:
    found = {**series("1", "2", "3"), "other @ 0": series("4")["loss @ 0"], "empty @ 0": []}
    assert set(select(found)) == {"loss @ 0", "other @ 0"}
    assert set(select(found, name="other @ 0")) == {"other @ 0"}
    assert values_of(select(found, last=1)) == ["3"]
    assert values_of(select(found, last=9)) == ["1", "2", "3"]
    json.dumps(select(found))
