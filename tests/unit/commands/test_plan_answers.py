"""What `mlbench plan` reads from its options, and how it shows candidates: rows, documents, commands, limits."""

import json
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml

from mlbench_cli import api
from mlbench_cli.commands import plan as module
from mlbench_cli.commands._quotas import creation_command, creation_options, leave_out_refused
from mlbench_cli.commands.plan import (
    CLOUDS,
    Trial,
    _check_limits,
    _clouds,
    _commands,
    _document,
    _draw,
    _item_document,
    _measure,
    _numbers,
    _offer_here,
    _offers,
    _print,
    _print_trials,
    _row,
    _settings,
    _warnings,
)
from mlbench_cli.console import Format
from mlbench_cli.errors import CapacityError, CredentialError, UnreachableError, UsageError
from mlbench_cli.predict.machines import HERE, MachineType, Speed
from mlbench_cli.predict.plan import Candidate, Excluded, Offer, PlanResult
from mlbench_cli.predict.samples import Basis, SamplesToGoal
from mlbench_cli.runs.request import Request
from mlbench_cli.simulator.step import Step
from providers import pricing
from providers.pricing import PriceTable
from tests.unit.predict.test_plan import question as make_question

Captured = pytest.CaptureFixture[str]
GKE = MachineType("gke", "n1-standard-4", "", 0, 4, 15, 10)
GKE_GPU = MachineType("gke", "n1-standard-8", "t4", 2, 8, 30, 16, "n1-standard-8+t4+t4")
EKS = MachineType("eks", "g6.xlarge", "l4", 1, 4, 16, 10)
LOCAL = MachineType(HERE, "this-machine", "", 0, 2, 8, 0)
SAMPLES = SamplesToGoal(5000.0, 64, None, 0.0, Basis.MEASURED, "one run tells")


def candidate(**changes: Any) -> Candidate:
    """Two hours for 6 USD on two machines; the 90th percentile is twice and the 10th half of the median."""
    fields: dict[str, Any] = {
        "offer": Offer(GKE, "europe-west4", 1.4, 0.1, "2026-01-01"),
        "workers": 2,
        "method": "bsp",
        "rank_batch": 32,
        "batch": 64,
        "samples": 5000.0,
        "kept": 0.625,
        "step": Step(0.1, 0.08, 0.05, 3, 4e5, 1),
        "seconds": 7200.0,
        "price": 6.0,
        "startup": 480.0,
        "spread": 0.6931471805599453 / 1.2816,
        "parts": {"speed": 0.3, "samples": 0.4},
        "bases": {"speed": Basis.PUBLISHED, "price": Basis.MEASURED},
        "speed": Speed(1.0, 0.1, Basis.PUBLISHED, "a datasheet"),
    }
    return Candidate(**{**fields, **changes})


def at(machine: MachineType, **offer: Any) -> Offer:
    return Offer(machine, "europe-west4", 1.4, **offer)


def result(*items: Candidate, excluded: tuple[Excluded, ...] = (), **limits: Any) -> PlanResult:
    found = items or (candidate(),)
    return PlanResult(found, found, found[:1], excluded, make_question(samples=SAMPLES, **limits))


def base(**spec: Any) -> Any:
    fields = {"engine": "local", "device": "cpu", "preset": "tiny", "cpus": None, "parameters": {}, **spec}
    return SimpleNamespace(run={"name": "demo-2", "spec": fields})


# --- options ----------------------------------------------------------------------------------------------------------


def test_clouds_are_named_once_and_by_their_aliases() -> None:
    assert _clouds(",".join(CLOUDS)) == ["gke", "eks", "aks", "here"]
    assert _clouds("gke, aws ,eks,gcloud") == ["gke", "eks"]
    with pytest.raises(UsageError, match=r'--clouds "gek" is not known.*"gke"'):
        _clouds("here,gek")


