"""The training loop of all torch tasks: `Trainer` computes updates, `loop` decides when and what follows.

A task supplies batches (`loop.Batches`), a work (`Work`: what a pass computes) and a validator.
"""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from task_images import Lazy
from task_images.clock import Tracker
from task_images.data import Batch, Data
from task_images.goals import GoalWatch
from task_images.loop import Loop, Plan, SampleBatches, Unit, Update, Values, check_finite, make_divergence_error
from task_images.methods.base import MakeOptimizer, Method
from task_images.metrics import Mean, Metric, collect
from task_images.parameters import CudaSettings
from task_images.precision import Precision, set_arithmetic
from task_images.report import Reporter
from task_images.schedules import Schedule
from task_images.seeds import load_lasting_states, read_lasting_states, seed_device
from task_images.world import World, average_buffers, sample_gpu

if TYPE_CHECKING:
    from task_images import checkpoint, peak, speed
else:
    checkpoint, peak = Lazy("task_images.checkpoint"), Lazy("task_images.peak")
    speed = Lazy("task_images.speed")


def count_parameters(parameters: Iterable[Tensor]) -> int:
    """Number of elements in `parameters`, including those on the meta device."""
    return sum(parameter.numel() for parameter in parameters)


ParameterGroup = dict[str, object]  # "params" and options of an optimizer


def split_decay(model: nn.Module, weight_decay: float) -> list[ParameterGroup]:
    """Parameter groups: weights of convolutions and linear layers with decay; normalization parameters and biases
    without."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [item for item in parameters if item.dim() > 1], "weight_decay": weight_decay},
        {"params": [item for item in parameters if item.dim() <= 1], "weight_decay": 0.0},
    ]


P = TypeVar("P")
W = TypeVar("W", contravariant=True)
Loss = Callable[[Tensor, Tensor], Tensor]

NOT_FINITE = "the norm of the gradients is not finite"


class PassLoss:
    """The loss of one pass: `value` is differentiated; `mean` over `weight` samples (or tokens) is reported."""

    __slots__ = ("_value", "mean", "weight")

    def __init__(self, value: Tensor, mean: Any, weight: float) -> None:
        self._value, self.mean, self.weight = value, mean, weight

    @property
    def value(self) -> Tensor:
        """The loss as a tensor of the autograd graph."""
        return self._value

    def backward(self, factor: float) -> None:
        """Add `factor` times the loss's gradients to those of the parameters."""
        torch.autograd.backward(self._value if factor == 1 else self._value * factor)


