"""What a run's key takes from its documents, and what becomes of facts that are missing or malformed."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.results.analysis.comparability import (
    CONDITIONS,
    WORDS,
    WORKERS,
    ComparisonKey,
    conditions_of,
    find_network_difference,
    key_of,
)
from mlbench_cli.results.archive.conditions import Conditions
from mlbench_cli.results.archive.reader import Archive


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


def test_every_fact_of_a_run_with_its_text(sealed: Path) -> None:
    """All of a local run's facts, as charts and tables name them."""
    assert key_of(Archive.open(sealed)).facts() == {
        "task": "unknown-task",
        "backend": "gloo",
        "device": "cpu",
        "preset": "spec",
        "cluster": "local",
        "machine": "unknown",
        "processes_per_worker": "1",
        "gpus_per_worker": "0",
        "cpus": "1",
        "image": "",
        "code": "unknown",
        "framework": "torch 2.15.0",
        "command": "",
        "label": "",
        "parameter batch_size": "128",
        "parameter goal_full": "80.0",
        "parameter goal_light": "70.0",
        "goal": Archive.open(sealed).result["goal"]["wording"],  # type: ignore[index]
        "metric": "Prec@1",
        "budget": "",
        "network": "",
        "method": "task's own",
        "setting engine": "local",
        "data": "digits",
        "synthetic": "",
        "division": "none",
        "measure": "",
        "judge": str(Archive.open(sealed).result["judge"]),
    }


def test_a_run_without_times_is_measured_as_a_whole(sealed: Path) -> None:
    """It does not know its goal, budget, data or division: that is not the same as having none."""
    silent = {"goal": None, "budget_seconds": None, "data": None, "synthetic": False}
    times: dict[str, Any] = {"task_seconds": {"wall": None, "training": None}, "timings": {}}
    names = ("goal", "metric", "budget", "data", "synthetic", "division", "measure")
    whole, trained = key_with(sealed, result={**silent, **times}), key_with(sealed, result=silent)
    assert [getattr(whole, name) for name in names] == [*[None] * 6, "whole run"]
    assert [getattr(trained, name) for name in names] == ["", "", "", "", "", "none", ""]
    facts = whole.facts()
    assert [facts[name] for name in names] == [""] * 6 + ["whole run"]
    timed = {**silent, "task_seconds": {"wall": None, "training": None}}  # but it reported its parts
    assert key_with(sealed, result=timed).measure == ""
    assert key_with(sealed, result={**silent, "timings": {}}).measure == ""


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
        ({"engine": "kubernetes", "cluster": "c"}, "cluster c of unknown kind"),
        ({"engine": "local", "cluster_kind": "vm"}, "vm"),
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


def test_machines_of_several_ranks_are_each_named_once_and_provenance_comes_first(sealed: Path) -> None:
    ranks = {"0": {"cpu": "Xeon"}, "1": CPU, "2": {"cpu": "Xeon"}, "3": "malformed", "4": {}}
    assert key_with(sealed, ranks=ranks).machine == "EPYC, 8 cores + Xeon"
    assert key_with(sealed, ranks=ranks, provenance={"machine": {"cpu": "ARM"}}).machine == "ARM"
    assert key_with(sealed, ranks=ranks, provenance={"machine": "malformed"}).machine == "EPYC, 8 cores + Xeon"
    assert key_with(sealed, ranks={}).machine is None


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
        ({"source": {"commit": "0123456789abcdef"}}, "0123456789ab"),
        ({"source": {"commit": "0123456789abcdef", "modified": True}}, "0123456789ab (modified)"),
        ({"source": {"modified": True}}, None),
        ({"code": {"digest": "abc"}, "source": {"commit": "def"}}, "abc"),
        ("malformed", None),
    ],
)
def test_code_is_known_by_its_digest_or_its_commit(sealed: Path, provenance: Any, code: str | None) -> None:
    assert key_with(sealed, provenance=provenance, ranks={}).code == code


def test_the_digest_that_a_rank_reports_counts_before_a_commit(sealed: Path) -> None:
    ranks = {"0": {}, "1": {"code_digest": "from-a-rank"}}
    assert key_with(sealed, ranks=ranks, provenance={"source": {"commit": "def"}}).code == "from-a-rank"
    assert key_with(sealed, ranks=ranks, provenance={"code": {"digest": "abc"}}).code == "abc"


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
    ("identity", "text"),
    [
        (None, "digits"),
        ({"official": True, "digest": "sha256:0123456789"}, "digits"),
        ({"official": False, "digest": "sha256:0123456789"}, "digits (not the official data, 01234567)"),
        ({"official": None, "digest": "0123456789"}, "digits (not known to be official, 01234567)"),
        ({"official": False, "digest": None}, "digits (not the official data)"),
    ],
)
def test_data_that_are_not_official_have_a_part_of_their_digest(
    sealed: Path, identity: dict[str, Any] | None, text: str
) -> None:
    assert key_with(sealed, result={"data_identity": identity}).data == text
    synthetic = key_with(sealed, result={"data_identity": identity, "synthetic": True})
    assert (synthetic.data, synthetic.synthetic) == ("digits", "synthetic data")