@pytest.mark.parametrize(
    ("text", "kind", "numbers"),
    [
        ("1,2,4", int, [1, 2, 4]),
        ("4,1,4", int, [1, 4]),
        ("10000", int, [10_000]),
        ("0.5,2", float, [0.5, 2.0]),
        ("0.001", float, [0.001]),
    ],
)
def test_a_list_of_numbers(text: str, kind: type, numbers: list[float]) -> None:
    assert _numbers(text, "--workers", kind) == numbers


@pytest.mark.parametrize(
    ("text", "kind"), [("", int), ("0", int), ("1,-2", int), ("1.5", int), ("10001", int), ("x", float), ("nan", float)]
)
def test_what_is_no_list_of_numbers(text: str, kind: type) -> None:
    with pytest.raises(UsageError, match=f'--batch "{text}" is not a list of numbers from 1 to 10000') as caught:
        _numbers(text, "--batch", kind)
    assert caught.value.hint == "--batch 1,2,4"


def test_what_is_asked_for_is_checked_before_anything_is_read() -> None:
    with pytest.raises(UsageError, match=r'There is no task "digits_resne"\..*Did you mean "digits_resnet"'):
        module.plan("digits_resne")
    with pytest.raises(UsageError, match='--goal "half" is neither full nor light') as caught:
        module.plan("digits_resnet", goal="half")
    assert caught.value.hint == "mlbench tasks digits_resnet"
    for goal in ("full", "light", None):
        with pytest.raises(UsageError, match="--deadline"):
            module.plan("digits_resnet", goal=goal, deadline="long")


