"""Passes, validation, facts and seeds of torch trainings with small models, by hand or with numpy."""

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from task_images.comm.allreduce import GradientAllReduce
from task_images.contract import Contract, parse_event
from task_images.harness import peak, training
from task_images.harness.data import Batch
from task_images.harness.decay import split_decay
from task_images.harness.distributed import World
from task_images.harness.errors import DivergedError, TaskUsageError
from task_images.harness.loop import Plan
from task_images.harness.metrics import TopK
from task_images.harness.precision import LossScale, Precision, set_arithmetic
from task_images.harness.replicas import average_buffers, broadcast_state, check_identical, measure_distance
from task_images.harness.report import Reporter
from task_images.harness.schedules import (
    Constant,
    Cosine,
    InverseSqrt,
    LinearWarmup,
    MultiStep,
    PerEpoch,
    WarmupInverseSqrt,
)
from task_images.harness.seeds import derive, generator, lasting_generator, load_lasting_states, read_lasting_states
from task_images.harness.settings import CudaSettings, Protocol
from task_images.harness.training import PassLoss, SampleValidator, SampleWork, Trainer, make_sample_trainer
from task_images.harness.updates import Update
from tests.unit.task_images.comm.threads import ThreadWorld, run_ranks

CPU = torch.device("cpu")


def alone() -> World:
    return World(Contract({}), CPU, 1, grouped=False)


class Rows:
    """Batches that are given, as training and as validation data."""

    def __init__(self, *sizes: int) -> None:
        numbers = iter(range(100))
        self._batches = [[next(numbers) for _ in range(size)] for size in sizes]
        self.steps = len(sizes)

    def training(self, epoch: int) -> Iterator[Batch]:
        for numbers in self._batches:
            rows = torch.tensor(numbers, dtype=torch.float32)
            yield Batch(torch.stack([rows, -rows], 1), (torch.tensor(numbers) % 3 == 0).long(), len(numbers))

    def validation(self) -> Iterator[Batch]:
        return self.training(1)

    def prepare(self, batch: Batch, training: bool) -> tuple[Tensor, Tensor]:
        return batch.inputs, batch.targets