class Work(Protocol[W]):
    """What a pass computes. The tracker counts each method in its own category.

    A work with small passes may compute reported means later, for many passes at once: it passes the needed data to
    PassLoss as `mean`, and has a method `read_losses(means) -> list[float]`.

    A work with metrics of its passes has `collect_metrics(world) -> {name: value}`, over all ranks since the last call.
    `observe(outputs, data)`, if present, is called after each backward pass. `read_sums` and `load_sums` save them in
    checkpoints.
    """

    def prepare(self, part: W) -> Any:
        """The pass's data for the model, on its device."""
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

    model           on world.device; the method broadcasts it from rank 0 before the first step
    make_optimizer  from the model; its groups' rates are set before every update
    method          owns the optimizer and the update
    precision       None: fp32
    clip            largest norm of the gradients; None: no clipping
    arithmetic      settings of GPUs
    graphs          None: kernels are launched one by one
    """

    work: Work[P] = field(kw_only=True)
    model: nn.Module = field(kw_only=True)
    make_optimizer: MakeOptimizer = field(kw_only=True)
    method: Method = field(kw_only=True)
    precision: Precision | None = field(default=None, kw_only=True)
    clip: float | None = field(default=None, kw_only=True)
    arithmetic: CudaSettings = field(default_factory=CudaSettings, kw_only=True)
    graphs: "speed.Graphs | None" = field(default=None, kw_only=True)

    def _make_tracker(self) -> Tracker:
        return Tracker(marks=self.world.marks())

    def run(self) -> None:
        with sample_gpu(self.world) as self._gpu:
            super().run()

    def _attach(self) -> None:
        set_arithmetic(self.arithmetic)
        self._precision = self.precision or Precision("fp32", self.world.device)
        self._flops = self._count_flops() if self.plan.protocol.is_on else None
        self._trained = self.method.attach(self.world, self.model, self.make_optimizer, self.tracker)
        if self.graphs is not None:
            self.method.keeps_gradients = True
            self.graphs.prepare(self.model.parameters())

    def _update(self, update: Update[P], rate: float) -> bool:
        section = self.tracker.section
        losses: list[PassLoss] = []
        observe = None if self.plan.protocol.is_on else getattr(self.work, "observe", None)
        self.method.begin(update.weight, update.total, update.count, self._precision.scale)
        # Passes in a list need no waiting.
        passes = update.passes if isinstance(update.passes, list) else self.tracker.waiting(update.passes)
        for number, part in enumerate(passes):
            with section("preprocessing"):
                data = self.work.prepare(part)
            if update.first is not None:
                path = ("dropout", self.position.total, update.first + number)
                seed_device(self.world.device, self.world.contract.seed, *path)
            if self.graphs is not None:
                self.graphs.begin_pass()
            with self.method.last_pass() if number == update.count - 1 else contextlib.nullcontext():
                with section("forward"), self._precision.autocast():
                    outputs = self.work.forward(self._trained, data)
                with section("loss"), self._precision.autocast():
                    loss = self.work.loss(outputs, data)
                with section("backward"):
                    loss.backward(self._precision.factor)
            if observe is not None:
                with section("metrics"):
                    observe(outputs, data)
            losses.append(loss)
        updated = self.method.step(rate, self.clip)
        if not updated and self._precision.scale is None:
            raise make_divergence_error(NOT_FINITE)
        if updated:
            with section("metrics"):
                for loss in losses:
                    self.losses.add(loss.mean, loss.weight)
        return updated

    def _count_flops(self) -> tuple[float, str] | None:
        """FLOPs of one update of all ranks, and how they were derived; None if unknown. Counts one pass."""
        update, compute_loss = self._sample_pass()
        with peak.keep_state(self.model, self.world.device):
            self.model.train()
            flops = peak.count_flops(compute_loss) * update.count * self.world.size
        return (flops, peak.COUNTED) if flops else None

    def _sample_pass(self) -> tuple[Update[P], Callable[[], Tensor]]:
        """The first update, and a function that computes the loss of its first pass."""
        update = next(self.batches.updates(1))
        return update, self._compute_loss_of(next(iter(update.passes)))

    def _compute_loss_of(self, part: P) -> Callable[[], Tensor]:
        """Prepare a pass, and return a function that computes its loss."""
        data = self.work.prepare(part)

        def compute_loss() -> Tensor:
            with self._precision.autocast():
                return self.work.loss(self.work.forward(self.model, data), data).value

        return compute_loss

    def _set_mode(self, training: bool) -> None:
        self._trained.train(training)

    def _read_losses(self, losses: list[Any]) -> list[float]:
        read = getattr(self.work, "read_losses", None)
        return torch.stack(losses).tolist() if read is None else read(losses)

    def _collect_training_values(self) -> Values:
        collect_metrics = getattr(self.work, "collect_metrics", None)
        return {} if collect_metrics is None else collect_metrics(self.world)

    def _consensus(self) -> AbstractContextManager[object]:
        if not self.method.is_finite():
            raise make_divergence_error(NOT_FINITE)
        return self.method.consensus()

    def _check_replicas(self) -> Values:
        average_buffers(self.world, self.model)
        return self._compare_replicas()

    def _compare_replicas(self) -> Values:
        """Compare replicas off the clock: a checksum of all weights is not part of training."""
        self.world.barrier()  # waiting for slower ranks counts
        with self.tracker.paused():
            distance = self.method.check_replicas()
        return {} if distance is None else {"replica_distance": distance}

    def _facts(self, updates_per_second: float | None) -> Mapping[str, Any]:
        facts: dict[str, object] = {
            "precision": self._precision.used,
            "options": {
                "compile": "no",
                **self.details.get("options", {}),
                "precision": self._precision.used,
                **asdict(self.arithmetic),
                "fused_optimizer": bool(self.method.optimizer.defaults.get("fused")),
                "reduction": type(self.method).__name__,
                **({} if self.graphs is None else {"cuda_graphs": self.graphs.are_replayed(self.world.device)}),
            },
            "loss_scale": self._precision.factor,
            "communication": self.method.stats(),
        }
        if self.details.get("options", {}).get("compile", "no") != "no":
            facts["compile_seconds"] = speed.compile_seconds()
        if self.method.checked:
            facts["self_check"] = dict(self.method.checked)
        if self._gpu is not None and (sampled := self._gpu.facts()):
            facts["gpu"] = sampled
        if self._flops is not None:
            flops, formula = self._flops
            highest = peak.find_peak(self.world.device, self._precision.used)
            facts |= peak.Utilization(flops, formula, highest, updates_per_second, self.world.size).to_dict()
        return facts

    def _state(self) -> Mapping[str, Any]:
        scale = self._precision.scale
        return {**self.method.state_dict(), "loss_scale": asdict(scale) if scale else None}

    def _load_state(self, state: Mapping[str, Any]) -> None:
        self.method.load_state_dict(state)
        if self._precision.scale and state["loss_scale"]:
            self._precision.scale.value = state["loss_scale"]["value"]
            self._precision.scale.good = state["loss_scale"]["good"]

    def _write(self, path: Path, state: Mapping[str, Any]) -> None:
        checkpoint.save_checkpoint(self.world, path, self.name, state)

    def _read(self, path: Path) -> Mapping[str, Any]:
        return checkpoint.load_checkpoint(self.world, path, self.name, self.identity)

    _keeps_elastic = True

    def _own_state(self) -> Mapping[str, Any]:
        buffers = {name: buffer.detach() for name, buffer in self.model.named_buffers()}
        read = getattr(self.work, "read_sums", None)
        return {
            "buffers": buffers,
            "random": torch.get_rng_state(),
            "streams": read_lasting_states(),
            "sums": None if read is None else read(),
        }

    def _load_own_state(self, state: Mapping[str, Any]) -> None:
        for name, buffer in self.model.named_buffers():
            buffer.detach().copy_(state["buffers"][name])
        torch.set_rng_state(state["random"])
        load_lasting_states(state["streams"])
        if state["sums"] is not None:
            self.work.load_sums(state["sums"])  # type: ignore[attr-defined]

    def _write_elastic(self, path: Path, state: Mapping[str, Any]) -> None:
        checkpoint.save_own_checkpoint(path, self.name, {**self.identity, **state})

    def _load_elastic_state(self, state: Mapping[str, Any]) -> None:
        Trainer._load_state(self, state)

    def _share_elastic(self, path: Path) -> bool:
        return checkpoint.share_file(self.world, path)

    def _read_elastic(self, path: Path) -> Mapping[str, Any]:
        return checkpoint.load_checkpoint(self.world, path, self.name, self.identity)

    def _close(self) -> None:
        self.method.close()


# --- the common case: a batch of inputs, outputs, targets ----------------------------------------------------------


class SampleWork:
    """A pass on a batch. `loss` is (outputs, targets) -> mean over the batch.

    compiled   whether the model has compiled parts: they are used only for batches of the usual size, because
               recompiling for a few others costs more than it saves
    metrics    of the training samples, as augmented, by the model that trained on them
    scores     maps the model's outputs to inputs of the metrics; None: the outputs
    """

    def __init__(
        self,
        data: Data,
        loss: Loss,
        compiled: bool = False,
        metrics: Sequence[Metric] = (),
        scores: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._data, self._loss, self._compiled = data, loss, compiled
        self._metrics, self._scores = metrics, scores or _keep_outputs
        self._usual = 0

    def prepare(self, part: Batch) -> tuple[Tensor, Tensor]:
        """Inputs and targets on the device; the first batch's size is the usual one."""
        self._usual = self._usual or part.size
        return self._data.prepare(part, training=True)

    def forward(self, model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
        """The model's outputs; batches of another size do not use compiled parts."""
        with run_eagerly(self._compiled and len(data[1]) != self._usual):
            outputs: Tensor = model(data[0])
        return outputs

    def loss(self, outputs: Tensor, data: tuple[Tensor, Tensor]) -> PassLoss:
        """The mean loss over the batch, with the number of samples."""
        value = self._loss(outputs, data[1])
        return PassLoss(value, value.detach(), len(data[1]))

    def observe(self, outputs: Tensor, data: tuple[Tensor, Tensor]) -> None:
        """Add a pass to the metrics, asynchronously."""
        outputs = outputs.detach()
        for metric in self._metrics:
            metric.update(self._scores(outputs), data[1])

    def read_sums(self) -> list[list[float]]:
        """This rank's sums of the metrics since they were last collected, for a checkpoint."""
        sums = [metric.take() for metric in self._metrics]
        self.load_sums(sums)
        return sums

    def load_sums(self, sums: list[list[float]]) -> None:
        """Restore the sums of `read_sums`."""
        for metric, own in zip(self._metrics, sums, strict=True):
            metric.take()
            metric.add(*own)

    def collect_metrics(self, world: World) -> Values:
        """The metrics since the last call, over all ranks. Collective."""
        return collect(world, self._metrics) if self._metrics else {}


@dataclass(frozen=True)
class SampleValidator:
    """Computes loss and metrics over the whole validation set, each rank on its shard, which may be empty.

    model      unwrapped: a wrapper's forward pass may be collective, and a rank may have no batch
    scores     maps the model's outputs to inputs of the metrics (e.g. logits to probabilities)
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
    method: Method,
    metrics: Sequence[Metric] = (),
    training_metrics: Sequence[Metric] = (),
    goal: GoalWatch | None = None,
    validation_loss: Loss | None = None,
    scores: Callable[[Tensor], Tensor] | None = None,
    precision: Precision | None = None,
    compiled: bool = False,
    graphs: "speed.Graphs | None" = None,
    arithmetic: CudaSettings | None = None,
    unit: Unit | None = None,
    work: Work[Batch] | None = None,
    name: str = "",
    details: Mapping[str, Any] | None = None,
    identity: Mapping[str, Any] | None = None,
    closing: Callable[[], Mapping[str, Any]] = dict,
) -> Trainer[Batch]:
    """The trainer of a task that maps a batch of inputs to outputs and a loss.

    loss     (outputs, targets) -> mean over the batch; validation_loss: None: the same
    metrics  of the validation set, including the goal's. Empty: no validation
    training_metrics   of the training samples
    work     computes a training pass; None: outputs, `loss`, and gradients by autograd
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
        work=work or SampleWork(data, loss, compiled, training_metrics, scores),
        model=model,
        make_optimizer=make_optimizer,
        method=method,
        precision=precision,
        arithmetic=arithmetic or CudaSettings(),
        graphs=graphs,
        unit=unit or Unit(),
    )


def _keep_outputs(outputs: Tensor) -> Tensor:
    return outputs


def run_eagerly(needed: bool) -> AbstractContextManager[object]:
    """A context that bypasses compiled code if `needed`."""
    return torch.compiler.set_stance("force_eager") if needed else contextlib.nullcontext()