@pytest.fixture
def planning(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `plan` asks the parts below it for."""
    asked: dict[str, Any] = {}

    def ask(name: str, answer: Any) -> Any:
        def record(*words: Any, **named: Any) -> Any:
            asked[name] = (*words, *named.values())
            return answer

        return record

    monkeypatch.setattr(module, "Store", lambda **_: "store")
    monkeypatch.setattr(module, "open_archives", ask("open", ["archive"]))
    monkeypatch.setattr(module, "make_question", ask("question", (make_question(samples=SAMPLES), base())))
    monkeypatch.setattr(module, "_offers", ask("offers", ([], [])))
    monkeypatch.setattr(module, "_offer_here", ask("here", [at(LOCAL)]))
    monkeypatch.setattr(module, "make_plan", ask("plan", result(candidate(offer=at(LOCAL)))))
    monkeypatch.setattr(module, "leave_out_refused", ask("quotas", result(candidate(offer=at(LOCAL)))))
    monkeypatch.setattr(module, "_measure", ask("measure", [Trial("plan-1", "a", 110.0, 100.0, 0.1)]))
    monkeypatch.setattr(module, "_draw", ask("draw", None))
    monkeypatch.setattr(module, "_settings", lambda *_: {})
    return asked


def test_a_plain_plan_compares_everything_and_starts_nothing(planning: dict[str, Any], capsys: Captured) -> None:
    module.plan("digits_resnet")
    assert planning["open"][:4] == ("store", "digits_resnet", None, False)
    assert planning["question"][1:] == (["archive"], None, None)
    assert planning["offers"] == (["gke", "eks", "aks", "here"], (), False, 0.05)
    assert planning["here"][2] == 0.0
    question, offers, excluded = planning["plan"]
    assert (question.workers, question.batch_factors) == ([1, 2, 4, 8, 16, 32], [0.5, 1.0, 2.0, 4.0])
    assert (question.max_price, question.deadline) == (None, None)
    assert (offers, excluded) == ([at(LOCAL)], [])
    assert not planning.keys() & {"quotas", "measure", "draw"}
    assert "Best:" in capsys.readouterr().out


def test_a_plan_passes_its_options_on(planning: dict[str, Any], capsys: Captured) -> None:
    module.plan(
        "digits_resnet", "light", ["a"], 9.5, "90m", "gke", ["near"], True, 0.5, "4,2", "any", "1", 0.0,
        Path("out"), 3, True, output=Format.json,
    )  # fmt: skip
    assert planning["open"][2] == ["a"]
    assert planning["question"][2:] == ("light", "any")
    assert planning["offers"] == (["gke"], ["near"], True, 0.5)
    question = planning["plan"][0]
    assert (question.workers, question.batch_factors) == ([2, 4], [1.0])
    assert (question.max_price, question.deadline) == (9.5, 5400.0)
    assert "here" not in planning
    assert planning["quotas"][0] == "store"
    assert planning["measure"][3:] == ("light", 3)
    assert planning["draw"][2] == Path("out")
    document = json.loads(capsys.readouterr().out)
    assert document["task"] == "digits_resnet"
    assert document["measured"] == [
        {"run": "plan-1", "candidate": "a", "planned_seconds": 110.0, "measured_seconds": 100.0, "error": 0.1}
    ]


# --- offers -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def prices(monkeypatch: pytest.MonkeyPatch) -> None:
    """GKE sells two machines in one region and one of them in another; nothing else has a price."""
    on_demand = {
        "near": {"n1-standard-4": 0.2, "n1-standard-8": 0.4, "t4": 0.35, "control-plane": 0.1},
        "far": {"n1-standard-4": 0.3},
    }
    spot = {"near": {"n1-standard-4": 0.05}}
    layer: Mapping[str, Any] = {"date": "2026-01-02", "as-of": {"t4": "2025-12-01"}, "on-demand": on_demand}
    table = PriceTable("USD", "list", "t1", ({**layer, "spot": spot},))
    empty = PriceTable("USD", "list", "t1", ())
    monkeypatch.setattr(pricing, "load_prices", lambda name: table if name == "gke" else empty)
    monkeypatch.setattr(module, "load_machines", lambda: (GKE, GKE_GPU, EKS))


def shown(offers: list[Offer]) -> list[tuple[Any, ...]]:
    return [
        (
            *(str(each.machine), each.region, round(each.price, 3), each.control_plane),
            *(each.as_of, each.is_spot, each.interrupted),
        )
        for each in offers
    ]


@pytest.mark.usefixtures("prices")
def test_an_offer_is_the_sum_of_its_parts_at_the_date_of_the_oldest_price() -> None:
    offers, excluded = _offers(["gke", HERE], [], False, 0.05)
    assert shown(offers) == [
        ("n1-standard-4", "far", 0.3, 0.0, "2026-01-02", False, 0.0),
        ("n1-standard-4", "near", 0.2, 0.1, "2026-01-02", False, 0.0),
        ("n1-standard-8+t4", "near", 1.1, 0.1, "2025-12-01", False, 0.0),
    ]
    assert excluded == []


@pytest.mark.usefixtures("prices")
def test_spot_machines_are_offered_if_asked_where_their_price_is_known() -> None:
    offers, _ = _offers(["gke"], ["near"], True, 0.05)
    assert [each for each in shown(offers) if each[5]] == [
        ("n1-standard-4", "near", 0.05, 0.1, "2026-01-02", True, 0.05)
    ]
    assert len(offers) == 3


@pytest.mark.usefixtures("prices")
def test_machines_without_a_price_in_the_regions_are_counted() -> None:
    offers, excluded = _offers(["gke", "eks"], ["far"], False, 0.05)
    assert [(each.machine, each.region) for each in offers] == [(GKE, "far")]
    assert excluded == [
        Excluded(f"machine types of {name} have no known price in these regions", 1, f"mlbench prices update {name}")
        for name in ("gke", "eks")
    ]


def test_this_machine_is_offered_if_the_calibration_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "effective_cores", lambda: 6.9)
    excluded: list[Excluded] = []
    (here,) = _offer_here(base(), make_question(), 0.25, excluded)
    assert (here.machine.provider, here.machine.vcpus, here.machine.gpus, here.machine.kind) == (
        HERE, 6, 0, "here/this-machine"
    )  # fmt: skip
    assert (here.region, here.price, here.control_plane, here.is_spot, excluded) == ("here", 0.25, 0.0, False, [])
    assert 0.1 < here.machine.memory_gib < 1e5
    question = make_question()  # two ranks of one core each
    (gpu,) = _offer_here(base(device="gpu"), question, 0.0, excluded)
    assert (gpu.machine.gpus, gpu.machine.vcpus) == (1, 2)
    assert _offer_here(base(engine="kubernetes"), question, 0.0, excluded) == []
    assert excluded == [Excluded("the calibration is from another machine", 1, "A calibration here: --cluster local")]


# --- limits -----------------------------------------------------------------------------------------------------------


def test_a_deadline_is_kept_if_the_fastest_may_meet_it() -> None:
    """Its 10th percentile is an hour and its 90th four hours."""
    _check_limits(result(deadline=3600.5))
    with pytest.raises(UsageError) as caught:
        _check_limits(result(deadline=3599.0))
    assert caught.value.message == (
        "No candidate meets the deadline of 59 min 59 s: the fastest, 2 x n1-standard-4, bsp, batch 64 on gke, takes "
        "about 2 h."
    )
    assert caught.value.hint is not None
    assert caught.value.hint.startswith(("--deadline 240m,", "--deadline 241m,"))


def test_a_price_is_kept_if_the_cheapest_may_cost_no_more() -> None:
    """It costs from 3 to 12 USD."""
    dear = candidate(seconds=100.0, price=50.0)
    _check_limits(result(dear, candidate(), max_price=3.01))
    with pytest.raises(UsageError) as caught:
        _check_limits(result(dear, candidate(), max_price=2.99))
    assert caught.value.message == (
        "No candidate costs at most 2.99 USD: the cheapest, 2 x n1-standard-4, bsp, batch 64 on gke, costs about "
        "6.00 USD."
    )
    assert caught.value.hint in ("--max-price 12, or --spot", "--max-price 12.01, or --spot")


def test_without_limits_nothing_is_refused() -> None:
    _check_limits(result(candidate(seconds=1e9, price=1e9)))


def test_old_prices_are_told_with_the_greatest_age(monkeypatch: pytest.MonkeyPatch) -> None:
    def old(days: int) -> str:
        return f"{datetime.now(UTC) - timedelta(days=days):%Y-%m-%d}"

    items = [
        candidate(offer=at(machine, as_of=None if days is None else old(days)))
        for machine, days in ((GKE, 91), (GKE, 120), (GKE, 100), (EKS, 90), (LOCAL, None))
    ]
    assert _warnings(result(*items)) == ["prices of gke are up to 120 days old: mlbench prices update gke"]


def test_guessed_speeds_of_the_best_are_told() -> None:
    guessed = Speed(1.0, 0.3, Basis.GUESSED, "a guess")
    items = tuple(candidate(offer=at(machine), speed=guessed) for machine in (GKE_GPU, GKE, GKE))
    found = replace(result(*items), best=items)
    assert _warnings(found) == [
        "the speed of n1-standard-4, n1-standard-8+t4 is a guess; a short calibration on one such machine replaces it"
    ]
    assert _warnings(replace(found, best=(candidate(offer=at(GKE)),))) == []


# --- answers ----------------------------------------------------------------------------------------------------------


def test_settings_are_those_that_differ_from_the_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = {"batch_size": 32, "global_batch": 64, "momentum": 0.9}
    presets: list[str] = []

    def resolve(preset: str) -> dict[str, Any]:
        presets.append(preset)
        return usual

    monkeypatch.setattr(module, "load_catalog", lambda: {"x": SimpleNamespace(resolve=resolve)})
    item = candidate(batch=128, rank_batch=16)
    assert _settings("x", base(parameters={"batch_size": 8, "momentum": 0.9, "gone": 1}), item) == {"batch_size": 16}
    assert _settings("x", base(parameters={"global_batch": 8, "momentum": 0.5}), item) == {
        "global_batch": 128,
        "momentum": 0.5,
    }
    assert _settings("x", base(preset=None), replace(item, rank_batch=32)) == {}
    assert presets == ["tiny", "tiny", "spec"]


@pytest.fixture
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_settings", lambda *_: {})


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        ({"preset": "spec"}, "--method bsp --num-cpus 1"),
        ({"preset": None, "cpus": 2.0}, "--method bsp --num-cpus 2"),
        ({"preset": "tiny"}, "--preset tiny --method bsp --num-cpus 1"),
    ],
)
@pytest.mark.usefixtures("no_settings")
def test_the_command_for_this_machine(spec: dict[str, Any], options: str) -> None:
    assert _commands("x", base(**spec), candidate(offer=at(LOCAL))) == [f"mlbench run plan 2 --task x {options}"]


def test_the_commands_for_a_cloud(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_settings", lambda *_: {"batch_size": 16, "name": "a b"})
    item = candidate(offer=at(GKE_GPU), seconds=1800.0)
    create, run, delete = _commands("x", base(preset="spec"), item)
    assert create == (
        "mlbench create-cluster gke 2 plan --machine-type n1-standard-8 --gpu-type t4 --num-gpus 2 "
        "--zone europe-west4-b --ttl 1h"
    )
    assert run == "mlbench run plan 2 --task x --set batch_size=16 --set 'name=a b' --method bsp --gpu"
    assert delete == "mlbench delete-cluster plan-2"
    assert not _commands("x", base(), replace(item, offer=at(GKE)))[1].endswith("--gpu")


@pytest.mark.parametrize(
    ("item", "options"),
    [
        (candidate(), {"machine_type": "n1-standard-4", "zone": "europe-west4-b"}),
        (
            candidate(offer=at(EKS, is_spot=True)),
            {"machine_type": "g6.xlarge", "region": "europe-west4", "spot": True},
        ),
        (
            candidate(offer=at(GKE_GPU)),
            {"machine_type": "n1-standard-8", "gpu_type": "t4", "num_gpus": 2, "zone": "europe-west4-b"},
        ),
    ],
)
def test_the_options_that_create_a_cluster(item: Candidate, options: dict[str, Any]) -> None:
    assert creation_options(item) == options


@pytest.mark.parametrize(
    ("seconds", "spread", "hours"), [(60.0, 0.0, 1), (3600.0, 0.0, 1), (3601.0, 0.0, 2), (3000.0, 0.5, 2)]
)
def test_a_cluster_of_a_plan_lives_for_the_hours_that_it_may_take(seconds: float, spread: float, hours: int) -> None:
    command = creation_command(candidate(offer=at(EKS, is_spot=True), seconds=seconds, spread=spread))
    assert command == (
        f"mlbench create-cluster eks 2 plan --machine-type g6.xlarge --region europe-west4 --spot --ttl {hours}h"
    )


def test_a_row_of_a_candidate() -> None:
    assert _row(candidate()) == [
        *("gke", "europe-west4", "n1-standard-4", 2, "bsp", 64, "62 %", "2 h (1 h to 4 h)", "6 (3 to 12)"),
        *(None, "published"),
    ]
    spot = candidate(offer=at(GKE_GPU, is_spot=True), price=0.0, chance=0.755, kept=1.0)
    row = _row(spot)
    assert (row[2], row[6], row[8], row[9]) == ("n1-standard-8+t4 spot", "100 %", "0", "76 %")


def test_the_document_of_a_candidate() -> None:
    item = candidate(overhead=12.0, checkpoint_every=600.0, chance=0.5, offer=at(GKE, as_of="2026-01-01", is_spot=True))
    document = _item_document(item)
    ends = {key: document.pop(key) for key in ("low_seconds", "high_seconds", "low_price", "high_price")}
    assert ends == pytest.approx(
        {"low_seconds": 3600, "high_seconds": 14400, "low_price": 3, "high_price": 12}, rel=1e-4
    )
    assert document.pop("exposed_share") == pytest.approx(0.2)
    assert document == {
        "cloud": "gke",
        "region": "europe-west4",
        "machine": "n1-standard-4",
        "spot": True,
        "workers": 2,
        "method": "bsp",
        "rank_batch": 32,
        "global_batch": 64,
        "samples_to_goal": 5000.0,
        "samples_kept": 0.625,
        "step_seconds": 0.1,
        "seconds": 7200.0,
        "price": 6.0,
        "price_as_of": "2026-01-01",
        "interruption_seconds": 12.0,
        "checkpoint_every_seconds": 600.0,
        "chance": 0.5,
        "bases": {"speed": "published", "price": "measured"},
        "speed_note": "a datasheet",
    }


@pytest.mark.usefixtures("no_settings")
def test_the_document_of_a_plan() -> None:
    item = candidate(offer=at(LOCAL))
    excluded = (Excluded("no price", 3, "mlbench prices"),)
    document = _document("x", base(), result(item, excluded=excluded), 1.5)
    (best,), (pareto,) = document.pop("best"), document.pop("pareto")
    assert pareto == _item_document(item)
    assert {key: best[key] for key in best.keys() - pareto.keys()} == {
        "reasons": [
            "20% of a step is exposed communication",
            "at batch 64 a sample keeps 62% of its value",
            "the lowest price of all",
            "the shortest time of all",
        ],
        "commands": ["mlbench run plan 2 --task x --preset tiny --method bsp --num-cpus 1"],
    }
    by_cause = {each["cause"]: each for each in document.pop("sensitivities")}
    assert [*by_cause] == ["samples", "speed"]
    assert [each["share"] for each in by_cause.values()] == pytest.approx([0.16 / 0.25, 0.09 / 0.25])
    assert by_cause["samples"]["factor"] == pytest.approx(1.669, abs=1e-3)  # exp(1.2816 * 0.4)
    assert document == {
        "schema_version": 1,
        "task": "x",
        "run": "demo-2",
        "currency": "USD",
        "candidates": 1,
        "planning_seconds": 1.5,
        "samples_basis": "measured",
        "samples_note": "one run tells",
        "bases": {"measured": 0.5, "published": 0.5, "guessed": 0.0},
        "excluded": [{"reason": "no price", "count": 3, "hint": "mlbench prices"}],
        "warnings": [],
    }


@pytest.mark.usefixtures("no_settings")
def test_a_plan_in_words(capsys: Captured) -> None:
    found = result(candidate(offer=at(LOCAL)), excluded=(Excluded("no price", 3), Excluded("too slow", 1, "Wait.")))
    _print("x", base(), found, 1.26)
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert lines[0] == "Best:"
    assert [each.strip() for each in lines[1].split("  ") if each.strip()] == [
        *("CLOUD", "REGION", "MACHINE", "WORKERS", "METHOD", "BATCH", "SAMPLES KEPT", "TIME", "PRICE USD", "CHANCE"),
        "SPEED",
    ]
    assert lines[3].startswith("1. 2 x this-machine, bsp, batch 64: ")
    assert lines[3].endswith(". Speed: a datasheet.")
    assert lines[4] == "   mlbench run plan 2 --task x --preset tiny --method bsp --num-cpus 1"
    causes = lines.index("The first answer depends most on:")
    assert [each.split() for each in lines[causes + 2 : causes + 4]] == [
        ["samples", "64", "%", "x", "1.67"],
        ["speed", "36", "%", "x", "1.47"],
    ]
    assert [each.split() for each in lines[lines.index("Left out:") + 1 :]] == [
        ["REASON", "COUNT", "NEXT"],
        ["no", "price", "3", "-"],
        ["too", "slow", "1", "Wait."],
    ]
    assert printed.err.splitlines() == [
        "1 candidates in 1.3 s, from demo-2; figures: measured 50 %, published 50 %, guessed 0 %.",
        "One run tells.",
        "Times and prices are medians with 10th and 90th percentiles. Prices: machines and control plane.",
    ]


@pytest.mark.parametrize(("count", "rows"), [(12, 12), (13, 7), (24, 12), (25, 9)])
@pytest.mark.usefixtures("no_settings")
def test_a_long_line_of_candidates_is_thinned_to_a_page(capsys: Captured, count: int, rows: int) -> None:
    _print("x", base(), result(*(candidate(offer=at(LOCAL), workers=number + 1) for number in range(count))), 1.0)
    lines = capsys.readouterr().out.splitlines()
    begin = lines.index("Nothing is faster and cheaper than:") + 2
    assert lines[begin:].index("") == rows


def test_the_charts_of_a_plan_have_all_candidates_by_cloud(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    drawn: list[Any] = []

    def draw(*words: Any) -> list[Path]:
        drawn.append(words)
        return [Path("plan.svg")]

    monkeypatch.setattr(module, "draw_plan", draw)
    items = (candidate(), candidate(offer=at(LOCAL), price=0.0), candidate(seconds=60.0))
    _draw("x", replace(result(*items), pareto=items[1:]), Path("out"))
    clouds = {"gke": [(7200.0, 6.0), (60.0, 6.0)], "here": [(7200.0, 0.0)]}
    assert drawn == [("x", clouds, [(7200.0, 0.0), (60.0, 6.0)], [(7200.0, 6.0)], Path("out"))]
    assert capsys.readouterr().err == "Written: plan.svg\n"


def test_trials_have_an_error_if_they_reached_the_goal(capsys: Captured) -> None:
    trials = [
        Trial("plan-1", "a", 110.0, 100.0, 0.1),
        Trial("plan-2", "b", 50.0, 100.0, -0.5),
        Trial("plan-3", "c", 120.0, 100.0, 0.2),
        Trial("plan-4", "d", 65.0, None, None),
    ]
    _print_trials(trials)
    printed = capsys.readouterr()
    cells = [[cell.strip() for cell in line.split("  ") if cell] for line in printed.out.splitlines()[2:]]
    assert cells == [
        ["RUN", "CANDIDATE", "PLANNED", "MEASURED", "ERROR"],
        ["plan-1", "a", "1 min 50 s", "1 min 40 s", "+10 %"],
        ["plan-2", "b", "50.0 s", "1 min 40 s", "-50 %"],
        ["plan-3", "c", "2 min", "1 min 40 s", "+20 %"],
        ["plan-4", "d", "1 min 5 s", "goal not reached", "-"],
    ]
    assert printed.err == "Median error of the plan: 20 %.\n"
    _print_trials(trials[3:])
    assert capsys.readouterr().err == ""


class Started:
    """A client whose runs reach their goal in 100 s, but for the second one."""

    def __init__(self) -> None:
        self.store = "store"
        self.requests: list[Request] = []

    def submit(self, request: Request) -> Any:
        self.requests.append(request)
        return SimpleNamespace(wait=lambda: None)

    def open_run(self, store: str, name: str, unproven: bool) -> Any:
        assert (store, name, unproven) == ("store", f"{self.requests[-1].name}-2", True)
        outcome = "goal_missed" if len(self.requests) == 2 else "goal_reached"
        return nullcontext(SimpleNamespace(result={"outcome": outcome, "task_seconds": {"wall": 100.0}}))


@pytest.mark.parametrize(
    ("goal", "own", "light"),
    [("light", "full", True), (None, "light", True), ("full", "light", None), (None, None, None)],
)
def test_the_best_for_this_machine_are_run_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, goal: str | None, own: str | None, light: bool | None
) -> None:
    client = Started()
    monkeypatch.setattr(api, "Client", lambda **_: client)
    monkeypatch.setattr(module, "open_run", client.open_run)
    monkeypatch.setattr(module, "data_dir", lambda: tmp_path / "data")
    monkeypatch.setattr(module, "_settings", lambda *_: {"batch_size": 16})
    here = [candidate(offer=at(LOCAL), seconds=seconds, startup=10.0) for seconds in (500.0, 120.0, 210.0)]
    trials = _measure("x", base(cpus=2.0, goal=own), result(candidate(), *here), goal, 2)
    first, second = client.requests
    assert (first.workers, first.task, first.preset, dict(first.set), first.method) == (
        (2,), "x", "tiny", {"batch_size": 16}, "bsp"
    )  # fmt: skip
    assert (first.num_cpus, first.light, first.cluster) == (2, light, "local")
    assert first.name is not None
    assert second.name is not None
    assert [first.name[-2:], second.name[-2:]] == ["-1", "-2"]
    name = "2 x this-machine, bsp, batch 64"
    assert trials == [
        Trial(f"{first.name}-2", name, 110.0, 100.0, 110.0 / 100.0 - 1),
        Trial(f"{second.name}-2", name, 200.0, None, None),
    ]
    (file,) = (tmp_path / "data" / "plans").iterdir()
    document = yaml.safe_load(file.read_text())
    assert (document["title"], document["clusters"]) == ("The best candidates of a plan for x", ["local"])
    assert [run["name"] for run in document["runs"]] == ["best-1", "best-2"]


def test_what_is_for_no_machine_here_is_not_run() -> None:
    with pytest.raises(UsageError, match="none of them is for it"):
        _measure("x", base(), result(candidate()), None, 1)


# --- quotas -----------------------------------------------------------------------------------------------------------


class Questions:
    """Answers of the clouds to the candidates that are asked for, by provider and number of workers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answers: Mapping[tuple[str, int], Exception]) -> None:
        self.asked: list[tuple[str, int]] = []

        def ask(store: Any, item: Candidate) -> None:
            self.asked.append((item.offer.machine.provider, item.workers))
            if error := answers.get(self.asked[-1]):
                raise error

        monkeypatch.setattr("mlbench_cli.commands._quotas._ask", ask)