def score(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean of the first column."""
    return outputs[:, 0].mean()


def test_a_pass_has_its_mean_loss_and_its_size() -> None:
    work = SampleWork(Rows(4), score)
    [batch] = Rows(4).training(1)
    data = work.prepare(batch)
    outputs = work.forward(nn.Identity(), data)
    loss = work.loss(outputs.requires_grad_(), data)
    assert (loss.value.item(), float(loss.mean), loss.weight) == (1.5, 1.5, 4)
    assert loss.value.requires_grad
    assert not loss.mean.requires_grad


def test_a_loss_is_differentiated_times_its_factor() -> None:
    for factor in (1.0, 8.0):
        x = torch.ones(2, requires_grad=True)
        PassLoss((3 * x).sum(), 0.0, 2).backward(factor)
        assert x.grad is not None
        assert x.grad.tolist() == [3.0 * factor] * 2


def test_only_batches_of_another_size_avoid_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    stances: list[str] = []

    def note(stance: str) -> Any:
        stances.append(stance)
        return torch.no_grad()

    monkeypatch.setattr(torch.compiler, "set_stance", note)
    batches = list(Rows(4, 4, 2).training(1))
    for compiled, expected in ((True, ["force_eager"]), (False, [])):
        stances.clear()
        work = SampleWork(Rows(), score, compiled)
        for batch in batches:
            work.forward(nn.Identity(), work.prepare(batch))
        assert stances == expected


def test_sums_of_training_metrics_survive_a_checkpoint() -> None:
    def observe(work: SampleWork, batches: Sequence[Batch]) -> None:
        for batch in batches:
            data = work.prepare(batch)
            work.observe(data[0], data)

    batches = list(Rows(3, 3).training(1))
    work = SampleWork(Rows(), score, metrics=[TopK(1)], scores=lambda outputs: outputs.flip(1))
    observe(work, batches[:1])
    kept = work.read_sums()
    other = SampleWork(Rows(), score, metrics=[TopK(1)], scores=lambda outputs: outputs.flip(1))
    observe(other, batches[:1])  # replaced by what is loaded
    other.load_sums(kept)
    for one in (work, other):
        observe(one, batches[1:])
        # Rows 0 ... 5; the flipped columns say class 1 except for row 0, where both are equal; 0 and 3 are class 1.
        found = one.collect_metrics(alone())
        assert found["Prec@1"] in (pytest.approx(100 / 6), pytest.approx(200 / 6))
    assert SampleWork(Rows(), score).collect_metrics(alone()) == {}


def make_validator(data: Rows, metrics: Sequence[Any] = (), loss: Any = score) -> SampleValidator:
    world = alone()
    return SampleValidator(
        world, nn.Identity(), data, loss, metrics, Precision("fp32", CPU), lambda outputs: outputs.flip(1)
    )


def test_validation_weighs_batches_by_their_size() -> None:
    found = make_validator(Rows(4, 2))(1)
    assert found == {"loss": pytest.approx(2.5)}  # of 0 ... 5; the mean of means would be 3
    with pytest.raises(DivergedError, match="validation loss is nan in epoch 7"):
        make_validator(Rows(2), loss=lambda outputs, targets: torch.tensor(math.nan))(7)


def test_metrics_see_scores_and_the_loss_sees_outputs() -> None:
    seen: list[list[float]] = []

    class Note(TopK):
        def update(self, outputs: Tensor, targets: Tensor) -> None:
            seen.append(outputs[:, 1].tolist())
            super().update(outputs, targets)

    make_validator(Rows(3), [Note(1)])(1)
    assert seen == [[0.0, 1.0, 2.0]]


def test_a_result_lists_what_was_computed_and_how(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    world = alone()
    trainer = make_sample_trainer(
        world,
        Reporter(world, "rows"),
        Rows(4, 4),
        nn.Linear(2, 2),
        lambda outputs, targets: nn.functional.cross_entropy(outputs, targets),
        lambda model: torch.optim.SGD(model.parameters(), 0.1, fused=True),
        PerEpoch(Constant(1e-3)),
        Plan(2),
        strategy=GradientAllReduce(),
        metrics=[TopK(1)],
        details={"own": 1},
    )
    trainer.run()
    events = [event for line in capsys.readouterr().out.splitlines() if (event := parse_event(line))]
    result = events[-1]
    assert (result["event"], result["outcome"], result["updates"], result["samples"]) == ("result", "completed", 4, 16)
    details = result["details"]
    assert details["precision"] == "fp32"
    assert details["options"] == {
        "compile": "no",
        "precision": "fp32",
        "tf32": False,
        "cudnn": "default",
        "fused_optimizer": True,
        "reduction": "GradientAllReduce",
    }
    assert (details["own"], details["loss_scale"], details["updates_skipped"]) == (1, 1.0, 0)
    assert details["communication"]["updates"] == 4.0
    assert [(point["epoch"], point["update"]) for point in details["curve"]] == [(1, 2), (2, 4)]
    for missing in ("compile_seconds", "self_check", "noise_scale", "gpu", "throughput_protocol"):
        assert missing not in details, missing
    assert json.dumps(details)


def make_trainer(model: nn.Module, data: Any, strategy: GradientAllReduce | None = None, **more: Any) -> Trainer[Batch]:
    world = alone()
    return make_sample_trainer(
        world,
        Reporter(world, "rows"),
        data,
        model,
        lambda outputs, targets: nn.functional.cross_entropy(outputs, targets),
        lambda model: torch.optim.SGD(model.parameters(), 0.1),
        PerEpoch(Constant(1e-3)),
        more.pop("plan", Plan(1)),
        strategy=strategy or GradientAllReduce(),
        **more,
    )


def read_result(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    events = [event for line in capsys.readouterr().out.splitlines() if (event := parse_event(line))]
    return dict(events[-1])


def test_a_measured_training_has_its_share_of_the_devices_peak(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four rows times a 2 x 2 matrix: 32 FLOPs forwards, and as many for the gradient of the weights."""
    monkeypatch.setattr(peak, "find_peak", lambda device, precision: peak.Peak(1e6, 2e6))
    seen: list[bool] = []
    model = nn.Linear(2, 2)
    observed = SampleWork(Rows(), lambda outputs, targets: outputs.sum(), metrics=[TopK(1)])
    monkeypatch.setattr(observed, "observe", lambda *_: seen.append(True))
    make_trainer(model, Rows(4, 4), plan=Plan(9, protocol=Protocol(1, 2, 3)), work=observed).run()
    result = read_result(capsys)
    details = result["details"]
    assert (result["updates"], result["goal"], details["curve"]) == (6, None, [])
    assert (details["flops_per_update"], details["peak_flops"]) == (64.0, {"measured": 1e6, "datasheet": 2e6})
    rate = details["throughput_protocol"]["summary"]["mean"] / 4  # updates per second
    assert details["model_flops_per_second_per_rank"] == pytest.approx(64 * rate)
    assert details["mfu_of_measured_peak"] == pytest.approx(64 * rate / 1e6)
    assert details["mfu"] == pytest.approx(64 * rate / 2e6)
    assert seen == []  # metrics of training samples would take time


def test_without_a_protocol_nothing_is_said_of_the_peak(capsys: pytest.CaptureFixture[str]) -> None:
    make_trainer(nn.Linear(2, 2), Rows(4)).run()
    assert "flops_per_update" not in read_result(capsys)["details"]


class Passes:
    """One update of three passes of one row each, numbered from 5 among those of all ranks."""

    def count(self, epoch: int) -> int:
        return 1

    def updates(self, epoch: int, begin: int = 0) -> Iterator[Update[Batch]]:
        rows = [Batch(torch.ones(1, 2) * number, torch.zeros(1, dtype=torch.int64), 1) for number in range(3)]
        yield Update(iter(rows), 3, 3.0, 3.0, 3, first=5)


class CountingStrategy(GradientAllReduce):
    """Notes in which passes gradients may be sent."""

    passes = 0

    def last_pass(self) -> Any:
        self.sent_in = self.passes
        return super().last_pass()


def test_gradients_are_exchanged_in_the_last_pass_and_dropout_has_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy, streams = CountingStrategy(), []  # type: tuple[CountingStrategy, list[Any]]
    monkeypatch.setattr(training, "seed_device", lambda device, *path: streams.append(path))
    trainer = make_trainer(nn.Linear(2, 2), Rows(1), strategy)
    trainer.batches = Passes()
    forward = trainer.work.forward

    def count(model: nn.Module, data: Any) -> Any:
        strategy.passes += 1
        return forward(model, data)

    monkeypatch.setattr(trainer.work, "forward", count)
    trainer.run()
    assert (strategy.passes, strategy.sent_in) == (3, 2)  # two passes were over when the last one began
    assert streams == [(42, "dropout", 0, number) for number in (5, 6, 7)]


def test_a_work_may_compute_reported_means_later(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(nn.Linear(2, 2), Rows(4, 4))
    monkeypatch.setattr(trainer.work, "read_losses", lambda means: [7.0] * len(means), raising=False)
    trainer.run()
    assert read_result(capsys)["details"]["curve"][0]["train_loss"] == 7.0


def test_a_restart_has_buffers_random_numbers_and_sums_of_its_rank() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    trainer = make_trainer(model, Rows(4), training_metrics=[TopK(1)])
    trainer.work.load_sums([[3.0, 4.0]])  # type: ignore[attr-defined]
    with torch.no_grad():
        model[0].running_mean.fill_(5.0)  # type: ignore[operator]
    state = dict(trainer._own_state())
    state["buffers"] = {name: value.clone() for name, value in state["buffers"].items()}
    drawn = torch.rand(3)
    trainer.work.load_sums([[0.0, 1.0]])  # type: ignore[attr-defined]
    with torch.no_grad():
        model[0].running_mean.fill_(0.0)  # type: ignore[operator]
    trainer._load_own_state(state)
    assert torch.equal(torch.rand(3), drawn)
    assert model[0].running_mean.tolist() == [5.0, 5.0]  # type: ignore[operator]
    assert trainer.work.read_sums() == [[3.0, 4.0]]  # type: ignore[attr-defined]
    plain = make_trainer(nn.Linear(2, 2), Rows(4), work=PlainWork())
    assert plain._own_state()["sums"] is None
    plain._load_own_state(plain._own_state())


class PlainWork:
    """A work without metrics."""

    def prepare(self, part: Batch) -> Batch:
        return part

    def forward(self, model: nn.Module, data: Batch) -> Tensor:
        outputs: Tensor = model(data.inputs)
        return outputs

    def loss(self, outputs: Tensor, data: Batch) -> PassLoss:
        value = outputs.sum()
        return PassLoss(value, value.detach(), data.size)


# --- number formats -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "device", "casts", "dtype"),
    [
        ("fp32", "cpu", True, None),
        ("bf16", "cpu", True, torch.bfloat16),
        ("bf16", "cpu", False, None),
        ("fp16", "cpu", True, None),
    ],
)
def test_products_are_computed_in_the_format_unless_the_model_casts(
    asked: str, device: str, casts: bool, dtype: torch.dtype | None
) -> None:
    precision = Precision(asked, torch.device(device), casts=casts)
    with precision.autocast():
        found = torch.ones(2, 2) @ torch.ones(2, 2)
    assert found.dtype == (dtype or torch.float32)
    assert (precision.scale, precision.factor) == (None, 1.0)


def test_other_formats_and_algorithms_do_not_exist() -> None:
    with pytest.raises(ValueError, match="'fp8' is not one of fp32, bf16, fp16"):
        Precision("fp8", CPU)
    with pytest.raises(TaskUsageError, match="\"cudnn\" is 'fastest', not default or deterministic or benchmark"):
        set_arithmetic(replace(CudaSettings(), cudnn="fastest"))


def test_a_loss_scale_changes_by_its_factor_within_its_bounds() -> None:
    scale = LossScale(4.0, factor=4.0, window=2, largest=30.0, smallest=1.0)
    seen = []
    for finite in (True, True, True, False, True, True, True, True):
        scale.observe(finite)
        seen.append(scale.value)
    assert seen == [4.0, 16.0, 16.0, 4.0, 4.0, 16.0, 16.0, 30.0]
    other = LossScale(4.0, factor=4.0, smallest=1.0)
    other.observe(False)
    assert other.value == 1.0  # the smallest is allowed
    with pytest.raises(DivergedError, match=r"even at a loss scale of 0\.25"):
        other.observe(False)


# --- replicas -------------------------------------------------------------------------------------------------------


def make_model(rank: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).double()
    model[0].float()
    with torch.no_grad():
        for number, item in enumerate([*model.parameters(), *model.buffers()]):
            item.fill_(10 * rank + number)
    return model


def test_rank_0s_parameters_and_buffers_are_everyones() -> None:
    def body(world: ThreadWorld) -> list[float]:
        model = make_model(world.rank)
        broadcast_state(world, model)
        return [item.flatten()[0].item() for item in (*model.parameters(), *model.buffers())]

    assert run_ranks(3, body) == [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]] * 3


