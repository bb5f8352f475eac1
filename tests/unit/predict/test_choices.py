"""Which candidate a plan chooses, why, with what uncertainty, and what is left out: by hand."""

import math
from dataclasses import replace
from typing import Any

import pytest

from mlbench_cli.errors import UsageError
from mlbench_cli.predict.machines import HERE, Calibrated, MachineType, Speed
from mlbench_cli.predict.plan import (
    Candidate,
    Excluded,
    Offer,
    PlanResult,
    Question,
    count_bases,
    explain,
    find_interruption_cost,
    find_sensitivities,
    keeps_samples,
    leave_out,
    make_plan,
)
from mlbench_cli.predict.samples import Basis
from mlbench_cli.simulator.gloo import Link
from mlbench_cli.simulator.step import Step
from task_images.comm.presets import resolve
from tests.unit.predict.test_plan import EXACT, MACHINE, SAMPLES, plan, question

Z90 = 1.2815515655446004  # scipy.stats.norm.ppf(0.9)
SPEED = Speed(1.0, 0.1, Basis.GUESSED, "a guess")
OFFER = Offer(MACHINE, "r", 0.2)


def candidate(name: str = "bsp", **changes: Any) -> Candidate:
    """A candidate of 100 s and 1 dollar, whose step of 1 s computes all the time."""
    fields: dict[str, Any] = {
        "offer": OFFER,
        "workers": 2,
        "method": name,
        "rank_batch": 32,
        "batch": 64,
        "samples": 1000.0,
        "kept": 1.0,
        "step": step(),
        "seconds": 100.0,
        "price": 1.0,
        "startup": 0.0,
        "spread": 0.0,
        "parts": {},
        "bases": {},
        "speed": SPEED,
    }
    return Candidate(**{**fields, **changes})


def step(seconds: float = 1.0, compute: float = 1.0) -> Step:
    return Step(seconds, compute, 0.0, 0, 0.0, 0)


def result(*candidates: Candidate, asked: Question | None = None) -> PlanResult:
    return PlanResult(candidates, candidates, candidates[:1], (), asked or question())


# --- one candidate --------------------------------------------------------------------------------------------------


def test_the_ends_of_a_time_are_its_10th_and_90th_percentiles() -> None:
    item = candidate(spread=0.5)
    assert item.low == pytest.approx(100 * math.exp(-Z90 * 0.5))
    assert item.high == pytest.approx(100 * math.exp(Z90 * 0.5))
    assert item.per_second == 0.01
    assert candidate(seconds=0.0).per_second == 0.0


def test_a_candidate_is_named_by_workers_machine_and_method() -> None:
    assert candidate().name == "2 x n1-standard-4, bsp, batch 64"
    assert candidate(offer=replace(OFFER, is_spot=True)).name == "2 x n1-standard-4 spot, bsp, batch 64"


@pytest.mark.parametrize(("seconds", "compute", "exposed"), [(2.0, 1.5, 0.25), (1.0, 1.0, 0.0), (0.0, 0.0, 0.0)])
def test_exposed_communication_is_a_share_of_the_step(seconds: float, compute: float, exposed: float) -> None:
    assert candidate(step=step(seconds, compute)).exposed == exposed


def test_causes_of_uncertainty_are_shares_of_the_variance_with_the_largest_first() -> None:
    found = find_sensitivities(candidate(parts={"a": 0.3, "none": 0.0, "b": 0.4}))
    assert [name for name, _, _ in found] == ["b", "a"]
    assert [share for _, share, _ in found] == pytest.approx([0.64, 0.36])
    assert [factor for _, _, factor in found] == pytest.approx([math.exp(Z90 * 0.4), math.exp(Z90 * 0.3)])
    assert find_sensitivities(candidate(parts={"a": 0.0})) == []


def test_bases_are_counted_over_all_figures() -> None:
    items = [candidate(bases={"a": Basis.MEASURED, "b": Basis.GUESSED}), candidate(bases={"a": Basis.MEASURED})]
    items.append(candidate(bases={"a": Basis.PUBLISHED}))
    assert count_bases(items) == {Basis.MEASURED: 0.5, Basis.PUBLISHED: 0.25, Basis.GUESSED: 0.25}
    assert count_bases([]) == dict.fromkeys(Basis, 0.0)


# --- reasons --------------------------------------------------------------------------------------------------------

# Cheaper, and faster, with other batches.
OTHERS = (candidate(price=0.5, seconds=500.0, rank_batch=1), candidate(price=50.0, seconds=5.0, rank_batch=1))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, "a low price for its time"),
        ({"step": step(1.0, 0.85)}, "15% of a step is exposed communication"),
        ({"step": step(1.0, 0.86)}, "a low price for its time"),
        ({"kept": 0.9}, "a low price for its time"),
        ({"kept": 0.89}, "at batch 64 a sample keeps 89% of its value"),
        ({"startup": 25.0}, "a low price for its time"),
        ({"startup": 26.0}, "26% of the time is start-up"),
        ({"overhead": 2.0}, "a low price for its time"),
        ({"overhead": 3.0}, "interruptions add 3%"),
        ({"price": 0.1}, "the lowest price of all"),
        ({"seconds": 1.0}, "the shortest time of all"),
    ],
)
def test_each_reason_has_its_limit(changes: dict[str, Any], reason: str) -> None:
    item = candidate(**changes)
    assert explain(item, result(*OTHERS, item)) == [reason]


