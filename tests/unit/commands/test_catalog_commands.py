"""`tasks`, `methods`, `config`, `prices` and `images`: their tables, documents and notes, and the table of commands."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlbench_cli import commands
from mlbench_cli.clusters import registry_login
from mlbench_cli.commands import config, images, methods, prices, tasks
from mlbench_cli.commands.images import _choose_platforms, _find_registry
from mlbench_cli.commands.tasks import _describe, _document
from mlbench_cli.console import Format
from mlbench_cli.errors import NotFoundError, UsageError
from mlbench_cli.model.goals import GoalRule
from mlbench_cli.model.run import Cluster
from mlbench_cli.storage.store import Store
from mlbench_cli.tasks.catalog import Parameter, Task, WorkersRule
from providers import pricing
from providers.pricing import ArchivedPrice, FetchedPrices, PriceTable
from providers.registry import PAID
from task_images.comm.presets import PRESETS, resolve

Captured = pytest.CaptureFixture[str]
NO_COMMAND: Any = SimpleNamespace(invoked_subcommand=None)
A_COMMAND: Any = SimpleNamespace(invoked_subcommand="x")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLBENCH_HOME", str(tmp_path))
    for name in ("CLUSTER", "REGISTRY", "TIMEOUT"):
        monkeypatch.delenv(f"MLBENCH_{name}", raising=False)
    return tmp_path


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


# --- tasks ------------------------------------------------------------------------------------------------------------

TASK = Task(
    name="mine",
    number="z9",
    title="A task",
    image="mine",
    command=("python", "-m", "mine"),
    backends=("gloo", "nccl"),
    devices=("cpu",),
    data="digits",
    parameters={
        "epochs": Parameter("epochs", "int", "passes", min=1),
        "kind": Parameter("kind", "str", "which", choices=("a", "b")),
        "goal_full": Parameter("goal_full", "float", "goal", 0, 100),
        "goal_light": Parameter("goal_light", "float", "light goal"),
    },
    presets={
        "spec": {"epochs": 3, "kind": "a", "goal_full": 80.0, "goal_light": 50.0},
        "tiny": {"epochs": 1},
    },
    goal=GoalRule("Prec@1", ">=", "wording"),
    free=("epochs",),
    notes=("A note.",),
    measured_on=("T4", "L4"),
    workers=WorkersRule(sensible=4, reason="the data are few"),
)


def test_a_task_as_a_document() -> None:
    spec = {"epochs": 3, "kind": "a", "goal_full": 80.0, "goal_light": 50.0}
    assert _document(TASK) == {
        "name": "mine",
        "number": "z9",
        "title": "A task",
        "legacy_name": None,
        "image": "mine",
        "command": ["python", "-m", "mine"],
        "backends": ["gloo", "nccl"],
        "devices": ["cpu"],
        "measured_on": ["T4", "L4"],
        "data": "digits",
        "free": ["epochs"],
        "goal": {"metric": "Prec@1", "comparison": ">="},
        "parameters": {
            "epochs": {"type": "int", "help": "passes", "min": 1, "max": None, "choices": None},
            "kind": {"type": "str", "help": "which", "min": None, "max": None, "choices": ["a", "b"]},
            "goal_full": {"type": "float", "help": "goal", "min": 0, "max": 100, "choices": None},
            "goal_light": {"type": "float", "help": "light goal", "min": None, "max": None, "choices": None},
        },
        "presets": {"spec": spec, "tiny": {**spec, "epochs": 1}},
        "workers": {"sensible": 4, "reason": "the data are few"},
        "notes": ["A note."],
        "origin": None,
    }


def test_a_task_is_described_with_what_its_presets_change(capsys: Captured) -> None:
    _describe(TASK, " --task-path x")
    printed = capsys.readouterr()
    facts, table = printed.out.split("\n\n", 1)
    assert facts.splitlines() == [
        "Title:      A task",
        "Backends:   gloo, nccl",
        "Devices:    cpu",
        "Measured:   on T4, L4",
        "Goal:       Prec@1 >= 80",
        "Light goal: Prec@1 >= 50",
        "Data:       digits",
        "Presets:    spec, tiny",
        "Workers:    up to 4: the data are few",
        "Free:       epochs",
    ]
    assert [line.rstrip() for line in table.splitlines()] == [
        "PARAMETER   SPEC  TINY  MEANING",
        "epochs      3     1     passes (int, >= 1)",
        "kind        a           which (a, b)",
        "goal_full   80.0        goal (float, 0..100)",
        "goal_light  50.0        light goal (float)",
        "",
        "A note.",
    ]
    assert printed.err == "\nNext: mlbench run NAME 1 2 --task mine --task-path x --set epochs=3\n"


def test_a_task_with_nothing_to_tell_has_no_empty_lines(capsys: Captured) -> None:
    bare = Task("bare", "z8", "Bare", "bare", ("true",), ("gloo",), ("cpu",), "none", {}, {"spec": {}})
    _describe(bare, "")
    printed = capsys.readouterr()
    assert [line.partition(":")[0] for line in printed.out.splitlines()[:5]] == [
        "Title", "Backends", "Devices", "Data", "Presets"
    ]  # fmt: skip
    assert printed.err == "\nNext: mlbench run NAME 1 2 --task bare\n"
    assert (_document(bare)["goal"], _document(bare)["workers"]) == (None, None)


def test_tasks_are_listed_with_their_goals(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setattr(tasks, "load_catalog", lambda: {"mine": TASK})
    monkeypatch.setattr(tasks, "use_task_folder", lambda path: None)
    tasks.tasks()
    printed = capsys.readouterr()
    assert rows(printed.out) == [
        ["TASK", "NUMBER", "TITLE", "BACKENDS", "DEVICES", "GOAL"],
        ["mine", "z9", "A", "task", "gloo,nccl", "cpu", "Prec@1", ">=", "80"],
    ]
    assert printed.err == "\nDetails: mlbench tasks TASK\n"
    tasks.tasks(task_path="my tasks", output=Format.json)
    printed = capsys.readouterr()
    assert json.loads(printed.out)["tasks"] == [_document(TASK)]
    assert printed.err == ""


# --- methods ----------------------------------------------------------------------------------------------------------


def test_methods_are_listed_or_one_is_explained(capsys: Captured) -> None:
    methods.methods()
    lines = rows(capsys.readouterr().out)
    assert lines[0][0] == "METHOD"
    assert [line[0] for line in lines[1:] if line[0] in PRESETS] == list(PRESETS)
    methods.methods("bsp")
    printed = capsys.readouterr()
    assert printed.out.startswith(f"Method:  {PRESETS['bsp'].summary}\nSends:   {PRESETS['bsp'].bytes} bytes per rank")
    assert "Note:" not in printed.out
    assert "--task digits_resnet --method bsp --set comm.AXIS=VALUE" in printed.err
    plan = next(line for line in rows(printed.out) if line[:1] == ["plan"])
    assert plan[1] == resolve("bsp").plan == "all"
    methods.methods("noop")
    assert "Note:    Replicas diverge." in capsys.readouterr().out
    with pytest.raises(NotFoundError, match=r'There is no method "fussion"\. Did you mean "fusion"'):
        methods.methods("fussion")


def test_a_method_as_a_document(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    methods.methods("noop", output=Format.json)
    document = json.loads(capsys.readouterr().out)
    axes, companions = document.pop("axes"), document.pop("combines_with")
    preset = PRESETS["noop"]
    assert document == {
        "schema_version": 1,
        "name": "noop",
        "summary": preset.summary,
        "bytes_sent": "0",
        "source": "measurement",
        "reaches_goals": False,
        "note": preset.note,
    }
    assert (axes["transport"], axes) == ("noop", resolve("noop").axes())
    assert all(isinstance(values, list) for values in companions.values())
    monkeypatch.setattr(methods, "list_companions", lambda name: {})  # of all of them takes a third of a second
    methods.methods(output=Format.json)
    assert [each["name"] for each in json.loads(capsys.readouterr().out)["methods"]] == list(PRESETS)


# --- config -----------------------------------------------------------------------------------------------------------


def test_settings_are_shown_with_where_they_come_from(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    file = home / "config.toml"
    config.show(A_COMMAND)
    assert capsys.readouterr().out == ""
    config.show(NO_COMMAND)
    printed = capsys.readouterr()
    assert printed.err == f"\nConfig file: {file} (does not exist yet)\nChange it with: mlbench config set KEY VALUE\n"
    assert ["timeout", "(24h)", "built", "in", "MLBENCH_TIMEOUT"] in [line[:5] for line in rows(printed.out)]
    config.set_("timeout", "2h")
    assert capsys.readouterr().out == f"timeout = 2h ({file}, line 1)\n"
    config.show(NO_COMMAND, Format.json)
    document = json.loads(capsys.readouterr().out)
    assert (document["file"], document["exists"]) == (str(file), True)
    found = document["settings"]["timeout"]
    assert (found["value"], found["source"], found["built_in"], found["variable"]) == (
        "2h", "config", "24h", "MLBENCH_TIMEOUT"
    )  # fmt: skip
    assert document["settings"]["registry"] == {
        "value": None,
        "source": "built-in",
        "origin": "built in",
        "built_in": "none",
        "variable": "MLBENCH_REGISTRY",
        "help": "default prefix of the task images, for clusters without their own",
    }
    config.show(NO_COMMAND)
    assert capsys.readouterr().err.startswith(f"\nConfig file: {file}\n")


def test_a_setting_is_got_set_and_unset(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    with pytest.raises(NotFoundError, match='"timeout" is not set; built in: 24h') as caught:
        config.get("timeout")
    assert caught.value.hint == "mlbench config set timeout VALUE"
    config.set_("timeout", "2h")
    assert capsys.readouterr().err == ""
    config.get("timeout")
    assert capsys.readouterr().out == "2h\n"
    config.get("timeout", Format.json)
    document = json.loads(capsys.readouterr().out)
    assert (document["key"], document["value"], document["source"]) == ("timeout", "2h", "config")
    monkeypatch.setenv("MLBENCH_TIMEOUT", "3h")
    config.set_("timeout", "4h", Format.json)
    printed = capsys.readouterr()
    assert json.loads(printed.out)["value"] == "3h"
    assert printed.err == "Warning: The environment variable MLBENCH_TIMEOUT is also set and takes precedence.\n"
    monkeypatch.delenv("MLBENCH_TIMEOUT")
    file = home / "config.toml"
    config.unset("timeout")
    assert capsys.readouterr().out == f"timeout is no longer set in {file}.\n"
    config.unset("timeout", Format.json)
    assert json.loads(capsys.readouterr().out)["removed"] is False
    config.unset("timeout")
    assert capsys.readouterr().out == f"timeout was not set in {file}.\n"
    config.path(Format.json)
    assert json.loads(capsys.readouterr().out) == {"schema_version": 1, "file": str(file), "exists": True}


def test_a_cluster_that_does_not_exist_yet_is_a_warning(capsys: Captured) -> None:
    config.set_("cluster", "lab")
    assert 'Warning: There is no cluster "lab" yet; runs fail until there is one.' in capsys.readouterr().err
    for known in ("local", "far"):
        Store().record_cluster(Cluster("far", "kind"))
        config.set_("cluster", known)
        assert "Warning" not in capsys.readouterr().err
    config.set_("namespace", "lab")
    assert "Warning" not in capsys.readouterr().err


# --- prices -----------------------------------------------------------------------------------------------------------


def table(*dates: str) -> PriceTable:
    entries = {f"m{number}": 1.0 for number in range(len(dates))}
    as_of = {f"m{number}": text for number, text in enumerate(dates)}
    return PriceTable("USD", "a list", "v1", ({"on-demand": {"near": entries}, "as-of": as_of},))


def test_old_prices_are_told_with_how_to_update_them(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    ages = {"2020-01-01": pricing.OLD_DAYS, "2019-01-01": pricing.OLD_DAYS + 1}
    monkeypatch.setattr(pricing, "age_in_days", lambda text, today=None: ages.get(str(text)))
    tables = {"gke": table("2020-01-01"), "eks": table("2020-01-01", "2019-01-01"), "aks": table()}
    monkeypatch.setattr(pricing, "load_prices", tables.__getitem__)
    prices.show(A_COMMAND)
    assert capsys.readouterr().out == ""
    prices.show(NO_COMMAND)
    printed = capsys.readouterr()
    shown = {line[0]: line[1:] for line in rows(printed.out)}
    assert shown["gke"] == ["near", "1", "90"]
    assert shown["eks"] == ["near", "2", "90", "to", "91"]
    assert printed.err.splitlines() == [
        f"Some prices are older than {pricing.OLD_DAYS} days. To update: mlbench prices update eks",
        *(f"{name}: a list" for name in PAID),
    ]
    prices.show(NO_COMMAND, output=Format.json)
    assert json.loads(capsys.readouterr().out)["gke"] == {
        "source": "a list", "currency": "USD", "table": "v1", "regions": {"near": 1}
    }  # fmt: skip
    tables["eks"] = tables["gke"]
    prices.show(NO_COMMAND)
    assert "older than" not in capsys.readouterr().err


def test_the_prices_of_the_published_results(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    found = ArchivedPrice("t", "n1", 0.5, None, "a page")
    monkeypatch.setattr(pricing, "load_archive", lambda: [found])
    prices.show(NO_COMMAND, archive=True)
    assert rows(capsys.readouterr().out)[1] == ["t", "n1", "0.5000", "unknown", "a", "page"]
    prices.show(NO_COMMAND, archive=True, output=Format.json)
    assert json.loads(capsys.readouterr().out) == {"schema_version": 1, "currency": "USD", "prices": [vars(found)]}


def test_prices_are_updated_by_cloud_and_region(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    asked: list[Any] = []

    def update_prices(name: str, regions: tuple[str, ...]) -> FetchedPrices:
        asked.append((name, regions))
        on_demand = {"near": {"a": 1.0, "b": 2.0}} if regions else {}
        return FetchedPrices(name, "its list", on_demand, {})

    monkeypatch.setattr(pricing, "update_prices", update_prices)
    prices.update(["gcloud", "eks"], ["near"])
    prices.update(output=Format.json)
    assert asked == [("gke", ("near",)), ("eks", ("near",)), *((name, ()) for name in PAID)]
    first, *_ = printed = capsys.readouterr().out.splitlines()
    assert first == "gke: 2 prices of near (its list)"
    assert json.loads("\n".join(printed[2:]))["aks"] == {"source": "its list", "prices": 0}
    prices.update(["aks"])
    assert capsys.readouterr().out == "aks: 0 prices of no region (its list)\n"
    with pytest.raises(UsageError, match='"kind" has no prices'):
        prices.update(["kind"])


# --- images -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "own", "default", "place"),
    [
        ("ghcr.io/me/", "example.org/own", "example.org/default", "ghcr.io/me"),
        (None, "example.org/own", "example.org/default", "example.org/own"),
        (None, None, "example.org/default/", "example.org/default"),
        (None, None, None, None),
        (None, "mlbench.local/x", None, None),
    ],
)
def test_the_registry_is_given_or_the_clusters_or_the_default(
    monkeypatch: pytest.MonkeyPatch, given: str | None, own: str | None, default: str | None, place: str | None
) -> None:
    monkeypatch.setattr(images, "LOCAL_REGISTRY", "mlbench.local")
    store = Store()
    store.record_cluster(Cluster("lab", "kind", details={} if own is None else {"registry": own}))
    if default is not None:
        monkeypatch.setenv("MLBENCH_REGISTRY", default.rstrip("/"))
    if place is None:
        with pytest.raises(UsageError, match='The cluster "lab" has no registry'):
            _find_registry(store, given, "lab")
    else:
        found, cluster = _find_registry(store, given, "lab")
        assert (found, cluster.name if cluster else None) == (place, "lab")


@pytest.mark.parametrize(
    ("given", "provider", "machine", "wanted", "platforms"),
    [
        ("linux/amd64,linux/arm64", "gke", "x86_64", "linux/arm64", ("linux/amd64", "linux/arm64")),
        (None, None, "x86_64", "linux/arm64", ()),
        (None, "kind", "x86_64", "linux/arm64", ()),
        (None, "gke", "x86_64", "linux/amd64", ()),
        (None, "gke", "AMD64", "linux/amd64", ()),
        (None, "gke", "aarch64", "linux/arm64", ()),
        (None, "gke", "arm64", "linux/arm64", ()),
        (None, "gke", "arm64", "linux/amd64", ("linux/amd64",)),
        (None, "eks", "riscv64", "linux/amd64", ("linux/amd64",)),
    ],
)
def test_images_are_built_for_the_processors_of_the_cluster(
    monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
    given: str | None,
    provider: str | None,
    machine: str,
    wanted: str,
    platforms: tuple[str, ...],
) -> None:
    monkeypatch.setattr(images, "machine", lambda: machine)
    monkeypatch.setattr(images, "platform_of", lambda cluster: wanted)
    cluster = None if provider is None else Cluster("lab", provider)
    assert _choose_platforms(given, cluster) == platforms
    is_told = given is None and bool(platforms)
    words = f"Building images for {wanted}, the platform of lab (change it with --platform).\n"
    assert capsys.readouterr().err == (words if is_told else "")


def test_images_are_looked_for_in_the_registry(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    foreign = Task(**{**vars(TASK), "name": "theirs", "image": "ghcr.io/them/theirs", "origin": "/tasks"})
    own = Task(**{**vars(TASK), "name": "own", "image": "own", "origin": "/tasks"})
    monkeypatch.setattr(images, "load_catalog", lambda: {task.name: task for task in (TASK, foreign, own)})
    monkeypatch.setattr(images, "_find_registry", lambda store, registry, cluster: ("ghcr.io/me", None))
    monkeypatch.setattr(registry_login, "find_registry_login", lambda cluster, place: "login")
    asked: list[Any] = []

    def find(image: Any, login: Any) -> Any:
        asked.append((str(image.repository), login))
        is_mine = "mine" in str(image.repository)
        return SimpleNamespace(
            presence=SimpleNamespace(value="present" if is_mine else "absent"),
            digest="sha256:abc" if is_mine else "",
            words="it is not there",
        )

    monkeypatch.setattr(images, "find_image", find)
    images.show(A_COMMAND)
    assert capsys.readouterr().out == ""
    images.show(NO_COMMAND)
    head, mine, other = rows(capsys.readouterr().out)
    assert head == ["IMAGE", "PRESENCE", "DIGEST"]
    assert (mine[0].partition(":")[0], mine[1:]) == ("ghcr.io/me/mine", ["present", "sha256:abc"])
    assert (other[0].partition(":")[0], other[1:]) == ("ghcr.io/me/own", ["absent", "it", "is", "not", "there"])
    assert {login for _, login in asked} == {"login"}
    images.show(NO_COMMAND, output=Format.json)
    document = json.loads(capsys.readouterr().out)
    assert document["registry"] == "ghcr.io/me"
    found = {name: (each["presence"], each["digest"]) for name, each in document["images"].items()}
    assert found == {"mine": ("present", "sha256:abc"), "own": ("absent", None)}


@pytest.fixture
def pushed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is built and pushed; "mine" gets a digest, and "theirs" brings a reference of its own."""
    told: list[Any] = []
    theirs = Task(**{**vars(TASK), "name": "theirs", "image": "ghcr.io/them/theirs", "origin": "/tasks"})
    known = {"mine": TASK, "theirs": theirs}

    def push_images(chosen: list[Task], place: str, build: Any, login: str, report: Any) -> dict[str, str]:
        report("pushing")
        told.append(([task.name for task in chosen], place, (build.base, build.index, build.platforms), login))
        return {task.image if "/" in task.image else f"{task.image}:1.0": f"sha256:{task.name}" for task in chosen}

    monkeypatch.setattr("mlbench_cli.tasks.image_builds.push_images", push_images)
    monkeypatch.setattr(images, "load_catalog", lambda: known)
    monkeypatch.setattr(images, "load_task", known.__getitem__)
    monkeypatch.setattr(images, "use_task_folder", lambda path: None)
    monkeypatch.setattr(images, "_choose_platforms", lambda given, cluster: (given or "here",))
    monkeypatch.setattr(registry_login, "find_registry_login", lambda cluster, place: f"login of {place}")
    return told


