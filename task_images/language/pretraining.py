"""Pretraining of language models by the common training loop: updates of many passes, AdamW, sharded models.

A task subclasses `Pretraining`; start reading at `Pretraining.run`, its way from the contract to the result. The mean
is over all tokens of all ranks and passes, so the curve does not depend on their number. For the loop, the whole
training is one epoch of `steps` updates.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain, islice
from typing import Any, Generic, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from task_images.contract import Contract, TaskUsageError
from task_images.data import pin, seed_all, stream_ahead
from task_images.language.model import NO_ROWS, choose_attention, choose_runner, materialize
from task_images.language.plan import PretrainingPlan
from task_images.language.tokens import Corpus, map_tensors
from task_images.methods.base import Method, prepare_method
from task_images.methods.ddp import Ddp
from task_images.methods.fsdp import Fsdp2
from task_images.metrics import Mean, Values, collect
from task_images.parameters import CheckpointSettings, CudaSettings, TrainingSettings, parameter, read_parameters
from task_images.report import GoalWatch, Reporter, training_session
from task_images.schedules import PerUpdate
from task_images.speed import choose_compile, compile_modules
from task_images.train import (
    PassLoss,
    Plan,
    Precision,
    Trainer,
    Unit,
    Update,
    split_decay,
)
from task_images.world import World


@dataclass(frozen=True)
class PretrainingSettings(TrainingSettings, CheckpointSettings, CudaSettings):
    """Pretraining of language models."""

    vocabulary: int = parameter(0, "vocabulary size; 0: that of the model", min=0, max=4194304)
    synthetic_tokens: int = parameter(4194304, "tokens of synthetic data", min=1024, max=4294967296)
    global_batch: int = parameter(480, "sequences per update, over all ranks", min=1, max=1048576)
    batch_per_rank: int = parameter(
        0,
        "sequences per update and data-parallel rank, instead of global_batch (weak scaling); 0: global_batch",
        min=0,
        max=1048576,
    )
    micro_batch: int = parameter(
        12,
        "sequences per pass and data-parallel rank; 0: all sequences of a rank in one pass",
        min=0,
        max=65536,
    )
    steps: int = parameter(
        10000, "maximum number of updates; the learning rate schedule ends there", min=1, max=100000000
    )
    learning_rate: float = parameter(0.0006, "highest rate of AdamW", min=0, max=100)
    warmup_steps: int = parameter(700, "updates of linear warm-up", min=0, max=10000000)
    final_rate: float = parameter(0.1, "share of learning_rate at which the schedule ends", min=0, max=1)
    beta1: float = parameter(0.9, "of AdamW", min=0, max=0.999999)
    beta2: float = parameter(0.95, "of AdamW", min=0, max=0.999999)
    epsilon: float = parameter(1e-08, "of AdamW", min=0, max=1)
    weight_decay: float = parameter(0.1, "of matrices; scales, shifts and biases have none", min=0, max=10)
    clip: float = parameter(1.0, "maximum gradient norm; 0: no limit", min=0, max=1000000)
    evaluate_every: int = parameter(250, "updates between validations", min=1, max=100000000)
    activation_checkpointing: str = parameter(
        "none",
        "what the backward pass recomputes: nothing, everything except matrix products and attention, or whole blocks",
        choices=("none", "selective", "full"),
    )
    precision: str = parameter(
        "bf16", "bf16: mixed, with parameters and sums of gradients in fp32", choices=("fp32", "bf16")
    )
    compile: str = parameter(
        "no",
        "torch.compile, for each block and the output with its loss, or for all of the model; graphs: all of "
        "it, replayed as CUDA graphs on a GPU; compiling counts as training",
        choices=("no", "blocks", "whole", "graphs"),
    )
    attention: str = parameter(
        "auto",
        "attention implementation; auto: torch's choice. The result names the one used",
        choices=("auto", "flash", "cudnn", "efficient", "math"),
    )
    sequence_length: int = parameter(1024, "tokens of a sequence", min=2, max=1048576)
    validation_sequences: int = parameter(0, "sequences per validation; 0: all", min=0, max=100000000)
    goal_full: float = parameter(1.5, "validation loss in nats per token at which the clock stops", min=0, max=1000)
    goal_light: float = parameter(3.6, "the easier goal", min=0, max=1000)

    # Choices are set by each task.
    model: str = ""
    data: str = ""


MADE_UP = ("synthetic", "legacy")  # values of the parameter `data`
# Parameters that a resumed run may change: passes, arithmetic, validation, storage, and the end of training. All
# others, including every hyperparameter, must match the run that wrote the checkpoint.
RESUMABLE = frozenset(
    (
        *("batch_per_rank", "micro_batch", "activation_checkpointing", "compile"),
        *("attention", "vocabulary", "tf32", "cudnn"),
        *("checkpoint_every", "checkpoint_dir", "resume", "report_every", "evaluate_every", "validation_sequences"),
        *("goal_full", "goal_light", "budget_seconds", "blocks_after", "blocks", "block_updates"),
    )
)


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


def make_schedule(p: PretrainingSettings) -> PerUpdate:
    """The learning rate schedule of the parameters."""
    return PerUpdate(WarmupCosine(p.learning_rate, p.warmup_steps, p.steps, p.final_rate))


class Batch(Protocol):
    """One pass. `terms`: the divisor of the update's summed loss; in validation, the number of terms of this pass."""

    @property
    def terms(self) -> float:
        """Number of terms in the sum of losses."""


