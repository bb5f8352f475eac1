"""The training loop of language models: update after update to the loss goal, or by the throughput protocol.

`Pretraining._update` is the algorithm: passes over this rank's part of the global batch, one exchange of gradients, one
clipped AdamW step at the rate of the schedule. The mean is over all tokens of all ranks and passes, however they are
spread, so the curve does not depend on the layout.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from task_images.comm.base import Placement, Strategy
from task_images.comm.ddp import DdpAllReduce
from task_images.comm.prepare import prepare_strategy
from task_images.harness.distributed import World
from task_images.harness.errors import DivergedError, TaskUsageError
from task_images.harness.goals import GoalWatch
from task_images.harness.language.checkpoints import load_step, save_step
from task_images.harness.language.layout import CHECKPOINTING, PARALLEL, Layout, LayoutError, Memory, check_memory
from task_images.harness.language.parallel import check_optimizer, split_decay
from task_images.harness.language.sharded import ShardedUpdate
from task_images.harness.language.speed import find_peak
from task_images.harness.metrics import Mean, TrainingLoss, collect
from task_images.harness.parameters import check_choices
from task_images.harness.report import Reporter
from task_images.harness.throughput import Protocol as ThroughputProtocol
from task_images.harness.throughput import Throughput, peak_memory
from task_images.harness.tracker import Snapshot, Tracker

PRECISIONS = ("fp32", "bf16")


@dataclass(frozen=True)
class PretrainingSettings:
    """Parameters that both tasks have; each has its own defaults."""

    sequence_length: int = 1024
    global_batch: int = 480
    batch_per_rank: int = 0
    micro_batch: int = 12
    steps: int = 1000
    learning_rate: float = 6e-4
    warmup_steps: int = 100
    final_rate: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.1
    clip: float = 1.0
    evaluate_every: int = 50
    validation_sequences: int = 0
    parallel: str = "ddp"
    tensor_parallel: int = 0
    replicas: int = 0
    reshard: bool = True
    activation_checkpointing: str = "none"
    precision: str = "fp32"
    compile: bool = False
    checkpoint_every: int = 0
    checkpoint_dir: str = ""
    resume: str = ""
    budget_seconds: float = 0.0
    warmup_updates: int = 10
    blocks: int = 0
    block_updates: int = 10
    goal_full: float = 1.5
    goal_light: float = 1.75

    @property
    def protocol(self) -> ThroughputProtocol:
        return ThroughputProtocol(self.warmup_updates, self.blocks, self.block_updates)


def check_pretraining(settings: PretrainingSettings, ranks: int) -> None:
    """Raises TaskUsageError for words and combinations that do not exist."""
    choices = {"parallel": PARALLEL, "activation_checkpointing": CHECKPOINTING, "precision": PRECISIONS}
    check_choices(settings, choices)
    if settings.checkpoint_every and not settings.checkpoint_dir:
        raise TaskUsageError(
            "checkpoint_every needs a folder that all ranks share", "--set checkpoint_dir=/shared/checkpoints"
        )


@contextmanager
def layout_errors_as_usage() -> Iterator[None]:
    """Turn a LayoutError into the TaskUsageError that a rank ends with."""
    try:
        yield
    except LayoutError as error:
        raise TaskUsageError(str(error), error.hint) from None


def refuse_on_device(memory: Memory, device: torch.device) -> None:
    """Raises TaskUsageError if the GPU has less memory than the estimate; a CPU's was looked at before the start."""
    if device.type != "cuda":
        return
    with layout_errors_as_usage():
        check_memory(memory, float(torch.cuda.get_device_properties(device).total_memory))


@dataclass(frozen=True)
class WarmupCosine:
    """Linear from target / warmup to `target` in `warmup` updates, then half a cosine to `floor` x target at `end`."""

    target: float
    warmup: int
    end: int
    floor: float

    def __call__(self, update: int) -> float:
        if update < self.warmup:
            return self.target * (update + 1) / self.warmup
        share = min(1.0, (update - self.warmup) / max(1, self.end - self.warmup))
        return self.target * (self.floor + (1 - self.floor) * (1 + math.cos(math.pi * share)) / 2)


class Batch(Protocol):
    """One pass. `terms`: what the whole update's sum of losses is divided by; in validation, this pass's own terms."""

    @property
    def terms(self) -> float: ...


