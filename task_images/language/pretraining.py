"""Pretraining with the common training loop (train): updates of many passes, AdamW, sharded models.

The mean is over all tokens of all ranks and passes, so the curve does not depend on the layout. For the loop, the whole
training is one epoch of `steps` updates.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from task_images.arrays import stream_ahead
from task_images.data import pin
from task_images.elastic import ElasticCheckpoints
from task_images.errors import TaskUsageError
from task_images.goals import GoalWatch
from task_images.language.checkpoints import check_digests, load_method_state, load_step, read_facts, save_step
from task_images.language.layout import Layout
from task_images.language.parallel import check_optimizer
from task_images.language.sharded import ShardedUpdate
from task_images.language.tokens import map_tensors
from task_images.loop import Plan, Unit, Update, Values, check_finite
from task_images.methods.base import MakeOptimizer, Method
from task_images.methods.check import prepare_method
from task_images.methods.ddp import Ddp
from task_images.metrics import Mean, collect
from task_images.parameters import PretrainingSettings
from task_images.precision import Precision
from task_images.report import Reporter
from task_images.schedules import PerUpdate
from task_images.speed import Graphs
from task_images.train import PassLoss, Trainer, count_parameters, split_decay
from task_images.world import World


@dataclass(frozen=True)
class WarmupCosine:
    """Linear from target / warmup to `target` in `warmup` updates, then half a cosine to `floor` x target at `end`."""

    target: float
    warmup: int
    end: int
    floor: float

    def __call__(self, update: float) -> float:
        if update < self.warmup:
            return self.target * (update + 1) / self.warmup
        share = min(1.0, (update - self.warmup) / max(1, self.end - self.warmup))
        return self.target * (self.floor + (1 - self.floor) * (1 + math.cos(math.pi * share)) / 2)


@dataclass(frozen=True)
class WarmupStableLinear:
    """Linear from target / warmup to `target` in `warmup` updates, then constant; linear decay over the last `share` of
    the updates to `floor` x target at `end`."""

    target: float
    warmup: int
    end: int
    floor: float
    share: float

    def __call__(self, update: float) -> float:
        if update < self.warmup:
            return self.target * (update + 1) / self.warmup
        left = min(1.0, max(0.0, 1 - update / self.end) / self.share)
        return self.target * (self.floor + (1 - self.floor) * left)


def make_schedule(p: PretrainingSettings) -> PerUpdate:
    """The learning rate schedule of the parameters."""
    if p.schedule == "linear":
        return PerUpdate(WarmupStableLinear(p.learning_rate, p.warmup_steps, p.steps, p.final_rate, p.decay_share))
    return PerUpdate(WarmupCosine(p.learning_rate, p.warmup_steps, p.steps, p.final_rate))


class Batch(Protocol):
    """One pass. `terms`: the divisor of the update's summed loss; in validation, the number of terms of this pass."""

    @property
    def terms(self) -> float:
        """Number of terms in the sum of losses."""


B = TypeVar("B", bound=Batch)


class Workload(Generic[B]):
    """The task-specific part of a pretraining: data, forward pass, loss.

    samples   sequences per global batch; tokens: tokens per global batch
    """

    samples: int
    tokens: int
    updates_per_epoch: float

    def training(self, update: int) -> Iterator[B]:
        """This rank's passes of one update (from 0)."""
        raise NotImplementedError

    def validation(self) -> Iterator[B]:
        """This rank's passes over the validation set, the same number on all ranks."""
        raise NotImplementedError

    def prepare(self, part: B) -> B:
        """The pass on the model's device."""
        raise NotImplementedError

    def forward(self, model: nn.Module, data: B) -> Any:
        raise NotImplementedError

    def sum_loss(self, outputs: Any, data: B) -> Tensor:
        """The sum of losses over this rank's terms, a scalar."""
        raise NotImplementedError

    def score(self, outputs: Any, data: B) -> Mapping[str, tuple[Tensor | float, float]]:
        """name -> (mean, weight) of this pass, including "loss"; the same names on all ranks."""
        raise NotImplementedError