def test_a_method_is_praised_for_the_time_that_it_saves_of_a_step() -> None:
    """0.7 s instead of 1 s, of which 0.4 s were communication."""
    fast, slow = candidate("wfbp", step=step(0.7, 0.6)), candidate("bsp", step=step(1.0, 0.6))
    middle = candidate("fusion", step=step(0.8, 0.6))
    elsewhere = candidate("dear", step=step(9.0, 0.6), workers=4)
    found = explain(fast, result(*OTHERS, slow, middle, fast, elsewhere))
    assert found == ["method wfbp saves 30% of the step of bsp, which leaves 40% in communication"]
    close = candidate("bsp", step=step(0.73, 0.72))
    assert explain(fast, result(*OTHERS, close, fast)) == ["a low price for its time"]


# --- choices --------------------------------------------------------------------------------------------------------


def machine(name: str) -> Offer:
    return Offer(replace(MACHINE, name=name), "r", 0.2)


def chosen(*items: Candidate, **limits: Any) -> list[str]:
    """The machines of the best candidates of these."""
    found = leave_out(result(*items, asked=question(**limits)), machine("none of them"), 1, Excluded("x", 0))
    return [item.offer.machine.name for item in found.best]


def test_without_limits_the_product_of_time_and_price_decides() -> None:
    items = [
        candidate(offer=machine("a"), seconds=10.0, price=10.0),
        candidate(offer=machine("b"), seconds=20.0, price=4.0),
        candidate(offer=machine("c"), seconds=50.0, price=1.0),
        candidate(offer=machine("d"), seconds=99.0, price=99.0),
        candidate(offer=machine("c"), seconds=51.0, price=1.0),
    ]
    assert chosen(*items) == ["c", "b", "a"]
    assert chosen(*items[:2], items[4], items[2]) == ["c", "b", "a"]


def test_with_a_deadline_the_price_decides_and_with_a_price_the_time() -> None:
    items = [
        candidate(offer=machine("a"), seconds=10.0, price=10.0, chance=0.9),
        candidate(offer=machine("b"), seconds=20.0, price=4.0, chance=0.5),
        candidate(offer=machine("c"), seconds=50.0, price=1.0, chance=0.4),
    ]
    assert chosen(*items, deadline=30.0) == ["b", "a", "c"]  # a chance below one half comes last
    assert chosen(*items, max_price=5.0) == ["a", "b", "c"]


# --- exclusions -----------------------------------------------------------------------------------------------------


def test_a_size_is_left_out_with_all_larger_ones_of_the_same_offer() -> None:
    whole = plan([Offer(MACHINE, "r", 0.2), Offer(MACHINE, "s", 0.2)], workers=(1, 2, 4), methods=EXACT[:1])
    less = leave_out(whole, Offer(MACHINE, "r", 0.2), 2, Excluded("no quota", 0, "ask"))
    assert {(item.offer.region, item.workers) for item in less.candidates} == {
        *(("r", 1), ("s", 1), ("s", 2), ("s", 4)),
    }
    assert less.excluded[0] == Excluded("no quota", len(whole.candidates) - len(less.candidates), "ask")
    assert less.excluded[0].count == 8  # two sizes, four batches
    only = plan([OFFER], workers=(2,), methods=EXACT[:1])
    with pytest.raises(UsageError, match="No candidate remains: no quota") as caught:
        leave_out(only, OFFER, 1, Excluded("no quota", 0, "ask"))
    assert caught.value.hint == "ask"
    with pytest.raises(UsageError, match="No candidate remains: there is no offer"):
        make_plan(question(), [])


def test_exclusions_are_counted_with_the_most_common_first() -> None:
    gpu = Offer(MachineType("gke", "g2", "l4", 1, 4, 16, 10), "r", 1.0)
    found = make_plan(
        question(devices=("cpu",), max_rank_batch=64, workers=(1, 2)), [gpu, OFFER], [Excluded("first", 7)]
    )
    assert [(each.reason, each.count) for each in found.excluded] == [
        ("first", 7),
        ("x does not run on GPUs", 2 * 2 * 4),
        ("x supports batches of at most 64 per rank", 3),  # batch 128: one method of one rank, two of two
    ]
    cpu_only = make_plan(question(devices=("gpu",), workers=(1,)), [OFFER, replace(gpu, price=2.0)])
    assert cpu_only.excluded[0].reason == "x does not run on CPUs"


@pytest.mark.parametrize(
    ("memory", "factors"), [(15.0, {0.5, 1.0}), (7.5, {0.5, 1.0, 2.0}), (3.75, {0.5, 1.0, 2.0, 4.0})]
)
def test_memory_grows_with_the_batch_of_a_rank(memory: float, factors: set[float]) -> None:
    found = plan(memory_gib=memory, workers=(2,), methods=EXACT[:1])
    assert {item.rank_batch / 32 for item in found.candidates} == factors


