"""Plans: the Pareto line, limits, exclusions, interruptions against a simulation, and speeds with a basis."""

import math
import random
import time
from dataclasses import replace
from datetime import date
from typing import Any

import pytest

from mlbench_cli.errors import UsageError
from mlbench_cli.predict.machines import (
    HERE,
    Calibrated,
    MachineType,
    compare_speed,
    find_gpu,
    load_gpus,
    load_machines,
)
from mlbench_cli.predict.plan import (
    CHECKPOINT_SECONDS,
    RESTART_SECONDS,
    Offer,
    PlanResult,
    Question,
    find_chance,
    find_interruption_cost,
    find_sensitivities,
    keeps_samples,
    make_plan,
)
from mlbench_cli.predict.samples import Basis, GoalPoint, choose_model
from mlbench_cli.simulator.calibration import Calibration
from mlbench_cli.simulator.gloo import Link
from mlbench_cli.simulator.workload import Tensor, Workload
from providers import pricing
from task_images.comm.presets import PRESETS, resolve

TENSORS = tuple(Tensor(f"layer{number}", 400_000, 0.05 + 0.01 * number) for number in range(20))
WORK = Workload(TENSORS, 0.05, 0.25, 0.002)
CALIBRATION = Calibration(2, "gloo", 4.0, 1, 32, WORK, WORK, WORK, ())
CPU = Calibrated(1, "", 128.0, "fp32")
MACHINE = MachineType("gke", "n1-standard-4", "", 0, 4, 15, 10)
EXACT = [(resolve(name), 1.0) for name in ("bsp", "fusion")]
SAMPLES = choose_model("x", [GoalPoint(64, 100_000.0), GoalPoint(256, 160_000.0)], None)


def question(**changes: Any) -> Question:
    fields: dict[str, Any] = {
        "task": "x",
        "calibration": CALIBRATION,
        "link": Link(1e-4, 8e-9),
        "calibrated": CPU,
        "samples": SAMPLES,
        "methods": EXACT,
    }
    return Question(**{**fields, **changes})


def plan(offers: list[Offer] | None = None, **changes: Any) -> PlanResult:
    return make_plan(question(**changes), offers or [Offer(MACHINE, "r", 0.2, 0.1)])


def test_nothing_on_the_line_is_beaten_and_everything_else_is() -> None:
    found = plan([Offer(machine, "r", 0.1 * machine.vcpus) for machine in load_machines() if not machine.gpus])
    line = set(map(id, found.pareto))
    for item in found.candidates:
        beaten = any(other.seconds <= item.seconds and other.price < item.price for other in found.candidates)
        assert (id(item) in line) <= (not beaten)
    assert len(found.pareto) > 2
    assert [item.price for item in found.pareto] == sorted((item.price for item in found.pareto), reverse=True)


def test_time_and_price_are_what_their_parts_say() -> None:
    (item,) = plan(workers=(2,), batch_factors=(1.0,), methods=EXACT[:1]).candidates
    updates = SAMPLES.samples(64) or 0.0
    assert item.batch == 64
    assert item.seconds == pytest.approx(480 + updates / 64 * item.step.seconds)
    assert item.price == pytest.approx((2 * 0.2 + 0.1) * item.seconds / 3600)
    assert item.low < item.seconds < item.high
    assert sum(share for _, share, _ in find_sensitivities(item)) == pytest.approx(1)


def test_a_larger_batch_needs_the_samples_that_runs_tell() -> None:
    by_batch = {item.batch: item for item in plan(workers=(2, 8), batch_factors=(1.0,)).candidates}
    assert by_batch[64].samples == pytest.approx(100_000)
    assert by_batch[256].samples == pytest.approx(160_000)
    assert by_batch[256].kept == pytest.approx(0.625)


def test_limits_choose_the_best_and_give_it_a_chance() -> None:
    free = plan()
    fastest, cheapest = free.candidates[0], min(free.candidates, key=lambda item: item.price)
    assert plan(deadline=1e9).best[0].price == cheapest.price
    assert plan(max_price=1e9).best[0].seconds == fastest.seconds
    tight = plan(deadline=fastest.seconds)
    assert tight.best[0].chance == pytest.approx(0.5, abs=0.01)
    assert all(item.chance is None for item in free.candidates)


def test_what_cannot_run_is_left_out_with_the_reason() -> None:
    gpu = MachineType("gke", "g2-standard-4", "l4", 1, 4, 16, 10)
    found = make_plan(
        question(devices=("cpu",), max_rank_batch=64, memory_gib=9.0),
        [Offer(MACHINE, "r", 0.2), Offer(gpu, "r", 0.7)],
    )
    reasons = " / ".join(each.reason for each in found.excluded)
    assert "does not run on GPUs" in reasons
    assert "at most 64 per rank" in reasons
    assert "a rank needs more than the 15 GiB" in reasons
    with pytest.raises(UsageError, match="No candidate remains: a rank needs more"):
        plan(memory_gib=900.0)


def test_without_samples_at_other_batches_there_is_no_figure() -> None:
    unknown = choose_model("x", [GoalPoint(64, 100_000.0)], None)
    found = plan(samples=unknown, batch_factors=(1.0,))
    assert {item.batch for item in found.candidates} == {64}
    assert any("the samples to the goal at other batch sizes are unknown" in each.reason for each in found.excluded)


def test_a_machine_of_two_cores_takes_no_more_workers() -> None:
    here = MachineType(HERE, "this-machine", "", 0, 2, 8, 0)
    found = plan([Offer(here, "here", 0.0)])
    assert {item.workers for item in found.candidates} == {1, 2}
    assert all(item.bases["speed"] is Basis.MEASURED for item in found.candidates)