S = TypeVar("S", bound=PretrainingSettings)
B = TypeVar("B", bound=Batch)


class Pretraining(ABC, Generic[S, B]):
    """A pretraining on one rank: the task's data, model and loss, as the training loop sees them (`train.Work` and
    the validator). Subclasses say what is special.

    name           name of the task; what: description of the model in the log
    settings_type  class of its parameters
    goal_metric    of the validation; formula: how FLOPs were derived
    contract, settings, plan   from the beginning; `world` and `model`: once `run` has made them
    """

    name: str
    what: str
    settings_type: type[Any]
    goal_metric: str
    formula: str
    world: World
    model: nn.Module

    def __init__(self, contract: Contract) -> None:
        """Raises TaskUsageError for incompatible settings."""
        self.contract = contract
        self.settings: S = _read_settings(self.settings_type, contract)
        self.plan = self.make_plan(asdict(self.settings), contract.world_size)
        compile = choose_compile(self.settings.compile, contract)
        self.settings = replace(self.settings, global_batch=self.plan.global_batch, compile=compile)
        self.tokens = self.plan.global_batch * self.settings.sequence_length  # of an update

    # --- what a task says -------------------------------------------------------------------------------------------

    @abstractmethod
    def make_plan(self, parameters: Mapping[str, Any], ranks: int) -> PretrainingPlan:
        """The plan. Raises PlanError."""

    @abstractmethod
    def load_corpus(self) -> Corpus:
        """The tokens that the settings ask for. Raises EnvironmentUnfitError or TaskUsageError."""

    @abstractmethod
    def use_corpus(self, corpus: Corpus) -> None:
        """Prepare to draw this rank's passes from the corpus."""

    def check_options(self) -> None:
        """Raises TaskUsageError for settings that device or plan do not support."""

    @abstractmethod
    def make_model(self) -> Any:
        """The model, on the meta device."""

    @abstractmethod
    def blocks(self, model: Any) -> Iterable[nn.Module]:
        """The modules that are compiled, sharded and recomputed one at a time."""

    def compiled(self, model: Any) -> Iterable[nn.Module]:
        """Additional modules to compile."""
        return ()

    def apart(self, model: Any) -> tuple[Sequence[nn.Module], Sequence[nn.Module]]:
        """Modules before and after the blocks that are sharded separately."""
        return (), ()

    @abstractmethod
    def deviation(self, name: str) -> float:
        """Standard deviation of the initial values of a matrix."""

    def unused_rows(self) -> Mapping[str, int]:
        """Number of rows at the end of a parameter that stay 0, by parameter name."""
        return NO_ROWS

    @abstractmethod
    def flops(self) -> float:
        """FLOPs of one update of all ranks."""

    @abstractmethod
    def unit(self) -> Unit:
        """The unit of throughput."""

    def details(self) -> Mapping[str, object]:
        """Additional facts for the result."""
        return {}

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """AdamW; matrices decay, other parameters do not."""
        p = self.settings
        groups = split_decay(model, p.weight_decay)
        return torch.optim.AdamW(groups, lr=p.learning_rate, betas=(p.beta1, p.beta2), eps=p.epsilon, fused=True)

    @abstractmethod
    def training(self, update: int) -> Iterator[B]:
        """This rank's passes of one update (from 0)."""

    @abstractmethod
    def validation(self) -> Iterator[B]:
        """This rank's passes over the validation set, the same number on all ranks."""

    @abstractmethod
    def forward(self, model: nn.Module, data: B) -> Any:
        """The model's outputs of a pass."""

    @abstractmethod
    def sum_loss(self, outputs: Any, data: B) -> Tensor:
        """The sum of losses over this rank's terms, a scalar."""

    @abstractmethod
    def score(self, outputs: Any, data: B) -> Mapping[str, tuple[Tensor | float, float]]:
        """name -> (mean, weight) of this pass, including "loss"; the same names on all ranks."""

    # --- from the contract to the result ----------------------------------------------------------------------------

    def run(self) -> None:
        """Load the corpus, and train to the loss goal, the last step or by the throughput protocol. Raises
        DivergedError on NaN."""
        contract, settings, plan = self.contract, self.settings, self.plan
        data = f"{settings.data} for {self.what}"
        with training_session(contract, data, settings.data in MADE_UP) as (world, report):
            self.world = world
            seed_all(contract.seed, contract.rank)  # initial values use separate generators
            corpus = self.load_corpus()
            report.data_identity(corpus.identify())
            self.check_options()
            dtype = torch.bfloat16 if settings.precision == "bf16" else torch.float32
            sizes = (1, plan.shape.heads, settings.sequence_length, plan.shape.width // plan.shape.heads)
            attention = choose_attention(settings.attention, sizes, world.device, dtype)
            method = self._prepare_method()
            self.model = self._prepare_model()
            self.use_corpus(corpus)
            details = {
                "bytes_per_token": corpus.bytes_per_token,
                "model": settings.model,
                "tokens": sum(len(row) for row in corpus.rows),
                "micro_batch": plan.micro_batch,
                "data": corpus.name,
                "options": attention,
                **self.details(),
                "parameters": plan.shape.parameters,
                "passes_per_update": plan.passes,
                "global_batch": settings.global_batch,
                "tokens_per_update": self.tokens,
            }
            self._make_trainer(report, method, details).run()

    def _make_trainer(self, report: Reporter, method: Method, details: dict[str, Any]) -> Trainer[B]:
        p, world = self.settings, self.world
        parameters = {name: one for name, one in asdict(p).items() if name not in RESUMABLE}
        return Trainer(
            world,
            report,
            self,
            make_schedule(p),
            Plan.of(p, epochs=1, validate_every=p.evaluate_every),
            name=self.name,
            validate=self.validate,
            goal=GoalWatch(self.goal_metric, "<=", p.goal_full, p.goal_light, world.contract.goal),
            details=details,
            identity={"shape": asdict(self.plan.shape), "seed": self.contract.seed, **parameters},
            unit=self.unit(),
            make_optimizer=self.make_optimizer,
            method=method,
            precision=self._precision,
            # Methods without a barrier have no norm; for others an infinite limit measures it, as a guard against NaN.
            clip=p.clip or (None if method.gates else math.inf),
            arithmetic=p,
            compile=p.compile,
            flops=(self.flops(), self.formula),
        )

    def _prepare_method(self) -> Method:
        """Gradient exchange, and the number format in which it is used."""
        p, method = self.settings, prepare_method(self.world, Ddp)
        if p.clip and method.gates:
            raise TaskUsageError(
                f"clip={p.clip:g} needs all gradients at once, and this method updates layer by layer",
                "--set clip=0, or another method",
            )
        self._is_sharded = isinstance(method, Fsdp2) and self.world.size > 1
        if isinstance(method, Fsdp2):
            method.is_bf16 = p.precision == "bf16"
        self._precision = Precision(p.precision, self.world.device, casts=not self._is_sharded)
        return method

    def _prepare_model(self) -> nn.Module:
        """The model, compiled, with initial values that do not depend on the number of ranks; one that is to be sharded
        is still on the meta device."""
        p = self.settings
        with torch.device("meta"):
            model: Any = self.make_model()
        runner = choose_runner(p.activation_checkpointing)
        if runner is not None:
            model.run_block = runner
        blocks, (first, last) = list(self.blocks(model)), self.apart(model)
        compile_modules(model, p.compile, [*blocks, *self.compiled(model)], is_full=True)
        model.parts = [*first, *blocks, *last]
        model.materialize = partial(materialize, model, self.deviation, self.contract.seed, self.unused_rows())
        if not self._is_sharded:
            model.materialize(self.world.device)
        return cast("nn.Module", model)

    # --- as the training loop sees it -------------------------------------------------------------------------------

    def count(self, epoch: int) -> int:
        """Number of updates."""
        return self.settings.steps

    def updates(self, epoch: int, begin: int = 0) -> Iterator[Update[B]]:
        """The updates of `epoch` except the first `begin`. A thread prefetches passes."""
        plan, steps = self.plan, self.settings.steps
        numbers = range((epoch - 1) * steps + begin, epoch * steps)
        made = self._make_ahead(one for number in numbers for one in self.training(number))
        for _ in numbers:
            first = next(made)
            passes = chain([first], islice(made, plan.passes - 1))
            yield Update(passes, plan.passes, 1.0, first.terms, plan.global_batch, self.world.rank * plan.passes)

    def prepare(self, part: B) -> B:
        """The pass on the model's device; pinned tensors are transferred asynchronously."""
        return map_tensors(part, lambda tensor: tensor.to(self.world.device, non_blocking=True))

    def loss(self, outputs: Any, data: B) -> PassLoss:
        """The loss of a pass, whose weight is its share of the terms of the update."""
        weight = data.terms / (self.world.size * self.plan.passes)
        value = self.sum_loss(outputs, data)
        return PassLoss(value, value.detach() / weight, weight)

    def validate(self, epoch: int) -> Values:
        """Means over the validation set. All ranks make the same number of passes, because sharded models
        communicate."""
        means: dict[str, Mean] = {}
        # Not inference_mode: sharded models allocate in their first forward pass, and later train with these tensors.
        with torch.no_grad(), self._precision.autocast():
            for batch in self._make_ahead(self.validation()):
                data = self.prepare(batch)
                for name, (value, weight) in self.score(self.forward(self.model, data), data).items():
                    means.setdefault(name, Mean(name)).add_mean(value, weight)
        if isinstance(self.model, FSDPModule):
            self.model.reshard()
        return collect(self.world, list(means.values()))

    def _make_ahead(self, passes: Iterator[B]) -> Iterator[B]:
        """Prefetch passes in a thread; for a GPU in pinned memory, for asynchronous transfers."""
        return stream_ahead(map_tensors(one, partial(pin, device=self.world.device)) for one in passes)


def _read_settings(kind: type[S], contract: Contract) -> S:
    settings = read_parameters(kind, contract.parameters)
    if settings.compile in ("whole", "graphs") and settings.activation_checkpointing != "none":
        raise TaskUsageError(
            "activation_checkpointing calls blocks one at a time, so the model cannot be compiled as a whole",
            "--set compile=blocks",
        )
    return settings