def test_running_statistics_are_averaged_and_counts_are_not() -> None:
    def body(world: ThreadWorld) -> list[float]:
        model = make_model(world.rank)
        average_buffers(world, model)
        return [item.flatten()[0].item() for item in (*model.parameters(), *model.buffers())]

    for rank, found in enumerate(run_ranks(3, body)):
        parameters, buffers = found[:4], found[4:]
        assert parameters == [10.0 * rank + number for number in range(4)]
        assert buffers == [14.0, 15.0, 10.0 * rank + 6]


def test_a_model_that_differs_is_named() -> None:
    def body(world: ThreadWorld, odd: int) -> None:
        model = make_model(0)
        if world.rank == odd:
            with torch.no_grad():
                next(model.parameters())[1, 1] += 1e-6
        check_identical(world, model)

    run_ranks(3, partial(body, odd=-1))
    with pytest.raises(DivergedError, match="the model of rank 2 differs from that of rank 0"):
        run_ranks(3, partial(body, odd=2))


def test_the_distance_of_replicas_is_relative_to_their_mean() -> None:
    drawn = np.random.default_rng(1).normal(size=(3, 10))
    mean = drawn.mean(0)
    expected = math.sqrt(((drawn - mean) ** 2).sum() / 3) / float(np.linalg.norm(mean))

    def body(world: ThreadWorld) -> float:
        own = torch.from_numpy(drawn[world.rank]).float()
        return measure_distance(world, [own[:4].view(2, 2), own[4:]])

    assert run_ranks(3, body) == pytest.approx([expected] * 3, rel=1e-5)
    assert run_ranks(2, lambda world: measure_distance(world, [torch.ones(3)])) == [0.0, 0.0]


