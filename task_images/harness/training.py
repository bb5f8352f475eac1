"""The training loop of all tasks in torch: `Trainer` computes updates; `harness.loop` says when, and what follows.

A task gives batches (`updates.Batches`), a work (`Work`: what a pass computes) and a validator.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from task_images.comm.base import MakeOptimizer, Placement, Strategy
from task_images.harness.checkpoint import load_checkpoint, save_checkpoint
from task_images.harness.data import Batch, Data
from task_images.harness.distributed import World, sample_gpu
from task_images.harness.errors import DivergedError
from task_images.harness.goals import GoalWatch
from task_images.harness.loop import Loop, Plan, Unit, Values
from task_images.harness.metrics import Mean, Metric, TrainingLoss, collect
from task_images.harness.precision import Precision, set_arithmetic
from task_images.harness.replicas import average_buffers
from task_images.harness.report import Reporter
from task_images.harness.schedules import Schedule
from task_images.harness.seeds import seed_device
from task_images.harness.settings import CudaSettings
from task_images.harness.speed import Graphs
from task_images.harness.tracker import Tracker
from task_images.harness.updates import Update

P = TypeVar("P")
W = TypeVar("W", contravariant=True)
Loss = Callable[[Tensor, Tensor], Tensor]


class PassLoss(NamedTuple):
    """The loss of one pass: `value` is differentiated; `mean` over `weight` samples (or words) is reported."""

    value: Tensor
    mean: Tensor
    weight: float


class Work(Protocol[W]):
    """What a pass computes. Each method is booked in its own category."""

    def prepare(self, part: W) -> Any:
        """The pass's data as the model wants them, on its device."""
        ...

    def forward(self, model: nn.Module, data: Any) -> Any:
        """The model's outputs."""
        ...

    def loss(self, outputs: Any, data: Any) -> PassLoss:
        """The loss of the outputs."""
        ...