def best(*items: Candidate) -> PlanResult:
    return PlanResult(items, items, items, (), make_question(samples=SAMPLES))


def test_the_clouds_are_asked_once_for_each_of_the_best(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    found = best(candidate(), candidate(method="fusion"), candidate(workers=4), candidate(offer=at(LOCAL)))
    questions = Questions(monkeypatch, {})
    assert leave_out_refused(cast(Any, None), found) is found
    assert questions.asked == [("gke", 2), ("gke", 4)]
    assert capsys.readouterr().err.splitlines() == [
        f"Asking gke for {workers} x n1-standard-4 in europe-west4 …" for workers in (2, 4)
    ]


def test_a_cloud_without_credentials_is_asked_no_more(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    found = best(candidate(), candidate(workers=4), candidate(offer=at(EKS)), candidate(offer=at(EKS), workers=8))
    answers = {
        ("gke", 2): CredentialError("No login."),
        ("eks", 1): UsageError(""),
        ("eks", 2): UnreachableError("Silent."),
    }
    questions = Questions(monkeypatch, answers)
    assert leave_out_refused(cast(Any, None), found) is found
    assert questions.asked == [("gke", 2), ("eks", 2), ("eks", 8)]
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("Warning")]
    assert warnings == [
        "Warning: Quotas of gke were not checked: No login.",
        "Warning: 2 x g6.xlarge in europe-west4: Silent.",
    ]


def test_what_a_quota_refuses_is_left_out_with_the_first_line_of_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = candidate(workers=2), candidate(workers=4, seconds=3600.0)
    Questions(monkeypatch, {("gke", 4): CapacityError("No quota for 4 machines.", hint="Ask for more.\nOr wait.")})
    found = leave_out_refused(cast(Any, None), best(large, small))
    assert [item.workers for item in found.candidates] == [2]
    (excluded,) = found.excluded
    assert (excluded.reason, excluded.hint) == ("No quota for 4 machines", "Ask for more.")
