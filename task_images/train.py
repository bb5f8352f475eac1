"""The training loop of all torch tasks: `Trainer` computes updates, `loop` decides when and what follows.

A task supplies batches (`loop.Batches`), a work (`Work`: what a pass computes) and a validator. `Precision` and the
metrics, which all tasks share, are below the trainer.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from task_images import Lazy
from task_images.clock import Snapshot, Tracker
from task_images.contract import TaskUsageError
from task_images.data import load_lasting_states, read_lasting_states, seed_device
from task_images.loop import Loop, Update, Values, make_divergence_error
from task_images.methods.base import LossScale, MakeOptimizer, Method
from task_images.parameters import CUDNN, CudaSettings
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


class PassLoss(NamedTuple):
    """The loss of one pass: `value` is differentiated; `mean` over `weight` samples (or tokens) is reported."""

    value: Tensor
    mean: Tensor
    weight: float

    def backward(self, factor: float) -> None:
        """Add `factor` times the loss's gradients to those of the parameters."""
        torch.autograd.backward(self.value if factor == 1 else self.value * factor)


class Work(Protocol[W]):
    """What a pass computes. The tracker counts each method in its own category.

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
    graphs: speed.Graphs | None = field(default=None, kw_only=True)

    def _make_tracker(self) -> Tracker:
        return Tracker(marks=self.world.marks())

    def run(self) -> None:
        with sample_gpu(self.world) as self._gpu:
            super().run()

    def _attach(self) -> None:
        set_arithmetic(self.arithmetic)
        self._behind: checkpoint.Checkpoints | None = None
        self._precision = self.precision or Precision("fp32", self.world.device)
        self._flops = self._count_flops() if self.plan.protocol.is_on else None
        self._observe = None if self.plan.protocol.is_on else getattr(self.work, "observe", None)
        self._trained = self.method.attach(self.world, self.model, self.make_optimizer, self.tracker)
        if self.graphs is not None:
            self.method.keeps_gradients = True
            self.graphs.prepare(self.model.parameters())

    def _update(self, update: Update[P], rate: float) -> bool:
        enter = self.tracker.enter
        losses: list[PassLoss] = []
        self.method.begin(update.weight, update.total, update.count, self._precision.scale)
        # Passes in a list need no waiting.
        passes = update.passes if isinstance(update.passes, list) else self.tracker.waiting(update.passes)
        for number, part in enumerate(passes):
            enter("preprocessing")
            data = self.work.prepare(part)
            if update.first is not None:
                path = ("dropout", self.position.total, update.first + number)
                seed_device(self.world.device, self.world.contract.seed, *path)
            if self.graphs is not None:
                self.graphs.begin_pass()
            with self.method.last_pass() if number == update.count - 1 else contextlib.nullcontext():
                with self._precision.autocast():
                    enter("forward")
                    outputs = self.work.forward(self._trained, data)
                    enter("loss")
                    loss = self.work.loss(outputs, data)
                enter("backward")
                loss.backward(self._precision.factor)
            if self._observe is not None:
                enter("metrics")
                self._observe(outputs, data)
            losses.append(loss)
        updated = self.method.step(rate, self.clip)
        if not updated and self._precision.scale is None:
            raise make_divergence_error(NOT_FINITE)
        if updated:
            enter("metrics")
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
        values: list[float] = torch.stack(losses).tolist()
        return values

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

    # --- checkpoints ------------------------------------------------------------------------------------------------

    _is_sharded = False  # whether this rank has only a part of the model
    _is_in_parts = False  # whether checkpoints have model and optimizer in parts, which any layout can read

    @cached_property
    def _checkpoints(self) -> checkpoint.Checkpoints:
        given = self.plan.checkpoint_dir
        folder = Path(given or Path(self.world.contract.output_dir, "checkpoints"))
        return checkpoint.Checkpoints(self.world, folder, keeps_all=bool(given))

    def _write_checkpoints(self, is_end: bool) -> None:
        plan, update, restarts = self.plan, self.position.total, self._restarts
        if (plan.checkpoint and is_end) or (plan.checkpoint_every and update % plan.checkpoint_every == 0):
            with self._consensus():
                self._checkpoints.write(update, self._state())
        if restarts is None or self._is_sharded or self._is_done or not restarts.is_due(update, self.world.agree):
            return
        begun = time.monotonic()
        if self._behind is None:
            self._behind = checkpoint.Checkpoints(self.world, restarts.folder)
        with self._consensus():
            self._behind.write_behind(update, self._state())
        blocked = time.monotonic() - begun
        self.report.metric("checkpoint_seconds", blocked, step=update, seconds=self._wall(), unit="s")

    def _state(self) -> checkpoint.State:
        """The state for a checkpoint. Collective, within `_consensus`."""
        scale, read_sums = self._precision.scale, getattr(self.work, "read_sums", None)
        main = {**self._main_state(), "loss_scale": asdict(scale) if scale else None}
        own = {
            "method": self.method.own_state() if self.world.size > 1 else {},
            "losses": self.losses.state_dict(),
            "buffers": {name: buffer.detach() for name, buffer in self.model.named_buffers()},
            "random": torch.get_rng_state(),
            "streams": read_lasting_states(),
            "sums": None if read_sums is None else read_sums(),
        }
        if not self._is_in_parts:
            return checkpoint.State({**main, **self.method.state_dict()}, own)
        parts = checkpoint.collect_parts(self.method.model, self.method.optimizer)
        return checkpoint.State({**main, "update": self.method.update}, own, parts, self._is_sharded)

    def _restore(self) -> Snapshot | None:
        again = None if self._restarts is None else self._restarts.resume
        if again is None and not self.plan.resume:
            return None
        begun, world, place = time.monotonic(), self.world, again or Path(self.plan.resume)
        if again is not None:
            checkpoint.share(world, place)
        main = checkpoint.read_main(world, place, {"task": self.name, **self.identity})
        self._load_model(main, place)
        if self._precision.scale and main["loss_scale"]:
            self._precision.scale.value = main["loss_scale"]["value"]
            self._precision.scale.good = main["loss_scale"]["good"]
        self._load_own_states(checkpoint.read_own(world, place, main), main["ranks"])
        earlier = self._load_main_state(main)
        if again is not None:
            self.curve = main["curve"]
            self.report.metric("restore_seconds", time.monotonic() - begun, step=self.position.total, unit="s")
        return earlier

    def _load_model(self, main: Mapping[str, Any], place: Path) -> None:
        if self._is_in_parts == ("model" in main):
            raise TaskUsageError(
                f"{place} has its optimizer's state in another form than this method needs (sharded or whole)",
                "Resume with the method that made it.",
            )
        if self._is_in_parts:
            method = self.method
            checkpoint.load_parts(place, method.model, method.optimizer, self._is_sharded)
            method.update = main["update"]
        else:
            self.method.load_state_dict(main)
        if self.world.size > 1:
            self.method.take_model()

    def _load_own_states(self, found: Sequence[Mapping[str, Any]], ranks: int) -> None:
        """What this rank had of its own if there are as many ranks as before, else what all had."""
        methods = [own["method"] for own in found]
        if ranks != self.world.size:
            if self.world.size > 1 and all(methods):
                self.method.load_other_states(methods)
            return
        [own] = found
        if own["method"]:
            self.method.load_own_state(own["method"])
        self.losses.load_state_dict(own["losses"])
        for name, buffer in self.model.named_buffers():
            buffer.detach().copy_(own["buffers"][name])
        torch.set_rng_state(own["random"])
        load_lasting_states(own["streams"])
        if own["sums"] is not None:
            self.work.load_sums(own["sums"])  # type: ignore[attr-defined]

    def _finish_writing(self) -> None:
        if self._behind is not None:
            self._behind.wait()

    def _close(self) -> None:
        self.method.close()


# --- number formats: fp32, or mixed precision with fp32 parameters (bf16; fp16 with a dynamic loss scale) -------------

FORMATS = ("fp32", "bf16", "fp16")
# Overflows are detected and skipped, so start high, where small gradients do not vanish.
FIRST_LOSS_SCALE = 65536.0


def set_arithmetic(settings: CudaSettings) -> None:
    """Use true fp32 on NVIDIA GPUs unless TF32 is requested; torch's default is TF32 in convolutions and RNNs.

    `cudnn`: "default" uses the algorithm that cuDNN proposes, "deterministic" a bitwise reproducible one, "benchmark"
    the fastest one tried.
    """
    if settings.cudnn not in CUDNN:
        raise TaskUsageError(f'the parameter "cudnn" is {settings.cudnn!r}, not {" or ".join(CUDNN)}')
    kind = "tf32" if settings.tf32 else "ieee"
    torch.backends.cuda.matmul.fp32_precision = kind
    torch.backends.cudnn.conv.fp32_precision = kind  # type: ignore[attr-defined]
    torch.backends.cudnn.rnn.fp32_precision = kind  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = settings.cudnn == "deterministic"
    torch.backends.cudnn.benchmark = settings.cudnn == "benchmark"


def refuse_bf16_lstm(precision: str, device: torch.device) -> None:
    """Raises TaskUsageError for bf16 LSTMs on NVIDIA GPUs: torch.autocast runs them in fp16, in which small gradients
    vanish without a loss scale (ATen/native/cudnn/AutocastRNN.cpp)."""
    if precision == "bf16" and device.type == "cuda":
        raise TaskUsageError(
            "on GPUs, torch computes LSTMs in fp16 if bf16 is requested, without loss scaling",
            "--set precision=fp32, with --set tf32=true for speed; or fp16, if the task has it",
        )


class Precision:
    """A number format: its autocast context and its loss scale (only for fp16, else None).

    `used` may differ from the request: fp16 is supported only on GPUs, and replaced by fp32 on CPUs. `casts` is False
    for models that cast themselves (FSDP).
    """

    def __init__(self, asked: str, device: torch.device, scale: LossScale | None = None, *, casts: bool = True) -> None:
        if asked not in FORMATS:
            raise ValueError(f"the precision {asked!r} is not one of {', '.join(FORMATS)}")
        self.used = "fp32" if asked == "fp16" and device.type == "cpu" else asked
        self.scale = (scale or LossScale()) if self.used == "fp16" else None
        self._device = device
        self._casts = casts

    @property
    def factor(self) -> float:
        """The factor on losses before the backward pass."""
        return self.scale.value if self.scale else 1.0

    def autocast(self) -> AbstractContextManager[object]:
        """The autocast context for forward pass and loss."""
        if self.used == "fp32" or not self._casts:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, torch.bfloat16 if self.used == "bf16" else torch.float16)


def make_precision(precision: str, device: torch.device) -> Precision:
    """The precision on a device, with a fresh loss scale for float16."""
    return Precision(precision, device, LossScale(value=FIRST_LOSS_SCALE))


# --- metrics of a whole data set: each rank keeps sums, which are added over ranks once and then divided; a mean of
#     batch or rank means would depend on how the data are split


class Metric:
    """A metric computed from sums in float64. Tensors are summed on their device, asynchronously; numbers on the host.

    Subclasses add to the sums and compute the value from them.
    """

    def __init__(self, name: str, sums: int) -> None:
        self.name = name
        self._numbers = [0.0] * sums
        self._tensors: dict[int, Tensor] = {}

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add one batch: outputs [n, ...] of the model and targets [n]."""
        raise NotImplementedError

    def value(self, sums: Sequence[float]) -> float:
        """The value of the metric for sums over all batches and ranks."""
        raise NotImplementedError

    def add(self, *values: Tensor | float) -> None:
        """Add one value to each sum, in order. Tensors stay on their device."""
        for index, value in enumerate(values):
            if not isinstance(value, Tensor):
                self._numbers[index] += value
            elif index in self._tensors:
                self._tensors[index] = self._tensors[index] + value.detach()
            else:
                self._tensors[index] = value.detach().to(torch.float64)

    def take(self) -> list[float]:
        """Return this rank's sums, and reset them to zero."""
        sums, tensors = self._numbers, self._tensors
        self._numbers, self._tensors = [0.0] * len(sums), {}
        if tensors:
            # One transfer for all of them.
            for index, value in zip(tensors, torch.stack(list(tensors.values())).tolist(), strict=True):
                sums[index] += value
        return sums