@dataclass
class Pretraining(Generic[B]):
    """A pretraining. `model` is already distributed over the ranks; flops: of one update of all ranks.

    identity  settings that must match to resume from a checkpoint
    """

    world: World
    report: Reporter
    settings: PretrainingSettings
    layout: Layout
    model: nn.Module
    workload: Workload[B]
    name: str
    goal_metric: str
    parameters: int
    passes: int
    flops: float
    flops_formula: str
    identity: Mapping[str, Any]
    unit: Unit
    details: Mapping[str, object] = field(default_factory=dict)
    make_optimizer: MakeOptimizer | None = None

    def run(self) -> None:
        """Train to the goal, the last step or the last block, and report. Raises DivergedError on NaN."""
        self.make_trainer().run()

    def make_trainer(self) -> "PretrainingTrainer[B]":
        """The trainer for the common loop."""
        p, world = self.settings, self.world
        precision = Precision(p.precision, world.device, casts=not self.layout.is_sharded)
        method = self._make_method()
        return PretrainingTrainer(
            world,
            self.report,
            PretrainingBatches(self.workload, p.steps, self.passes, self.layout.data_rank(world.rank), world.device),
            make_schedule(p),
            Plan(
                1,
                p.budget_seconds,
                p.past_goal,
                validate_every=p.evaluate_every,
                checkpoint_every=p.checkpoint_every,
                resume=p.resume,
                protocol=p.protocol,
            ),
            name=self.name,
            validate=PretrainingValidator(world, self.model, self.workload, precision),
            goal=GoalWatch(self.goal_metric, "<=", p.goal_full, p.goal_light, world.contract.goal),
            details=self._describe(),
            identity=self.identity,
            unit=self.unit,
            work=PretrainingWork(self.workload, self.layout.data * self.passes),
            model=self.model,
            make_optimizer=self.make_optimizer or self._make_optimizer,
            method=method,
            precision=precision,
            # Methods without a barrier have no norm; for others an infinite limit measures it, as a guard against NaN.
            clip=p.clip or (None if method.gates else math.inf),
            arithmetic=p,
            graphs=Graphs() if p.compile == "graphs" else None,
            pretraining=self,
        )

    def _make_method(self) -> Method:
        """Gradient exchange. Sharded models have their own; others support any method."""
        contract = self.world.contract
        if self.layout.name != "ddp":
            if contract.method:
                raise TaskUsageError(
                    f"parallel={self.layout.name} exchanges gradients itself, so --method has no effect",
                    "Leave out --method, or --set parallel=ddp.",
                )
            self.report.say(f"method: as in parallel={self.layout.name}")
            return ShardedUpdate(self.layout)
        method = prepare_method(self.world, Ddp)
        if self.settings.clip and method.gates:
            raise TaskUsageError(
                f"clip={self.settings.clip:g} needs all gradients at once, and this method updates layer by layer",
                "--set clip=0, or another method",
            )
        return method

    def _make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        p = self.settings
        groups = split_decay(model, p.weight_decay)
        return torch.optim.AdamW(groups, lr=p.learning_rate, betas=(p.beta1, p.beta2), eps=p.epsilon, fused=True)

    def _describe(self) -> dict[str, object]:
        return {
            **self.details,
            "layout": asdict(self.layout),
            "parameters": self.parameters,
            "passes_per_update": self.passes,
            "global_batch": self.settings.global_batch,
            "tokens_per_update": self.workload.tokens,
        }