@pytest.mark.parametrize(
    ("spec", "network"),
    [
        ({}, ""),
        ({"network": "1gbit"}, "1gbit"),
        ({"network": "1gbit", "kubernetes": {"network_method": "tc"}}, "1gbit by tc"),
        ({"kubernetes": "malformed"}, ""),
    ],
)
def test_a_network_is_what_was_asked_for_and_who_shaped_it(sealed: Path, spec: dict[str, Any], network: str) -> None:
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


def test_a_long_list_is_its_length_its_ends_and_a_digest(sealed: Path) -> None:
    def text(values: list[int]) -> str:
        ((_, found),) = key_with(sealed, spec={"parameters": {"p": values}}).parameters
        return found

    assert text([1, 2, 3, 4, 5, 6, 7]).startswith("7 from 1 to 7 (")
    assert text([1, 2, 3, 4, 5, 6, 7]) != text([1, 2, 3, 9, 5, 6, 7])


ENGINE = ("engine", "local")


def test_settings_beyond_the_facts_are_named_unless_they_are_defaults(sealed: Path) -> None:
    spec: dict[str, Any] = {
        "later": "x",
        "other": [],
        "more": {},
        "none": None,
        "spec_version": 9,
        "kubernetes": {"later": 3},
    }
    assert key_with(sealed, spec=spec).settings == (ENGINE, ("kubernetes.later", "3"), ("later", "x"))
    _, (_, long) = key_with(sealed, spec={"later": "x" * 81, "kubernetes": {}}).settings
    assert long.startswith("x" * 69 + "… (")
    assert len(long) == 70 + len(" (123456)")
    assert key_with(sealed, spec={"later": "x" * 80, "kubernetes": {}}).settings == (ENGINE, ("later", "x" * 80))
    facts = key_with(sealed, spec={"later": "x"}).facts()
    assert facts["setting later"] == "x"


def test_parameters_differ_one_by_one_in_the_order_of_their_names(sealed: Path) -> None:
    a = key_with(sealed, spec={"parameters": {"c": 1, "a": 1, "same": 0}})
    b = key_with(sealed, spec={"parameters": {"b": 2, "a": 2, "same": 0}})
    assert [(each.word, each.phrase) for each in a.differences(b)] == [
        ("parameters", "The values of a differ: 1 and 2."),
        ("parameters", "The values of b differ: none and 2."),
        ("parameters", "The values of c differ: 1 and none."),
    ]
    assert a.differences(a) == ()


def test_differences_are_in_the_order_of_the_facts_with_unknown_and_none(sealed: Path) -> None:
    a = key_with(sealed, spec={"backend": "mpi", "functional_only": "one machine"}, ranks={"0": CPU})
    b = key_with(sealed, result={"judge": 2}, ranks={})
    found = [(each.word, each.name, each.a, each.b) for each in a.differences(b)]
    assert found == [
        ("backend", "backends", "mpi", "gloo"),
        ("machine", "machines", "EPYC, 8 cores", "unknown"),
        ("label", "labels", "functional only", "none"),
        ("judge", "versions of the judge", str(a.judge), "2"),
    ]


def test_a_run_that_failed_early_agrees_as_far_as_it_is_known(sealed: Path) -> None:
    complete = key_of(Archive.open(sealed))
    early = key_with(
        sealed,
        ranks={},
        result={"goal": None, "budget_seconds": None, "data": None, "timings": {}, "task_seconds": {"wall": None}},
    )
    assert (early.framework, early.cpus, early.goal, early.measure) == (None, None, None, "whole run")
    assert complete.covers(early)
    assert not early.covers(complete)  # what is known is not what nobody knows
    assert complete.covers(complete)
    others: list[dict[str, Any]] = [
        *({"backend": "mpi"}, {"parameters": {}}, {"processes_per_worker": 2}, {"cluster_kind": "x"}),
    ]
    for spec in others:
        assert not complete.covers(key_with(sealed, spec=spec))
    # A machine, image or code that is unknown is not reported by training, so it is not just missing.
    known = key_with(sealed, ranks={"0": {**CPU, **RANK}})
    assert known.covers(known)
    assert not known.covers(complete)