def test_images_of_all_our_tasks_are_pushed_and_recorded_with_the_cluster(pushed: list[Any], capsys: Captured) -> None:
    store = Store()
    store.choose_cluster(store.record_cluster(Cluster("lab", "gke", details={"registry": "ghcr.io/me"})))
    images.push()
    assert pushed == [(["mine"], "ghcr.io/me", (None, None, ("here",)), "login of ghcr.io/me")]
    printed = capsys.readouterr()
    assert printed.out == "ghcr.io/me/mine:1.0 sha256:mine\n"
    assert printed.err == "pushing\n"
    assert Store().cluster("lab").details["images"] == {"mine:1.0": "sha256:mine"}


def test_images_of_another_registry_are_not_those_of_the_cluster(pushed: list[Any], capsys: Captured) -> None:
    store = Store()
    store.record_cluster(Cluster("lab", "gke", details={"registry": "ghcr.io/me"}))
    images.push(["mine"], "ghcr.io/other", "lab", "linux/arm64", "efa", "https://x", output=Format.json)
    assert pushed == [(["mine"], "ghcr.io/other", ("efa", "https://x", ("linux/arm64",)), "login of ghcr.io/other")]
    assert json.loads(capsys.readouterr().out) == {
        "schema_version": 1, "registry": "ghcr.io/other", "digests": {"mine:1.0": "sha256:mine"}
    }  # fmt: skip
    assert "images" not in Store().cluster("lab").details


