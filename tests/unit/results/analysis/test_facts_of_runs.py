"""What a run's key takes from its documents, and what becomes of facts that are missing or malformed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.results.analysis.comparability import (
    ComparisonKey,
    find_network_difference,
    key_of,
)
from mlbench_cli.results.archive.files import Archive


def archive_with(
    path: Path,
    spec: dict[str, Any] | None = None,
    result: dict[str, Any] | None = None,
    ranks: dict[str, Any] | None = None,
    provenance: Any = None,
) -> Archive:
    """The archive, with some fields of its documents replaced."""
    archive = Archive.open(path)
    archive.run["spec"].update(spec or {})
    archive.run["provenance"] = provenance
    archive.result.update(result or {})  # type: ignore[typeddict-item]
    if ranks is not None:
        archive.environment["ranks"] = ranks
    return archive


def key_with(path: Path, **changes: Any) -> ComparisonKey:
    return key_of(archive_with(path, **changes))


@pytest.mark.parametrize(
    ("spec", "command"),
    [
        ({"task": "custom"}, "python -m task"),
        ({"preset": "open"}, "python -m task"),
        ({"task": "custom", "argv": None}, ""),
        ({}, ""),
    ],
)
def test_only_commands_of_the_user_are_a_fact(sealed: Path, spec: dict[str, Any], command: str) -> None:
    assert key_with(sealed, spec=spec).command == command


@pytest.mark.parametrize(
    ("spec", "cluster"),
    [
        ({"engine": "local"}, "local"),
        ({"engine": "kubernetes", "cluster": "c", "cluster_kind": "gke/n1"}, "gke/n1"),
        ({"engine": "kubernetes", "cluster": "c"}, "cluster c"),
        ({"engine": "slurm", "cluster": "c", "cluster_kind": "slurm/debug"}, "slurm/debug c"),
    ],
)
def test_clusters_of_unknown_kind_differ_by_their_names(sealed: Path, spec: dict[str, Any], cluster: str) -> None:
    assert key_with(sealed, spec=spec).cluster == cluster


CPU = {"cpu": "EPYC", "cores": 8}


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        (CPU, "EPYC, 8 cores"),
        ({"cpu": "EPYC"}, "EPYC"),
        ({**CPU, "cpu_quota": 2.5}, "EPYC, 8 cores, quota of 2.5 CPUs"),
        ({**CPU, "gpus": ["H100", "H100", "A100"]}, "EPYC, 8 cores, 2 H100, 1 A100"),
        ({**CPU, "device_name": "H100"}, "EPYC, 8 cores, 1 H100"),
        ({**CPU, "device_name": "EPYC"}, "EPYC, 8 cores"),
        ({**CPU, "gpus": [], "device_name": "H100"}, "EPYC, 8 cores, 1 H100"),
        ({"cores": 8, "gpus": ["H100"]}, None),
        ({"cpu": "x" * 200}, "x" * 149 + "…"),
    ],
)
def test_a_machine_is_its_processor_cores_quota_and_gpus(sealed: Path, facts: dict[str, Any], text: str | None) -> None:
    assert key_with(sealed, provenance={"machine": facts}).machine == text
    assert key_with(sealed, ranks={"0": facts}).machine == text


@pytest.mark.parametrize(
    ("spec", "rank", "cpus"),
    [
        ({}, {"env": {"OMP_NUM_THREADS": "4"}}, 4.0),
        ({}, {"environ": {"OMP_NUM_THREADS": "4"}}, 4.0),
        ({}, {"environment": {"OMP_NUM_THREADS": "4"}}, 4.0),
        ({}, {"variables": {"OMP_NUM_THREADS": "99999"}}, 99999.0),
        ({}, {"env": {"OMP_NUM_THREADS": "100000"}}, None),
        ({}, {"env": {"OMP_NUM_THREADS": "٤"}}, None),
        ({}, {"env": {"OMP_NUM_THREADS": "-1"}}, None),
        ({}, {"env": "malformed"}, None),
        ({"cpus": 6}, {}, 6.0),
        ({"cpus": 6, "processes_per_worker": 4}, {}, 1.5),
        ({"cpus": 6}, {"env": {"OMP_NUM_THREADS": "2"}}, 2.0),
    ],
)
def test_what_a_rank_reports_of_its_cpus_counts_before_what_was_asked_for(
    sealed: Path, spec: dict[str, Any], rank: dict[str, Any], cpus: float | None
) -> None:
    ranks = {"0": rank, "1": {"env": {"OMP_NUM_THREADS": "64"}}}  # the first rank speaks for all
    assert key_with(sealed, spec=spec, ranks=ranks).cpus == cpus


@pytest.mark.parametrize(
    ("image", "digests", "text"),
    [
        (None, [], None),
        ("repo:v1", [], "repo:v1 of unknown digest"),
        ("repo:v1", ["b@2", None, "a@1", "b@2"], "a@1 + b@2"),
    ],
)
def test_an_image_is_known_by_its_digests(
    sealed: Path, image: str | None, digests: list[Any], text: str | None
) -> None:
    states = [{"image_digest": each} for each in digests]
    changes: dict[str, Any] = {"spec": {"engine": "kubernetes", "cluster": "c", "image": image}}
    assert key_with(sealed, result={"worker_states": states}, **changes).image == text
    changes["spec"]["engine"] = "local"
    assert key_with(sealed, result={"worker_states": states}, **changes).image == ""


@pytest.mark.parametrize(
    ("provenance", "code"),
    [
        ({"code": {"digest": "0123456789abcdefXYZ"}}, "0123456789abcdef"),
        ({"source": {"commit": "0123456789abcdef"}}, "commit 0123456789ab"),
        ({"source": {"commit": "0123456789abcdef", "modified": True}}, "commit 0123456789ab, modified"),
        ({"source": {"modified": True}}, None),
        ({"code": {"digest": "abc"}, "source": {"commit": "def"}}, "abc"),
        ("malformed", None),
    ],
)
def test_code_is_known_by_its_digest_or_its_commit(sealed: Path, provenance: Any, code: str | None) -> None:
    assert key_with(sealed, provenance=provenance, ranks={}).code == code


@pytest.mark.parametrize(
    ("rank", "framework"),
    [
        ({"framework": "torch", "version": "2.0"}, "torch 2.0"),
        ({"framework": "torch", "framework_version": "2.1", "version": "9"}, "torch 2.1"),
        ({"framework": "torch"}, None),
        ({"version": "2.0"}, None),
        ({"framework": "x" * 70, "version": "2"}, "x" * 59 + "…"),
    ],
)
def test_the_framework_is_that_of_the_first_rank(sealed: Path, rank: dict[str, Any], framework: str | None) -> None:
    other = {"framework": "jax", "version": "1"}
    assert key_with(sealed, ranks={"0": rank, "1": other}).framework == framework


@pytest.mark.parametrize(
    ("spec", "network"),
    [
        ({}, ""),
        ({"network": "1gbit"}, "1gbit"),
        ({"kubernetes": "malformed"}, ""),
    ],
)
def test_a_network_is_what_was_asked_for(sealed: Path, spec: dict[str, Any], network: str) -> None:
    assert key_with(sealed, spec=spec).network == network


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""),
        ("text", "text"),
        (0.5, "0.5"),
        (True, "true"),
        ([1, 2], "[1, 2]"),
        ([1, 2, 3, 4, 5, 6], "[1, 2, 3, 4, 5, 6]"),
        ({"a": 1}, '{"a": 1}'),
    ],
)
def test_a_parameter_is_its_text_or_json(sealed: Path, value: Any, text: str) -> None:
    assert key_with(sealed, spec={"parameters": {"p": value}}).parameters == (("p", text),)


def summary(**changes: Any) -> dict[str, Any]:
    figures = {"rtt_seconds": 1e-3, "alone_bits_per_second": 1e9, "together_bits_per_second": 1e9}
    return {"asked": None, "networks": 2, "method": "none", "held": None, "problems": [], **figures, **changes}


@pytest.mark.parametrize(
    ("change", "differ"),
    [
        ({}, False),
        ({"together_bits_per_second": 1.5e9}, False),
        ({"together_bits_per_second": 1.51e9}, True),
        ({"together_bits_per_second": 1e9 / 1.51}, True),
        ({"together_bits_per_second": None, "alone_bits_per_second": 1.4e9}, False),
        ({"together_bits_per_second": None, "alone_bits_per_second": 2e9}, True),
        ({"together_bits_per_second": None, "alone_bits_per_second": None}, False),
        ({"rtt_seconds": 2e-3}, False),
        ({"rtt_seconds": 2.1e-3}, True),
        ({"rtt_seconds": 0.4e-3}, True),
        ({"rtt_seconds": None}, False),
        ({"together_bits_per_second": 2e9, "asked": "1gbit"}, False),
        ({"together_bits_per_second": 2e9, "networks": 1}, False),
    ],
)
def test_measured_networks_differ_from_a_factor_of_one_and_a_half_in_rate_or_two_in_round_trips(
    sealed: Path, change: dict[str, Any], differ: bool
) -> None:
    one, other = (archive_with(sealed, result={"network": each}) for each in (summary(), summary(**change)))
    for pair in ((one, other), (other, one)):
        found = find_network_difference(*pair)
        assert (found is not None) is differ
        if found is not None:
            assert (found.word, found.name) == ("network", "measured networks")


@pytest.mark.parametrize(("word", "fact"), [("closed", "closed"), ("open", "open"), (None, "none")])
def test_a_division_is_a_fact_of_a_run(sealed: Path, word: str | None, fact: str) -> None:
    assert key_with(sealed, result={"division": {"word": word, "reason": None}}).division == fact


@pytest.mark.parametrize(
    "name", ["framework", "cpus", "goal", "metric", "budget", "data", "synthetic", "division", "measure"]
)
def test_what_training_reports_may_be_unknown_of_a_run_that_failed(sealed: Path, name: str) -> None:
    key = key_of(Archive.open(sealed))
    assert key.covers(replace(key, **{name: None}))  # type: ignore[arg-type]
    other = replace(key, **{name: "other"})  # type: ignore[arg-type]
    assert key.covers(other) is (name == "measure")


@pytest.mark.parametrize("name", ["cluster", "machine", "image", "code", "network", "method", "label", "device"])
def test_what_is_known_before_training_has_to_agree(sealed: Path, name: str) -> None:
    key = replace(key_of(Archive.open(sealed)), machine="m", image="i", code="c")
    assert not key.covers(replace(key, **{name: None}))  # type: ignore[arg-type]