RANK = {"framework": "torch", "version": "2.15.0", "env": {"OMP_NUM_THREADS": "1"}}


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


def test_round_trips_below_a_fifth_of_a_millisecond_apart_are_the_same(sealed: Path) -> None:
    """Inside one machine room they vary by factors."""
    networks = [archive_with(sealed, result={"network": summary(rtt_seconds=each)}) for each in (5e-5, 2.4e-4, 2.6e-4)]
    assert find_network_difference(networks[0], networks[1]) is None
    assert find_network_difference(networks[0], networks[2]) is not None


def test_a_run_without_a_measured_network_differs_from_none(sealed: Path) -> None:
    measured, plain = archive_with(sealed, result={"network": summary()}), archive_with(sealed)
    plain.result.pop("network", None)
    assert find_network_difference(measured, plain) is None
    assert find_network_difference(plain, measured) is None


def test_conditions_of_an_old_archive_are_unknown(sealed: Path) -> None:
    archive = Archive.open(sealed)
    stated = {"measured": True, "labels": ["shared"], "crowded": None, "contended": None, "quota_limited": None}
    archive.result["conditions"] = {**stated, "shared": {"reason": "x", "figures": {}}}
    assert conditions_of(archive).phrase == "shared: x"
    assert conditions_of(archive).measured
    archive.result["conditions"] = None  # type: ignore[typeddict-item]
    assert conditions_of(archive) == Conditions()


def test_differences_can_be_accepted_by_their_words() -> None:
    assert WORDS[:2] == (WORKERS, CONDITIONS)
    assert len(set(WORDS)) == len(WORDS)
    assert {"task", "backend", "machine", "data", "goal", "parameters", "judge", "network"} <= set(WORDS)
    assert json.loads(json.dumps(WORDS)) == list(WORDS)


@pytest.mark.parametrize(
    ("name", "value", "word", "phrase"),
    [
        ("task", "x", "task", "The tasks differ: unknown-task and x."),
        ("backend", "x", "backend", "The backends differ: gloo and x."),
        ("device", "gpu", "device", "The devices differ: cpu and gpu."),
        ("preset", "x", "preset", "The presets differ: spec and x."),
        ("cluster", "x", "cluster", "The kinds of cluster differ: local and x."),
        ("machine", "x", "machine", "The machines differ: unknown and x."),
        ("processes_per_worker", 2, "processes", "The numbers of processes per worker differ: 1 and 2."),
        ("gpus_per_worker", 8, "gpus", "The numbers of GPUs per worker differ: 0 and 8."),
        ("cpus", 2.5, "cpus", "The CPUs per rank differ: 1 and 2.5."),
        ("image", None, "image", "The images differ: none and unknown."),
        ("code", "x", "code", "The digests of the code differ: unknown and x."),
        ("framework", "x", "framework", "The versions of the framework differ: torch 2.15.0 and x."),
        ("command", "x", "command", "The commands differ: none and x."),
        ("label", "x", "label", "The labels differ: none and x."),
        ("metric", "x", "goal", "The metrics of the goal differ: Prec@1 and x."),
        ("budget", "60", "budget", "The times to spend differ: none and 60."),
        ("network", "x", "network", "The networks differ: none and x."),
        ("method", "x", "method", "The methods differ: task's own and x."),
        ("settings", (("engine", "x"),), "settings", "The values of engine differ: local and x."),
        ("data", "x", "data", "The data differ: digits and x."),
        ("synthetic", "x", "data", "The kinds of data differ: none and x."),
        ("division", "closed", "division", "The divisions differ: none and closed."),
        ("measure", "x", "measure", "The measures differ: none and x."),
        ("judge", 1, "judge", "The versions of the judge differ: 3 and 1."),
    ],
)
def test_each_difference_has_a_word_and_a_sentence(
    sealed: Path, name: str, value: object, word: str, phrase: str
) -> None:
    archive = Archive.open(sealed)
    archive.result["judge"] = 3
    key = key_of(archive)
    [found] = key.differences(replace(key, **{name: value}))  # type: ignore[arg-type]
    assert (found.word, found.phrase) == (word, phrase)
    assert word in WORDS


@pytest.mark.parametrize(("word", "fact"), [("closed", "closed"), ("open", "open"), (None, "none")])
def test_a_division_is_a_fact_of_a_run(sealed: Path, word: str | None, fact: str) -> None:
    assert key_with(sealed, result={"division": {"word": word, "reason": None}}).division == fact
    old = archive_with(sealed)
    del old.result["division"]  # type: ignore[misc]
    assert key_of(old).division == "none"


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
