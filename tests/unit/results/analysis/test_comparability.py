"""Every resolved setting that changes what runs keeps two runs apart, in every command that groups them."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import FieldInfo, fields, replace

from mlbench_cli.model.methods import method_phrase
from mlbench_cli.model.spec import KubernetesOptions, RunSpec
from mlbench_cli.results.analysis.comparability import NEUTRAL, ComparisonKey, key_of
from mlbench_cli.results.analysis.series import collect
from mlbench_cli.results.archive.files import Archive
from task_images.methods.catalog import describe, find_class
from tests.unit.results.runs import sealed_run, spec

# A value of each type that differs from any default, and of fields that a spec checks, one that it takes.
_OTHERS: dict[str, Any] = {
    "str": "other",
    "str | None": "other",
    "int": 3,
    "int | None": 3,
    "bool": None,  # the opposite
    "float": 1234.0,
    "float | None": 3.0,
    "tuple[str, ...]": ("other",),
    "Mapping[str, str]": {"other": "1"},
    "Mapping[str, Any]": {"other": 1},
}
_TAKEN: dict[str, Any] = {
    **dict.fromkeys(("kubernetes.memory", "kubernetes.shm"), "3Gi"),
    "kubernetes.collect": "all",
    "name": "other-2",
    "device": "gpu",
    "goal": "light",
    "network": "1gbit",
    "method": describe(find_class("eftopk")()),
}


def _all_fields() -> list[str]:
    own = [item.name for item in fields(RunSpec) if item.name != "kubernetes"]
    return [*own, *(f"kubernetes.{item.name}" for item in fields(KubernetesOptions))]


def _field(name: str) -> FieldInfo:
    cls = KubernetesOptions if name.startswith("kubernetes.") else RunSpec
    return next(item for item in fields(cls) if item.name == name.rpartition(".")[2])


def _kind(item: FieldInfo) -> str:
    return (
        item.type.__name__
        if type(item.type) is type
        else str(item.type).replace("collections.abc.", "").replace("typing.", "")
    )


def _changed(base: RunSpec, name: str) -> RunSpec:
    """`base` with another value of one field."""
    item = _field(name)
    value = _TAKEN.get(name, _OTHERS[_kind(item)])
    options = name.startswith("kubernetes.")
    if _kind(item) == "bool":
        value = not getattr(base.pods if options else base, item.name)
    if options:
        return replace(base, engine="kubernetes", kubernetes=replace(base.pods, **{item.name: value}))
    return replace(base, **{item.name: value})


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Its ranks report no number of threads, so that what was asked for counts.
    return sealed_run(tmp_path_factory.mktemp("archives") / "a", environment={"env": {}})


def _key_with(path: Path, run_spec: RunSpec) -> ComparisonKey:
    """The key of an archive with another spec: what the ranks reported and the judge found stays."""
    with Archive.open(path) as archive:
        archive.run["spec"] = json.loads(json.dumps(run_spec.to_dict()))
        return key_of(archive)


@pytest.mark.parametrize("name", _all_fields())
def test_a_field_of_the_spec_is_neutral_or_keeps_runs_apart(sealed: Path, name: str) -> None:
    base = spec(engine="kubernetes", cluster="c", cluster_kind="gke/n1", cpus=2.0)
    if name in ("argv", "template"):
        base = replace(base, task="custom", preset="custom")
    is_neutral = _key_with(sealed, base) == _key_with(sealed, _changed(base, name))
    assert is_neutral is (name in NEUTRAL), f"{name} is neither in the key nor in NEUTRAL"


def test_a_field_that_this_version_does_not_know_keeps_runs_apart(sealed: Path) -> None:
    with Archive.open(sealed) as one, Archive.open(sealed) as other:
        other.run["spec"]["later_option"] = "fast"
        other.run["spec"]["kubernetes"] = {"later_option": 3}
        found = key_of(one).differences(key_of(other))
        assert [(each.word, each.b) for each in found] == [("settings", "3"), ("settings", "fast")]


def test_runs_of_different_code_are_kept_apart(sealed: Path) -> None:
    keys = []
    for provenance in (
        {"code": {"digest": "a" * 64}},
        {"code": {"digest": "b" * 64}},
        {"source": {"commit": "c" * 40}},
    ):
        with Archive.open(sealed) as archive:
            archive.run["provenance"] = provenance
            keys.append(key_of(archive))
    for left, right in itertools.combinations(keys, 2):
        assert "code" in {each.word for each in left.differences(right)}


def test_two_methods_differ_in_one_thing_and_two_versions_of_a_method_in_its_code(sealed: Path) -> None:
    keys = []
    for name, code, method_code in (
        ("powersgd", "a", "c"),
        ("eftopk", "a", "d"),
        ("powersgd", "a", "e"),
        ("eftopk", "b", "d"),
    ):
        with Archive.open(sealed) as archive:
            archive.run["spec"] = spec(method={"name": name}).to_dict()
            archive.run["provenance"] = {"code": {"digest": code * 64, "method_digest": method_code * 64}}
            keys.append(key_of(archive))
    first, *others = keys
    found = [{each.word for each in first.differences(other)} for other in others]
    assert found == [{"method"}, {"code"}, {"method", "code"}]


def test_commands_that_differ_behind_the_eightieth_character_are_kept_apart(sealed: Path) -> None:
    base = spec(task="custom", preset="custom", argv=("python", "x" * 100, "--rate=1"))
    other = replace(base, argv=(*base.argv[:2], "--rate=2"))
    assert _key_with(sealed, base) != _key_with(sealed, other)


@pytest.mark.timeout(60)
def test_a_long_word_of_a_command_is_read_once(sealed: Path) -> None:
    """And not again from each of its letters, which took minutes."""
    archive = Archive.open(sealed)
    for word in ("a", "-", "a-", "1.", "a="):
        archive.run["spec"] |= {"argv": [word * 200_000], "parameters": {"x": "value"}}
        assert key_of(archive).differences(key_of(Archive.open(sealed)))


@pytest.mark.parametrize("changes", [{"density": "0.02"}, {"delay": "0.002,1e-9"}, {"servers": "2"}])
def test_a_method_is_named_with_the_axes_that_were_changed(sealed: Path, changes: dict[str, str]) -> None:
    name = "bsp-ps" if "servers" in changes else "eftopk"
    plain, changed = (spec(method=describe(find_class(name)(**each))) for each in ({}, changes))
    assert method_phrase(plain.method) == name
    ((axis, value),) = changes.items()
    assert method_phrase(changed.method) == f"{name} ({axis}={value})"
    (found,) = _key_with(sealed, plain).differences(_key_with(sealed, changed))
    assert (found.word, found.phrase) == ("method", f"The methods differ: {name} and {name} ({axis}={value}).")


@pytest.mark.parametrize("where", ["parameters", "environment"])
def test_texts_that_differ_behind_what_is_shown_of_them_stay_apart(tmp_path: Path, where: str) -> None:
    """Such as a long path, and the processors of many nodes."""
    more: dict[str, Any] = {
        "parameters": {"batch_size": 128, "goal_full": 80.0, "goal_light": 70.0},
        "environment": {"cpu": "EPYC"},
    }
    archives = []
    for number in range(2):
        name = "path" if where == "parameters" else "cpu"
        own: dict[str, Any] = {where: {**more[where], name: f"{'x' * 200}{number}"}}
        archives.append(Archive.open(sealed_run(tmp_path / str(number), name=f"x{number}-2", **own)))
    assert len({group.label for group in collect(archives).groups}) == 2