B = TypeVar("B", bound=Batch)


class Workload(Protocol[B]):
    """What is trained: data and loss. `samples` and `tokens` are those of a global batch."""

    samples: int
    tokens: int
    updates_per_epoch: float

    def training(self, update: int) -> Iterator[B]:
        """This rank's passes of one update (from 0)."""
        ...

    def validation(self) -> Iterator[B]:
        """This rank's passes over the validation set, equally many on all ranks."""
        ...

    def loss(self, model: nn.Module, batch: B) -> Tensor:
        """The sum of losses over this rank's terms of the batch, a scalar."""
        ...

    def score(self, model: nn.Module, batch: B) -> Mapping[str, tuple[Tensor | float, float]]:
        """name -> (mean, weight) of this batch, among them "loss"; equally many names on every rank."""
        ...


@dataclass
class Pretraining(Generic[B]):
    """All that a training needs. `model` is spread over the ranks already; flops: of one update, all ranks together.

    facts     must be equal for training to go on from a checkpoint
    """

    world: World
    report: Reporter
    settings: PretrainingSettings
    layout: Layout
    model: nn.Module
    workload: Workload[B]
    goal_metric: str
    parameters: int
    passes: int
    flops: float
    flops_formula: str
    memory: Memory
    facts: Mapping[str, Any]
    unit: tuple[str, float] | None = None  # of throughput: its name, and how many an update has; None: tokens
    bytes_per_token: float | None = None
    details: Mapping[str, object] = field(default_factory=dict)

    def run(self) -> None:
        """Train to the goal, the last step or the last block, and report. Raises DivergedError on NaN."""
        p, protocol = self.settings, self.settings.protocol
        # A device that is waited for at every border of a section could not overlap anything.
        is_synced = self.world.device.type == "cuda" and not protocol.is_on
        self.tracker = Tracker(self.world.synchronize if is_synced else None)
        self.strategy = self._make_strategy()
        self.model = self.strategy.attach(Placement(self.world), self.model, self._make_optimizer, tracker=self.tracker)
        check_optimizer(self.strategy.optimizer, self.strategy.model)
        self.rate = WarmupCosine(p.learning_rate, p.warmup_steps, p.steps, p.final_rate)
        self.peak = find_peak(self.world.device, p.precision)
        self.first = self._resume()
        self.world.barrier()
        self.tracker.restart()
        if protocol.is_on:
            self._measure(protocol)
        else:
            self._train()
        self.strategy.close()

    def _make_strategy(self) -> Strategy:
        """How gradients travel. Models in shards have their own way; others take any method."""
        method = self.world.contract.method
        if self.layout.name != "ddp":
            if method:
                raise TaskUsageError(
                    f"parallel={self.layout.name} exchanges gradients in its own way, so --method has no meaning",
                    "Leave out --method, or --set parallel=ddp.",
                )
            return ShardedUpdate(self.layout)
        strategy = prepare_strategy(self.world, DdpAllReduce)
        if self.settings.clip and not strategy.traits.barrier:
            raise TaskUsageError(
                f"clip={self.settings.clip:g} needs all gradients at once, and this method updates layer by layer",
                "--set clip=0, or another method",
            )
        return strategy

    def _make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        p = self.settings
        groups = split_decay(model, p.weight_decay)
        return torch.optim.AdamW(groups, lr=p.learning_rate, betas=(p.beta1, p.beta2), fused=True)

    # --- the two ways through the updates -------------------------------------------------------------------------

    def _train(self) -> None:
        p = self.settings
        goal = GoalWatch(self.goal_metric, "<=", p.goal_full, p.goal_light, self.world.contract.goal)
        recent, curve, spent = TrainingLoss(), list[dict[str, float]](), None
        begin: Snapshot | None = None
        for update in range(self.first, p.steps):
            self._begin_epoch(update)
            loss, weight = self._update(update)
            begin = begin or self.tracker.snapshot()  # the first update does much for the first time
            recent.add(loss / weight, weight)
            done = update + 1
            self.report.step(done, p.steps, epoch=self.tracker.epoch, epochs=self._epoch(p.steps - 1))
            if p.checkpoint_every and done % p.checkpoint_every == 0:
                self._save(done)
            if done % p.evaluate_every and done < p.steps:
                continue
            training_loss = recent.collect(self.world, self.tracker.epoch, done)
            values = self._validate(done)
            curve.append(self._report_values(done, training_loss, values))
            if goal.observe(values[self.goal_metric], self.tracker.epoch, self.tracker) and not p.budget_seconds:
                break
            if p.budget_seconds and self.world.agree(self.tracker.snapshot().wall) >= p.budget_seconds:
                spent = p.budget_seconds
                break
        self.report.phase("finished")
        rate = self._tokens_per_second(begin)
        self.report.result(self.tracker, goal, {**self._details(rate), "curve": curve}, spent)

    def _measure(self, protocol: ThroughputProtocol) -> None:
        unit, per_update = self.unit or ("tokens", self.workload.tokens)
        meter = Throughput(self.world, protocol, per_update=per_update, unit=unit, on_start=self.tracker.restart)
        recent = TrainingLoss()
        for update in range(self.first, self.first + protocol.total):
            self._begin_epoch(update)
            recent.add(*_mean_of(self._update(update)))
            meter.after_update()
            self.report.step(update + 1 - self.first, protocol.total, epoch=1, epochs=1)
        loss = recent.collect(self.world, self.tracker.epoch, self.first + protocol.total)
        measured = meter.measurement()
        self.report.say(str(measured))
        tokens = measured.summary.mean * self.workload.tokens / per_update
        self.report.metric("tokens_per_second", tokens, unit="tokens/s")
        self.report.phase("finished")
        details = {**self._details(tokens), "train_loss": loss, "throughput_protocol": asdict(measured)}
        self.report.result(self.tracker, None, details)

    # --- one update -----------------------------------------------------------------------------------------------

    def _update(self, update: int) -> tuple[Tensor, float]:
        """Sum of losses and number of terms of this rank's part of one update."""
        section = self.tracker.section
        total, weight = torch.zeros((), device=self.world.device), 0.0
        self.model.train()
        passes = list(self.tracker.waiting(self.workload.training(update)))
        with self.tracker.step(samples=self.workload.samples):
            self.strategy.begin(1.0, passes[0].terms, len(passes))
            for number, batch in enumerate(passes, 1):
                with self.strategy.last_pass() if number == len(passes) else nullcontext():
                    with section("forward"), self._autocast():
                        loss = self.workload.loss(self.model, batch)
                    with section("backward"):
                        loss.backward()  # type: ignore[no-untyped-call]
                total += loss.detach()
                weight += batch.terms / (self.layout.data * len(passes))
            applied = self.strategy.step(self.rate(update), self._clip)
        if not applied.updated:
            raise DivergedError(
                f"the norm of the gradient is {applied.norm} in update {update + 1}: the training has diverged",
                "A lower learning rate may help.",
            )
        return total, weight

    def _validate(self, done: int) -> dict[str, float]:
        self.report.phase("validation", step=done, steps=self.settings.steps)
        means: dict[str, Mean] = {}
        self.model.eval()
        # Not inference_mode: sharded models allocate in their first forward pass, and must train on that later.
        with self.strategy.consensus(), self.tracker.section("validation"):
            with torch.no_grad(), self._autocast():
                for batch in self.workload.validation():
                    for name, (value, weight) in self.workload.score(self.model, batch).items():
                        means.setdefault(name, Mean(name)).add_mean(value, weight)
            if isinstance(self.model, FSDPModule):
                self.model.reshard()
            values = collect(self.world, list(means.values()))
            self.strategy.check_replicas()
        if not math.isfinite(values["loss"]):
            raise DivergedError(
                f"the validation loss is {values['loss']} after {done} updates: the training has diverged",
                "A lower learning rate may help.",
            )
        return values

    @property
    def _clip(self) -> float | None:
        """Methods without a barrier know no norm; for others an infinite limit measures it, as a guard against NaN."""
        return self.settings.clip or (math.inf if self.strategy.traits.barrier else None)

    def _autocast(self) -> AbstractContextManager[object]:
        """FSDP casts by its own policy."""
        if self.settings.precision == "fp32" or self.layout.is_sharded:
            return nullcontext()
        return torch.autocast(self.world.device.type, torch.bfloat16)

    # --- bookkeeping ----------------------------------------------------------------------------------------------

    def _epoch(self, update: int) -> int:
        return int(update / self.workload.updates_per_epoch) + 1

    def _begin_epoch(self, update: int) -> None:
        epoch = self._epoch(update)
        if epoch != self.tracker.epoch:
            self.tracker.epoch = epoch
            self.report.phase("training", epoch=epoch, epochs=self._epoch(self.settings.steps - 1))

    def _report_values(self, done: int, training_loss: float, values: Mapping[str, float]) -> dict[str, float]:
        seconds, epoch = self.tracker.snapshot().wall, self.tracker.epoch
        self.report.metric("train_loss", training_loss, epoch=epoch, step=done, seconds=seconds)
        for name, value in values.items():
            self.report.metric(f"val_global_{name}", value, epoch=epoch, step=done, seconds=seconds)
        shown = "".join(f"  validation {name} {value:.4f}" for name, value in values.items())
        self.report.say(f"step {done}/{self.settings.steps}  loss {training_loss:.4f}{shown}  {seconds:.1f} s")
        return {"step": done, "seconds": seconds, "train_loss": training_loss, **values}

    def _tokens_per_second(self, begin: Snapshot | None) -> float | None:
        """Of all ranks, since `begin`, without validation; None for a single update."""
        now = self.tracker.snapshot()
        if begin is None or now.updates == begin.updates:
            return None
        spent = now.training - begin.training + now.seconds["data_wait"] - begin.seconds["data_wait"]
        return (now.updates - begin.updates) * self.workload.tokens / spent

    def _details(self, tokens_per_second: float | None) -> dict[str, object]:
        found: dict[str, object] = {
            **self.details,
            "layout": asdict(self.layout),
            "parameters": self.parameters,
            "passes_per_update": self.passes,
            "global_batch": self.settings.global_batch,
            "tokens_per_update": self.workload.tokens,
            "tokens_per_second": tokens_per_second,
            "flops_formula": self.flops_formula,
            "flops_per_update": self.flops,
            "peak_flops": asdict(self.peak),
            "memory": {"estimated_bytes": self.memory.total, "peak_bytes": peak_memory(self.world)},
            "precision": self.settings.precision,
            "communication": {
                **planned_communication(self.layout, self.settings, self.parameters, self.passes),
                **self.strategy.stats(),
            },
            "resumed_at_update": self.first or None,
        }
        if tokens_per_second is not None:
            per_rank = tokens_per_second / self.world.size
            flops = self.flops / self.workload.tokens * per_rank
            found["tokens_per_second_per_rank"] = per_rank
            found["model_flops_per_second_per_rank"] = flops
            found["mfu_of_measured_peak"] = flops / self.peak.measured
            if self.peak.datasheet is not None:
                found["mfu"] = flops / self.peak.datasheet
        return found

    def _save(self, done: int) -> None:
        folder = Path(self.settings.checkpoint_dir)
        with self.strategy.consensus():
            save_step(self.world, folder, done, self.strategy.model, self.strategy.optimizer, self.facts)

    def _resume(self) -> int:
        if not self.settings.resume:
            return 0
        step = load_step(Path(self.settings.resume), self.strategy.model, self.strategy.optimizer, self.facts)
        self.report.say(f"going on after update {step}")
        return step


def planned_communication(
    layout: Layout, settings: PretrainingSettings, parameters: int, passes: int
) -> dict[str, object]:
    """Bytes of the collectives of one update, per rank, as the layout asks for them; counted, not measured.

    DDP reduces fp32 gradients once. FSDP gathers parameters for the forward pass, again for the backward pass if they
    were freed, and scatters gradients in fp32. Tensor-parallel ranks exchange activations, which is not counted here.
    """
    share = parameters // layout.tensor
    if layout.data == 1:
        return {"bytes_per_update": 0, "kinds": {}}
    if not layout.is_sharded:
        return {"bytes_per_update": 4 * share, "kinds": {"all_reduce": 4 * share}}
    width = 2 if settings.precision == "bf16" else 4
    kinds = {
        "all_gather": width * share * passes * (2 if settings.reshard else 1),
        "reduce_scatter": 4 * share,
    }
    if layout.replicas > 1:
        kinds["all_reduce"] = 4 * share // layout.shards
    return {"bytes_per_update": sum(kinds.values()), "kinds": kinds}


def _mean_of(loss: tuple[Tensor, float]) -> tuple[Tensor, float]:
    total, weight = loss
    return total / weight, weight