class Mean(Metric):
    """Weighted mean of numbers, e.g. of a loss per sample. NaN if nothing was added."""

    def __init__(self, name: str) -> None:
        super().__init__(name, 2)

    def add_mean(self, mean: Tensor | float, weight: float) -> None:
        """Add `weight` samples (or tokens) whose mean is `mean`."""
        mean = mean.detach().to(torch.float64) if isinstance(mean, Tensor) else mean
        self.add(mean * weight, weight)

    def value(self, sums: Sequence[float]) -> float:
        """The mean of sums = (weighted total, weight)."""
        return sums[0] / sums[1] if sums[1] else math.nan


class Perplexity(Mean):
    """exp of the global mean of a loss per token; infinite if that overflows."""

    def __init__(self, name: str = "Perplexity") -> None:
        super().__init__(name)

    def value(self, sums: Sequence[float]) -> float:
        """exp of the mean of sums = (total loss, tokens)."""
        mean = super().value(sums)
        return math.exp(mean) if mean < 700 else mean * math.inf


class TopK(Metric):
    """Prec@k in percent: how often the target is among the k largest outputs [n, classes].

    Outputs [n] or [n, 1] are the probability p of class 1 and are treated as [1-p, p].
    """

    def __init__(self, k: int = 1) -> None:
        super().__init__(f"Prec@{k}", 2)
        self.k = k

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Count the hits of outputs [n, classes] (or [n]) against targets [n].

        Raises ValueError for fewer than k classes.
        """
        if outputs.dim() == 1 or outputs.shape[1] == 1:
            positive = outputs.reshape(-1)
            outputs = torch.stack([1 - positive, positive], dim=1)
        if self.k > outputs.shape[1]:
            raise ValueError(f"Prec@{self.k} of {outputs.shape[1]} classes")
        best = outputs.topk(self.k, dim=1).indices
        self.add((best == targets.long().reshape(-1, 1)).sum(), float(len(targets)))

    def value(self, sums: Sequence[float]) -> float:
        """Percent of sums = (hits, samples)."""
        return 100.0 * sums[0] / sums[1] if sums[1] else math.nan


class F1(Metric):
    """F1 score of class 1 from global counts; outputs [n] are probabilities, and 1 is predicted from `threshold` up."""

    def __init__(self, threshold: float = 0.5) -> None:
        super().__init__("F1-Score", 3)
        self.threshold = threshold

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Count hits, predictions and positives of probabilities [n] against targets [n] of 0 and 1."""
        predicted, actual = outputs.reshape(-1) >= self.threshold, targets.reshape(-1) == 1
        self.add((predicted & actual).sum(), predicted.sum(), actual.sum())

    def value(self, sums: Sequence[float]) -> float:
        """F1 of sums = (hits, predicted, actual), from 0 to 1."""
        hits, predicted, actual = sums
        precision, recall = hits / (predicted + 1e-9), hits / (actual + 1e-9)
        return 2 * precision * recall / (precision + recall + 1e-9)


class Dice(Metric):
    """Soft Dice coefficient (2 sum p y + e) / (sum p + sum y + e), e = 1e-4, from global sums; outputs [n] are p."""

    def __init__(self) -> None:
        super().__init__("Dice Coefficient", 2)

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add overlap and total of probabilities [n] and targets [n] of 0 and 1."""
        p, y = outputs.reshape(-1).double(), targets.reshape(-1).double()
        self.add((p * y).sum(), p.sum() + y.sum())

    def value(self, sums: Sequence[float]) -> float:
        """The coefficient of sums = (overlap, total), from 0 to 1."""
        return (2 * sums[0] + 1e-4) / (sums[1] + 1e-4)


def collect(world: World, metrics: Sequence[Metric]) -> dict[str, float]:
    """name -> value over all ranks; resets the metrics. One collective, so every rank must call it."""
    own = [metric.take() for metric in metrics]
    total = world.sum([number for sums in own for number in sums])
    values, start = {}, 0
    for metric, sums in zip(metrics, own, strict=True):
        values[metric.name] = metric.value(total[start : start + len(sums)])
        start += len(sums)
    return values