def test_workers_of_this_machine_fit_its_cores() -> None:
    here = MachineType(HERE, "this-machine", "", 0, 4, 8, 0)
    found = plan([Offer(here, "here", 0.0)], calibrated=Calibrated(2, "", 128.0, "fp32"), memory_gib=999.0)
    assert {item.workers for item in found.candidates} == {1, 2}
    assert found.excluded[0].reason == "this machine has 4 cores"
    assert found.excluded[0].count == 4 * 2 * 4  # sizes, methods, batches
    [own] = [item for item in found.candidates if (item.workers, item.rank_batch, item.method) == (2, 32, "bsp")]
    assert (own.startup, own.price, own.parts["start-up"]) == (5.0, 0.0, 0.0)
    assert set(own.bases.values()) == {Basis.MEASURED}


def test_a_calibration_of_one_worker_has_no_network_for_this_machine() -> None:
    here = MachineType(HERE, "this-machine", "", 0, 8, 8, 0)
    found = plan([Offer(here, "here", 0.0)], link=None)
    assert {item.workers for item in found.candidates} == {1}
    assert any(each.reason == "the calibration has no network: its run had one worker" for each in found.excluded)


def test_bases_and_prices_of_machines_in_a_cloud() -> None:
    [item] = plan(
        [Offer(MACHINE, "r", 0.2, control_plane=0.1)], workers=(2,), batch_factors=(2.0,), methods=EXACT[:1]
    ).candidates
    assert item.bases == {
        "speed": Basis.GUESSED,
        "network": Basis.PUBLISHED,
        "samples": Basis.MEASURED,
        "price": Basis.PUBLISHED,
        "start-up": Basis.GUESSED,
    }
    assert item.batch == 128
    assert item.samples == pytest.approx(SAMPLES.samples(128))
    assert (item.overhead, item.checkpoint_every, item.startup) == (0.0, None, 480.0)
    [alone] = plan([OFFER], workers=(1,), batch_factors=(1.0,)).candidates
    assert "network" not in alone.bases
    [started] = plan([OFFER], workers=(1,), batch_factors=(1.0,), is_started=True).candidates
    assert started.startup == 0.0
    assert started.seconds == pytest.approx(alone.seconds - 480)


def test_a_measured_network_of_the_same_machine_counts_before_the_documented_one() -> None:
    other = Calibrated(2, "", 128.0, "fp32", "gke/n1-standard-4", Link(1e-5, 1e-12))
    options: dict[str, Any] = {"workers": (4,), "batch_factors": (1.0,), "methods": EXACT[:1]}
    [documented], [measured] = (plan([OFFER], others=each, **options).candidates for each in ((), (other,)))
    assert (documented.bases["network"], measured.bases["network"]) == (Basis.PUBLISHED, Basis.MEASURED)
    assert measured.step.communication < documented.step.communication


def test_validations_take_part_of_the_ranks_and_of_the_samples() -> None:
    """50 s on 2 ranks are 25 s on 4, of a machine as fast as the calibrated one."""
    options: dict[str, Any] = {"batch_factors": (0.5,), "methods": EXACT[:1], "workers": (4,)}
    [without], [validated] = (plan([OFFER], validation=each, **options).candidates for each in (0.0, 50.0))
    speed = without.speed.factor
    assert validated.seconds - without.seconds == pytest.approx(25.0 * speed)


# --- interruptions and methods --------------------------------------------------------------------------------------


def test_without_checkpoints_every_interruption_repeats_the_work() -> None:
    """(1 / rate + restart) (exp(rate work) - 1) - work, by Daly 2006 for a single piece."""
    rate, work = 1 / 7200, 3600.0
    added, every = find_interruption_cost(work, rate, False)
    assert added == pytest.approx((7200 + 300) * (math.exp(0.5) - 1) - 3600)
    assert every is None


def test_checkpoints_are_made_at_the_interval_of_young() -> None:
    """The square root of twice 10 s times 7200 s; work that is shorter has one piece."""
    _, every = find_interruption_cost(36000.0, 1 / 7200, True)
    assert every == pytest.approx(math.sqrt(2 * 10 * 7200))
    added, short = find_interruption_cost(60.0, 1 / 7200, True)
    assert short == 60.0
    assert added == pytest.approx(math.exp(300 / 7200) * 7200 * (math.exp(70 / 7200) - 1) - 60)
    assert find_interruption_cost(1e9, 1.0, True)[0] < math.inf
    assert find_interruption_cost(1e9, 1.0, False)[0] < math.inf


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, True),
        ({"codec": "fp16"}, True),
        ({"codec": "bf16"}, True),
        ({"codec": "topk:0.01"}, False),
        ({"transport": "gossip"}, False),
        ({"momentum": "worker"}, False),
    ],
)
def test_only_exact_means_of_every_step_keep_the_samples(changes: dict[str, str], kept: bool) -> None:
    method = replace(resolve("bsp"), **changes)
    assert keeps_samples(method) is kept
    assert not keeps_samples(replace(method, engine="registered"))