def test_a_task_with_a_whole_reference_needs_no_registry(pushed: list[Any], capsys: Captured) -> None:
    images.push(["theirs"])
    assert pushed == [(["theirs"], "ghcr.io/them", (None, None, ("here",)), "login of ghcr.io/them")]
    assert capsys.readouterr().out == "ghcr.io/them/theirs sha256:theirs\n"
    with pytest.raises(UsageError, match="has no registry"):
        images.push(["theirs", "mine"])


def test_a_cluster_that_is_deleted_meanwhile_has_no_digests(
    pushed: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    lab = Cluster("lab", "gke", details={"registry": "ghcr.io/me"})
    monkeypatch.setattr(images, "_find_registry", lambda store, registry, cluster: ("ghcr.io/me", lab))
    images.push()
    assert "Warning: The cluster lab has been deleted, so the digests were not recorded." in capsys.readouterr().err


# --- the table of commands --------------------------------------------------------------------------------------------


def test_every_command_is_in_one_panel_and_can_be_loaded() -> None:
    names = commands.names()
    assert len(names) == len(set(names))
    assert set(commands.EVERYDAY) <= set(names)
    assert {"runs", "results", "clusters", "settings"} == {name.lower() for name in commands.PANELS}
    assert set(commands.TOPICS) == {*(name.lower() for name in commands.PANELS), "exit-codes"}
    found = commands.find("compare")
    assert found is not None
    assert (found.module, found.attribute) == ("mlbench_cli.commands.compare", "compare")
    assert commands.find("nothing") is None


@pytest.mark.parametrize("topic", [None, *commands.TOPICS])
def test_help_fits_eighty_columns(topic: str | None) -> None:
    text = commands.help_text(topic)
    assert text.endswith("\n")
    assert max(map(len, text.splitlines())) <= 80


def test_help_of_a_topic_has_its_commands_and_no_others() -> None:
    first = {line.split()[0] for line in commands.help_text("results").splitlines() if line.startswith("  ")}
    assert first == set(commands.PANELS["Results"])
    everyday = commands.help_text()
    assert all(f"\n  {name} " in everyday for name in commands.EVERYDAY)
    assert "\n  gate " not in everyday
    assert "  124  timeout\n" in commands.help_text("exit-codes")
    with pytest.raises(KeyError):
        commands.help_text("nothing")