@dataclass
class Trainer(Loop[P], Generic[P]):
    """A training in torch.

    model           on world.device; the strategy broadcasts it from rank 0 before the first step
    make_optimizer  from the model; its groups' rates are set before every update
    strategy        owns the optimiser and the update
    precision       None: fp32
    clip            greatest norm of the gradients; None: not clipped
    arithmetic      of GPUs
    graphs          None: the device is given one kernel after another
    """

    work: Work[P] = field(kw_only=True)
    model: nn.Module = field(kw_only=True)
    make_optimizer: MakeOptimizer = field(kw_only=True)
    strategy: Strategy = field(kw_only=True)
    precision: Precision | None = field(default=None, kw_only=True)
    clip: float | None = field(default=None, kw_only=True)
    arithmetic: CudaSettings = field(default_factory=CudaSettings, kw_only=True)
    graphs: Graphs | None = field(default=None, kw_only=True)

    def _make_tracker(self) -> Tracker:
        return Tracker(marks=self.world.marks())

    def run(self) -> None:
        with sample_gpu(self.world) as self._gpu:
            super().run()

    def _attach(self) -> None:
        set_arithmetic(self.arithmetic)
        self._precision = self.precision or Precision("fp32", self.world.device)
        self._flops = self._count_flops() if self.plan.protocol.is_on else None
        if self.world.contract.calibrate:
            self._calibrate()
        self._trained = self.strategy.attach(
            Placement(self.world), self.model, self.make_optimizer, tracker=self.tracker
        )
        if self.graphs is not None:
            self.graphs.prepare(self.model.parameters())
        self._recent, self._whole = TrainingLoss(), Mean("loss")

    def _update(self, update: Update[P], rate: float) -> bool:
        section = self.tracker.section
        losses: list[PassLoss] = []
        self.strategy.begin(update.weight, update.total, update.count)
        for number, part in enumerate(self.tracker.waiting(update.passes)):
            with section("preprocessing"):
                data = self.work.prepare(part)
            if update.first is not None:
                path = ("dropout", self.position.total, update.first + number)
                seed_device(self.world.device, self.world.contract.seed, *path)
            if self.graphs is not None:
                self.graphs.begin_pass()
            with self.strategy.last_pass() if number == update.count - 1 else contextlib.nullcontext():
                with section("forward"), self._precision.autocast():
                    outputs = self.work.forward(self._trained, data)
                with section("loss"), self._precision.autocast():
                    loss = self.work.loss(outputs, data)
                with section("backward"):
                    (loss.value * self._precision.factor).backward()  # type: ignore[no-untyped-call]
            losses.append(loss)
        updated = self.strategy.step(rate, self.clip, self._precision.scale)
        if not updated and self._precision.scale is None:
            raise _divergence_error()
        if updated:
            with section("metrics"):
                for loss in losses:
                    self._recent.add(loss.mean, loss.weight)
                    self._whole.add_mean(loss.mean, loss.weight)
        return updated

    def _calibrate(self) -> None:
        """Leave what a prediction needs, from steps on one pass. Model and random numbers are as before afterwards."""
        from task_images.harness.calibration import calibrate

        update, compute_loss = self._sample_pass()
        samples = max(1, update.samples // (self.world.size * update.count))
        calibrate(self.world, self.model, self.make_optimizer, compute_loss, samples)

    def _count_flops(self) -> tuple[float, str] | None:
        """FLOPs of one update of all ranks, and their source; None if nothing is known. Counts one pass."""
        from task_images.harness.calibration import keep_state
        from task_images.harness.peak import COUNTED, count_flops

        update, compute_loss = self._sample_pass()
        with keep_state(self.model, self.world.device):
            self.model.train()
            flops = count_flops(compute_loss) * update.count * self.world.size
        return (flops, COUNTED) if flops else None

    def _sample_pass(self) -> tuple[Update[P], Callable[[], Tensor]]:
        """The first update, and what computes the loss of its first pass."""
        update = next(self.batches.updates(1))
        data = self.work.prepare(next(iter(update.passes)))

        def compute_loss() -> Tensor:
            with self._precision.autocast():
                return self.work.loss(self.work.forward(self.model, data), data).value

        return update, compute_loss

    def _set_mode(self, training: bool) -> None:
        self._trained.train(training)

    def _recent_loss(self, epoch: int, step: int) -> float:
        return self._recent.collect(self.world, epoch, step)

    def _whole_loss(self) -> float:
        return collect(self.world, [self._whole])["loss"]

    def _consensus(self) -> AbstractContextManager[object]:
        if not self.strategy.is_finite():
            raise _divergence_error()
        return self.strategy.consensus()

    def _check_replicas(self) -> Values:
        distance = self.strategy.check_replicas()
        average_buffers(self.world, self.model)
        return {} if distance is None else {"replica_distance": distance}

    def _facts(self, updates_per_second: float | None) -> Mapping[str, Any]:
        facts: dict[str, object] = {
            "precision": self._precision.used,
            "options": {
                "compile": "no",
                **self.details.get("options", {}),
                "precision": self._precision.used,
                **asdict(self.arithmetic),
                "fused_optimizer": True,
                "reduction": type(self.strategy).__name__,
                **({} if self.graphs is None else {"cuda_graphs": self.graphs.are_replayed(self.world.device)}),
            },
            "loss_scale": self._precision.factor,
            "communication": self.strategy.stats(),
        }
        if self._gpu is not None and (sampled := self._gpu.facts()):
            facts["gpu"] = sampled
        if self._flops is not None:
            from task_images.harness.peak import Utilisation, find_peak

            flops, formula = self._flops
            peak = find_peak(self.world.device, self._precision.used)
            facts |= Utilisation(flops, formula, peak, updates_per_second, self.world.size).to_dict()
        return facts

    def _state(self) -> Mapping[str, Any]:
        scale = self._precision.scale
        return {**self.strategy.state_dict(), "loss_scale": asdict(scale) if scale else None}

    def _load_state(self, state: Mapping[str, Any]) -> None:
        self.strategy.load_state_dict(state)
        if self._precision.scale and state["loss_scale"]:
            self._precision.scale.value = state["loss_scale"]["value"]
            self._precision.scale.good = state["loss_scale"]["good"]

    def _write(self, path: Path, state: Mapping[str, Any]) -> None:
        save_checkpoint(self.world, path, self.name, state)

    def _read(self, path: Path) -> Mapping[str, Any]:
        return load_checkpoint(self.world, path, self.name, self.identity)

    def _close(self) -> None:
        self.strategy.close()


# --- the common case: a batch of inputs, outputs, targets ----------------------------------------------------------


class SampleBatches:
    """`Data` as batches: every batch is an update of one pass."""

    def __init__(self, data: Data) -> None:
        self._data = data

    def count(self, epoch: int) -> int:
        """How many updates an epoch has."""
        return self._data.steps

    def updates(self, epoch: int, begin: int = 0) -> Iterator[Update[Batch]]:
        """The updates of an epoch from number `begin` on."""
        for number, batch in enumerate(self._data.training(epoch)):
            if number >= begin:
                yield Update([batch], 1, batch.size, batch.total, batch.total)


class SampleWork:
    """A pass on a batch. `loss` is (outputs, targets) -> mean over the batch.

    compiled   whether the model has compiled parts: they serve batches of the usual size only, since compiling again
               for the few others would cost more than it saves
    """

    def __init__(self, data: Data, loss: Loss, compiled: bool = False) -> None:
        self._data, self._loss, self._compiled = data, loss, compiled
        self._usual = 0

    def prepare(self, part: Batch) -> tuple[Tensor, Tensor]:
        """Inputs and targets on the device; the first batch's size counts as the usual one."""
        self._usual = self._usual or part.size
        return self._data.prepare(part, training=True)

    def forward(self, model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
        """The model's outputs; compiled parts are passed by for batches of another size."""
        with run_eagerly(self._compiled and len(data[1]) != self._usual):
            outputs: Tensor = model(data[0])
        return outputs

    def loss(self, outputs: Tensor, data: tuple[Tensor, Tensor]) -> PassLoss:
        """The mean loss over the batch, with the number of samples."""
        value = self._loss(outputs, data[1])
        return PassLoss(value, value.detach(), len(data[1]))


@dataclass(frozen=True)
class SampleValidator:
    """Loss and metrics over the whole validation set, each rank on its shard, which may be empty.

    model      without any wrapper: a wrapper's forward pass may be collective, and a rank may have no batch
    scores     from the model's outputs what the metrics want (probabilities from logits, say)
    """

    world: World
    model: nn.Module
    data: Data
    loss: Loss
    metrics: Sequence[Metric]
    precision: Precision
    scores: Callable[[Tensor], Tensor]
    compiled: bool = False

    def __call__(self, epoch: int) -> Values:
        mean = Mean("loss")
        with torch.inference_mode(), run_eagerly(self.compiled):
            for batch in self.data.validation():
                inputs, targets = self.data.prepare(batch, training=False)
                with self.precision.autocast():
                    outputs = self.model(inputs)
                    loss = self.loss(outputs, targets)
                mean.add_mean(loss, batch.size)
                scores = self.scores(outputs)
                for metric in self.metrics:
                    metric.update(scores, targets)
        return check_finite(collect(self.world, [mean, *self.metrics]), epoch)


def make_sample_trainer(
    world: World,
    report: Reporter,
    data: Data,
    model: nn.Module,
    loss: Loss,
    make_optimizer: MakeOptimizer,
    schedule: Schedule,
    plan: Plan,
    *,
    strategy: Strategy,
    metrics: Sequence[Metric] = (),
    goal: GoalWatch | None = None,
    validation_loss: Loss | None = None,
    scores: Callable[[Tensor], Tensor] | None = None,
    precision: Precision | None = None,
    compiled: bool = False,
    graphs: Graphs | None = None,
    arithmetic: CudaSettings | None = None,
    unit: Unit | None = None,
    name: str = "",
    details: Mapping[str, Any] | None = None,
    identity: Mapping[str, Any] | None = None,
    closing: Callable[[], Mapping[str, Any]] = dict,
) -> Trainer[Batch]:
    """The trainer of a task that maps a batch of inputs to outputs and a loss.

    loss     (outputs, targets) -> mean over the batch; validation_loss: None: the same
    metrics  of the validation set, among them the goal's by its name. None at all: no validation
    scores   see SampleValidator; the others see Trainer and Loop
    """
    precision = precision or Precision("fp32", world.device)
    validator = SampleValidator(
        world, model, data, validation_loss or loss, metrics, precision, scores or _keep_outputs, compiled
    )
    return Trainer(
        world,
        report,
        SampleBatches(data),
        schedule,
        plan,
        name=name,
        validate=validator if metrics else None,
        goal=goal,
        details=dict(details or {}),
        closing=closing,
        identity=dict(identity or {}),
        work=SampleWork(data, loss, compiled),
        model=model,
        make_optimizer=make_optimizer,
        strategy=strategy,
        precision=precision,
        arithmetic=arithmetic or CudaSettings(),
        graphs=graphs,
        unit=unit or Unit(),
    )


def _keep_outputs(outputs: Tensor) -> Tensor:
    return outputs


def _divergence_error() -> DivergedError:
    return DivergedError(
        "the norm of the gradients is not finite: the training has diverged", "A lower learning rate may help."
    )


def check_finite(values: Values, epoch: int) -> Values:
    """`values` of a validation. Raises DivergedError if their loss is not finite: the last update may have spoilt a
    model whose training loss was still finite."""
    if not math.isfinite(values["loss"]):
        raise DivergedError(
            f"the validation loss is {values['loss']} in epoch {epoch}: the training has diverged",
            "A lower learning rate may help.",
        )
    return values


def run_eagerly(needed: bool) -> AbstractContextManager[object]:
    """A context that leaves compiled code aside if `needed`."""
    return torch.compiler.set_stance("force_eager") if needed else contextlib.nullcontext()