@dataclass
class PretrainingTrainer(Trainer[B]):
    """The training loop for models that may be sharded, whose checkpoints are written by all ranks."""

    pretraining: Pretraining[B] = field(kw_only=True)

    def _attach(self) -> None:
        super()._attach()
        check_optimizer(self.method.optimizer, self.method.model)

    def _count_flops(self) -> tuple[float, str]:
        return self.pretraining.flops, self.pretraining.flops_formula

    def _check_replicas(self) -> Values:
        """Check replicas without averaging buffers, of which there are none."""
        return self._compare_replicas()

    def _facts(self, updates_per_second: float | None) -> Mapping[str, Any]:
        it = self.pretraining
        self._flops = self._count_flops()
        used = self.world.peak_memory()  # before measuring the device's speed, which uses memory, too
        facts = dict(super()._facts(updates_per_second))
        sent = planned_communication(it.layout, it.settings, count_parameters(it.model.parameters()), it.passes)
        facts["communication"] = {**sent, **facts["communication"]}
        facts["memory"] = {"peak_bytes": used}
        facts["data_epochs"] = self.position.total / it.workload.updates_per_epoch
        facts["tokens_per_second"] = updates_per_second and updates_per_second * it.workload.tokens
        facts["tokens_per_second_per_rank"] = updates_per_second and facts["tokens_per_second"] / self.world.size
        return facts

    # --- checkpoints: model and optimizer in parts, the rest as in every checkpoint ----------------------------------

    def _checkpoint_path(self) -> Path:
        return Path(self.pretraining.settings.checkpoint_dir) / f"step-{self.position.total}"

    def _state(self) -> Mapping[str, Any]:
        return {}

    def _write(self, path: Path, state: Mapping[str, Any]) -> None:
        facts = {"task": self.name, **state}
        save_step(self.world, path, self.method.model, self._optimizer, facts, self.method.method_state())

    def _read(self, path: Path) -> Mapping[str, Any]:
        return read_facts(path, {"task": self.name, **self.identity})

    def _load_state(self, state: Mapping[str, Any]) -> None:
        path, world = Path(self.plan.resume), self.world
        check_digests(world, path)
        load_step(path, self.method.model, self._optimizer)
        self.method.load_method_state(load_method_state(path, world.rank, world.size))

    def _make_elastic(self) -> ElasticCheckpoints | None:
        self._keeps_elastic = not self.pretraining.layout.is_sharded
        return super()._make_elastic()

    def _elastic_state(self) -> Mapping[str, Any]:
        return super()._state()

    @property
    def _optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer for checkpoints; None if the method has its state."""
        return self.method.optimizer if self.method.keeps_optimizer_state else None


@dataclass(frozen=True)
class PretrainingBatches(Generic[B]):
    """The workload's updates of `passes` passes each, for part `part` of the data. A thread prefetches passes."""

    workload: Workload[B]
    steps: int
    passes: int
    part: int
    device: torch.device

    def count(self, epoch: int) -> int:
        return self.steps

    def updates(self, epoch: int, begin: int = 0) -> Iterator[Update[B]]:
        workload = self.workload
        numbers = range((epoch - 1) * self.steps + begin, epoch * self.steps)
        made = make_ahead((one for number in numbers for one in workload.training(number)), self.device)
        for _ in numbers:
            first = next(made)
            passes = chain([first], islice(made, self.passes - 1))
            yield Update(passes, self.passes, 1.0, first.terms, workload.samples, self.part * self.passes)


def make_ahead(passes: Iterator[B], device: torch.device) -> Iterator[B]:
    """Prefetch passes in a thread; for a GPU in pinned memory, for asynchronous transfers."""
    return stream_ahead(map_tensors(one, partial(pin, device=device)) for one in passes)


@dataclass(frozen=True)
class PretrainingWork(Generic[B]):
    """A training pass. `shares`: number of passes of all ranks in one update."""

    workload: Workload[B]
    shares: int

    def prepare(self, part: B) -> B:
        return self.workload.prepare(part)

    def forward(self, model: nn.Module, data: B) -> Any:
        return self.workload.forward(model, data)

    def loss(self, outputs: Any, data: B) -> PassLoss:
        value, weight = self.workload.sum_loss(outputs, data), data.terms / self.shares
        return PassLoss(value, value.detach() / weight, weight)


@dataclass(frozen=True)
class PretrainingValidator(Generic[B]):
    """Computes means over the validation set. All ranks make the same number of passes, because sharded models
    communicate."""

    world: World
    model: nn.Module
    workload: Workload[B]
    precision: Precision

    def __call__(self, epoch: int) -> Values:
        means: dict[str, Mean] = {}
        # Not inference_mode: sharded models allocate in their first forward pass, and later train with these tensors.
        with torch.no_grad(), self.precision.autocast():
            for batch in make_ahead(self.workload.validation(), self.world.device):
                data = self.workload.prepare(batch)
                for name, (value, weight) in self.workload.score(self.workload.forward(self.model, data), data).items():
                    means.setdefault(name, Mean(name)).add_mean(value, weight)
        if isinstance(self.model, FSDPModule):
            self.model.reshard()
        return check_finite(collect(self.world, list(means.values())), epoch)


def planned_communication(
    layout: Layout, settings: PretrainingSettings, parameters: int, passes: int
) -> dict[str, object]:
    """Bytes of the collectives of one update per rank, computed from the layout, not measured.

    DDP reduces fp32 gradients once. FSDP gathers parameters for the forward pass, again for the backward pass if they
    were freed, and scatters gradients in fp32. Activations exchanged by tensor-parallel ranks are not included.
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