@pytest.mark.parametrize(
    ("name", "kept"), [("bsp", True), ("dear", True), ("fp16", True), ("ddp", True), ("eftopk", False)]
)
def test_methods_that_send_the_exact_mean_keep_the_samples(name: str, kept: bool) -> None:
    assert keeps_samples(resolve(name)) is kept


def test_no_lossy_asynchronous_or_local_method_is_taken_for_exact() -> None:
    exact = {name for name in PRESETS if keeps_samples(resolve(name))}
    assert not exact & {
        "noop",
        "topk",
        "dgc",
        "qsgd",
        "powersgd",
        "localsgd",
        "postlocalsgd",
        "dpsgd",
        "async-ps",
        "ssp-ps",
    }


@pytest.mark.parametrize(("hours", "per_hour"), [(1, 0.5), (5, 0.1), (20, 1.0)])
def test_interruptions_cost_what_a_simulation_says(hours: float, per_hour: float) -> None:
    """Work in pieces with a checkpoint after each; an interruption, also of a restart, loses the piece."""
    work, rate = 3600 * hours, per_hour / 3600
    added, every = find_interruption_cost(work, rate, True)
    assert every is not None
    source = random.Random(1)

    def run() -> float:
        now, left, failure = 0.0, work, source.expovariate(rate)
        while left > 0:
            piece = min(every, left) + CHECKPOINT_SECONDS
            if now + piece <= failure:
                now, left = now + piece, left - every
                continue
            now = failure
            while True:  # a restart may be interrupted, too
                failure = now + source.expovariate(rate)
                if now + RESTART_SECONDS <= failure:
                    now += RESTART_SECONDS
                    break
                now = failure
        return now - work

    simulated = sum(run() for _ in range(400)) / 400
    assert added == pytest.approx(simulated, rel=0.25)
    longer, _ = find_interruption_cost(work, rate, False)
    assert longer > added
    assert find_interruption_cost(work, 0.0, True) == (0.0, None)


def test_a_speed_comes_from_the_best_basis_there_is() -> None:
    a100 = next(machine for machine in load_machines() if machine.name == "a2-ultragpu-1g")
    t4 = next(machine for machine in load_machines() if machine.gpu == "t4")
    on_a100 = Calibrated(8, "NVIDIA A100-SXM4-80GB", 900.0, "fp32")
    measured = compare_speed("digits_resnet", a100, CPU, [on_a100])
    assert measured.basis is Basis.MEASURED
    assert measured.factor == pytest.approx(128 / 900)
    published = compare_speed("imagenet_resnet", a100, CPU)
    assert published.basis is Basis.PUBLISHED
    assert published.factor == pytest.approx(128 / 1066)
    h100 = next(machine for machine in load_machines() if machine.name == "a3-highgpu-1g")
    ratio = compare_speed("imagenet_resnet", h100, on_a100)
    assert ratio.basis is Basis.PUBLISHED
    assert ratio.factor == pytest.approx(1066 / 1895)
    guessed = compare_speed("digits_resnet", t4, CPU)
    assert guessed.basis is Basis.GUESSED
    assert guessed.spread > published.spread > measured.spread
    cores = compare_speed("digits_resnet", MACHINE, CPU)
    assert (cores.factor, cores.basis) == (0.5, Basis.GUESSED)


def test_every_machine_of_the_table_has_a_known_gpu_and_a_price_somewhere() -> None:
    assert len(load_machines()) >= 60
    for machine in load_machines():
        assert not machine.gpu or machine.gpu in load_gpus()
        table = pricing.load_prices(machine.provider)
        places = table.list_regions()
        assert any(all(table.price(item, place) for item in machine.items) for place in places), str(machine)
    found = find_gpu("NVIDIA A100-SXM4-40GB")
    assert found is not None
    assert found.key == "a100-40gb"


def test_thousands_of_candidates_are_planned_in_seconds_of_computation() -> None:
    offers = [Offer(machine, "r", 1.0) for machine in load_machines()]
    begun = time.process_time()
    found = plan(offers)
    assert len(found.candidates) > 2000
    assert time.process_time() - begun < 30  # some 2 s; a bound against mistakes of order only


@pytest.mark.parametrize(
    ("text", "days"), [("2026-07-30", 118), ("2025", 693), (None, None), ("soon", None), ("2026-13-01", None)]
)
def test_the_age_of_a_price(text: str | None, days: int | None) -> None:

    assert pricing.age_in_days(text, date(2026, 11, 25)) == days


@pytest.mark.parametrize(
    ("deadline", "max_price", "chance"),
    [
        (None, None, None),
        (100.0, None, 0.5),
        (None, 2.0, 0.5),  # at 2 cents a second, so after 100 s
        (200.0, 2.0, 0.5),
        (100.0, 4.0, 0.5),
        (200.0, 4.0, 0.841),  # a factor of two is one standard deviation
        (50.0, 4.0, 0.159),
        (0.5, None, 0.0),
    ],
)
def test_the_tighter_limit_decides_the_chance(
    deadline: float | None, max_price: float | None, chance: float | None
) -> None:
    item = replace(plan().best[0], seconds=100.0, price=2.0, spread=math.log(2))
    asked = question(deadline=deadline, max_price=max_price)
    assert find_chance(item, asked) == (None if chance is None else pytest.approx(chance, abs=0.001))
    if chance is not None and chance != 0.841:
        assert find_chance(replace(item, spread=0.0), asked) == (chance == 0.5)
    assert find_chance(replace(item, price=0.0), question(max_price=2.0)) == 1.0
