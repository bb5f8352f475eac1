"""A pretraining program, from contract to result: plan, corpus, model, training.

A task describes itself by a `Program`; the procedure is common.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from task_images.contract import Contract
from task_images.errors import EnvironmentUnfitError, TaskUsageError
from task_images.language.attention import choose_attention
from task_images.language.layout import Layout, LayoutError
from task_images.language.parallel import Deviation, SpreadOptions, choose_runner, spread
from task_images.language.pretraining import Batch, Pretraining, Workload
from task_images.language.tokens import Corpus
from task_images.loop import Unit
from task_images.methods.base import MakeOptimizer
from task_images.parameters import PretrainingSettings, read_parameters
from task_images.seeds import seed_all
from task_images.speed import choose_compile
from task_images.world import World, training_session

MADE_UP = ("synthetic", "legacy")  # values of the parameter `data`
# Parameters that a resumed run may change: layout, arithmetic, validation, storage, and the end of training. All
# others, including every hyperparameter, must match the run that wrote the checkpoint.
RESUMABLE = frozenset(
    (
        *("batch_per_rank", "micro_batch", "parallel", "tensor_parallel", "replicas", "reshard"),
        *("activation_checkpointing", "compile", "attention", "loss_chunk", "vocabulary", "tf32", "cudnn"),
        *("checkpoint_every", "checkpoint_dir", "resume", "evaluate_every", "validation_sequences"),
        *("goal_full", "goal_light", "past_goal", "budget_seconds", "blocks_after", "blocks", "block_updates"),
    )
)

S = TypeVar("S", bound=PretrainingSettings)
M = TypeVar("M", bound=nn.Module)
B = TypeVar("B", bound=Batch)


class PretrainingPlan(Protocol):
    """The plan computed from parameters and number of ranks, see the tasks' preflight. `shape` is a dataclass."""

    @property
    def shape(self) -> Any:
        """The model's shape, with its number of `parameters`."""

    @property
    def layout(self) -> Layout:
        """The layout of ranks."""

    @property
    def global_batch(self) -> int:
        """Sequences per update."""

    @property
    def passes(self) -> int:
        """Passes per rank and update."""

    @property
    def micro_batch(self) -> int:
        """Sequences per pass."""


P = TypeVar("P", bound=PretrainingPlan)
MakeWorkload = Callable[[World], Workload[B]]