# --- decay, seeds, schedules ----------------------------------------------------------------------------------------


def test_matrices_and_kernels_decay_and_scales_and_biases_do_not() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Linear(2, 2))
    model[2].weight.requires_grad_(False)
    decayed, others = split_decay(model, 0.3)
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.3, 0.0)
    assert [item.shape for item in decayed["params"]] == [model[0].weight.shape]  # type: ignore[attr-defined]
    assert len(others["params"]) == 4  # type: ignore[arg-type]


def test_a_seed_of_a_stream_is_a_hash_of_its_name() -> None:
    digest = hashlib.blake2b(b"7/windows/3", digest_size=8).hexdigest()
    assert derive(7, "windows", 3) == int(digest, 16) // 2
    assert (
        len({derive(7, "windows", 3), derive(7, "windows", 4), derive(8, "windows", 3), derive(7, "windows/3", 3)}) == 4
    )
    assert torch.equal(torch.rand(3, generator=generator(7, "a")), torch.rand(3, generator=generator(7, "a")))


def test_lasting_streams_go_on_where_they_were_saved() -> None:
    stream = lasting_generator(7, "a stream of this test")
    torch.rand(3, generator=stream)
    kept = read_lasting_states()
    following = torch.rand(3, generator=stream)
    load_lasting_states({**kept, "another": torch.zeros(1)})
    assert torch.equal(torch.rand(3, generator=stream), following)


@pytest.mark.parametrize(
    ("formula", "rates"),
    [
        (LinearWarmup(1.0, 3.0, 4), {0: 1.0, 1: 1.5, 3: 2.5, 4: 3.0, 9: 3.0}),
        (MultiStep(8.0, (4, 6), 0.5), {0: 8.0, 3: 8.0, 4: 4.0, 5: 4.0, 6: 2.0, 99: 2.0}),
        (MultiStep(8.0, (4,), 0.5, warmup=2, start=4.0), {0: 4.0, 1: 6.0, 2: 8.0, 4: 4.0}),
        (Cosine(8.0, 4), {0: 8.0, 1: 4 + 4 * math.sqrt(0.5), 2: 4.0, 4: 0.0, 9: 0.0}),
        (Cosine(8.0, 6, warmup=2, start=2.0), {0: 2.0, 1: 5.0, 2: 8.0, 4: 4.0, 6: 0.0}),
        (InverseSqrt(6.0), {0: 6.0, 1: 6.0, 4: 3.0, 9: 2.0}),
        (WarmupInverseSqrt(6.0, 4), {0: 0.0, 2: 3.0, 4: 6.0, 16: 3.0}),
    ],
)
def test_rates_by_hand(formula: Any, rates: dict[int, float]) -> None:
    assert {t: formula(t) for t in rates} == pytest.approx(rates, abs=1e-12)


@pytest.mark.parametrize(("warmup", "is_valid"), [(3, True), (4, False), (5, False)])
def test_a_warm_up_ends_before_what_follows_it(warmup: int, is_valid: bool) -> None:
    for make in (lambda: MultiStep(1.0, (6, 4), 0.5, warmup=warmup), lambda: Cosine(1.0, 4, warmup=warmup)):
        if is_valid:
            make()
        else:
            with pytest.raises(ValueError, match="the warm-up must end before"):
                make()