@dataclass(frozen=True)
class Program(Generic[S, P, M, B]):
    """The description of a pretraining task.

    name           name of the task; what: description of the model in the log
    settings       type of its parameters
    make_plan      (parameters, ranks, ranks per node) -> plan; raises LayoutError
    load           (settings, contract, plan) -> corpus, and a function that creates a rank's workload
    make_model     (plan, settings) -> model on the meta device
    blocks         of the model: compiled, gathered and recomputed one at a time
    deviation      standard deviation of initial values, by parameter name
    split_tensor   splits the layers over tensor-parallel ranks; None: unsupported
    unused_rows    number of rows at the end of a parameter that stay 0, by parameter name
    goal_metric    of the validation
    flops          of one update of all ranks; formula: how they were derived
    unit           unit of throughput
    details        additional facts for the result
    compiled       additional modules to compile
    apart          modules before and after the blocks that are gathered separately
    make_optimizer (settings, world) -> function that creates the optimizer; None: AdamW
    check          raises TaskUsageError for settings that device or plan do not support
    """

    name: str
    what: str
    settings: type[S]
    make_plan: Callable[[Mapping[str, Any], int, int], P]
    load: Callable[[S, Contract, P], tuple[Corpus, MakeWorkload[B]]]
    make_model: Callable[[P, S], M]
    blocks: Callable[[M], Iterable[nn.Module]]
    deviation: Callable[[P], Deviation]
    goal_metric: str
    flops: Callable[[P, S], float]
    formula: str
    unit: Callable[[S], Unit]
    split_tensor: Callable[[M, DeviceMesh], None] | None = None
    unused_rows: Callable[[P], Mapping[str, int]] = lambda plan: {}
    compiled: Callable[[M], Iterable[nn.Module]] = lambda model: ()
    apart: Callable[[M], tuple[Sequence[nn.Module], Sequence[nn.Module]]] = lambda model: ((), ())
    make_optimizer: Callable[[S, World], MakeOptimizer | None] = lambda settings, world: None
    check: Callable[[S, P, World], None] = lambda settings, plan, world: None
    details: Callable[[P, S], Mapping[str, object]] = lambda plan, settings: {}

    def run(self, contract: Contract) -> None:
        """Check the plan, load the corpus, and train to the loss goal or by the throughput protocol.

        Raises TaskUsageError for incompatible settings.
        """
        settings = self._read_settings(contract)
        with layout_errors_as_usage():
            plan = self.make_plan(asdict(settings), contract.world_size, contract.local_world_size)
        compile = choose_compile(settings.compile, contract)
        settings = replace(settings, global_batch=plan.global_batch, compile=compile)
        data = f"{settings.data} for {self.what}"
        with training_session(contract, data, settings.data in MADE_UP) as (world, report):
            seed_all(contract.seed, contract.rank)  # initial values use separate generators
            corpus, make_workload = self.load(settings, contract, plan)
            report.data_identity(corpus.identify())
            self.check(settings, plan, world)
            dtype = torch.bfloat16 if settings.precision == "bf16" else torch.float32
            size = plan.shape.width // plan.shape.heads
            sizes = (1, plan.shape.heads, settings.sequence_length, size)
            attention = choose_attention(settings.attention, sizes, world.device, dtype)
            world.await_loading()  # creating sharded models is collective
            Pretraining(
                world,
                report,
                settings,
                plan.layout,
                self._spread_model(world, plan, settings),
                make_workload(world),
                name=self.name,
                goal_metric=self.goal_metric,
                parameters=plan.shape.parameters,
                passes=plan.passes,
                flops=self.flops(plan, settings),
                flops_formula=self.formula,
                identity={
                    "shape": asdict(plan.shape),
                    "seed": contract.seed,
                    # In a nested object, because a checkpoint also has a schedule and an optimizer.
                    "parameters": {name: one for name, one in asdict(settings).items() if name not in RESUMABLE},
                },
                unit=self.unit(settings),
                details={
                    "bytes_per_token": corpus.bytes_per_token,
                    "model": settings.model,
                    "tokens": sum(len(row) for row in corpus.rows),
                    "micro_batch": plan.micro_batch,
                    "data": corpus.name,
                    "options": {"compile": settings.compile, **attention},
                    **self.details(plan, settings),
                },
                make_optimizer=self.make_optimizer(settings, world),
            ).run()

    def _read_settings(self, contract: Contract) -> S:
        settings = read_parameters(self.settings, contract.parameters)
        if settings.compile in ("whole", "graphs") and settings.parallel != "ddp":
            raise TaskUsageError(
                f"compile={settings.compile} needs the whole model, but parallel={settings.parallel} shards it",
                "--set compile=blocks, or --set parallel=ddp",
            )
        if settings.compile in ("whole", "graphs") and settings.activation_checkpointing != "none":
            raise TaskUsageError(
                "activation_checkpointing calls blocks one at a time, so the model cannot be compiled as a whole",
                "--set compile=blocks",
            )
        if settings.checkpoint_every and not settings.checkpoint_dir:
            raise TaskUsageError(
                "checkpoint_every needs a folder that all ranks share", "--set checkpoint_dir=/shared/checkpoints"
            )
        return settings

    def _spread_model(self, world: World, plan: P, settings: S) -> nn.Module:
        """The model, distributed over the ranks, with initial values that do not depend on the layout."""
        with torch.device("meta"):
            model = self.make_model(plan, settings)
        runner = choose_runner(settings.activation_checkpointing)
        if runner is not None:
            model.run_block = runner  # type: ignore[assignment]
        return spread(
            world,
            plan.layout,
            SpreadOptions(settings.precision, settings.reshard, settings.compile),
            model,
            self.blocks(model),
            deviation=self.deviation(plan),
            seed=world.contract.seed,
            compiled=() if plan.layout.tensor > 1 else self.compiled(model),
            apart=self.apart(model),
            plan_tensor=partial(self.split_tensor, model) if self.split_tensor else None,
            unused_rows=self.unused_rows(plan),
        )


@contextmanager
def layout_errors_as_usage() -> Iterator[None]:
    """Convert a LayoutError into a TaskUsageError."""
    try:
        yield
    except LayoutError as error:
        raise TaskUsageError(str(error), error.hint) from None


def require_data_dir(contract: Contract, what: str) -> Path:
    """The folder with the user's text. Raises EnvironmentUnfitError without one."""
    if contract.data_dir is None:
        raise EnvironmentUnfitError(
            f"no folder with {what} was given",
            "Run with --data-dir FOLDER, or --preset tiny, which includes a text.",
        )
    return Path(contract.data_dir)
