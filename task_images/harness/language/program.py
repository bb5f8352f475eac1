"""The way of a pretraining from its contract to its result: plan, corpus, model, training.

A task says what it trains (`Program`); the order is the same for all.
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

from task_images.comm.base import MakeOptimizer
from task_images.contract import Contract
from task_images.harness.distributed import World
from task_images.harness.errors import EnvironmentUnfitError, TaskUsageError
from task_images.harness.language.attention import choose_attention
from task_images.harness.language.layout import Layout, LayoutError, Memory, check_memory
from task_images.harness.language.parallel import Deviation, SpreadOptions, choose_runner, spread
from task_images.harness.language.pretraining import Batch, Pretraining, Workload
from task_images.harness.language.tokens import Corpus
from task_images.harness.loop import Unit
from task_images.harness.parameters import read_parameters
from task_images.harness.seeds import seed_all
from task_images.harness.session import training_session
from task_images.harness.settings import PretrainingSettings

MADE_UP = ("synthetic", "legacy")  # values of the parameter `data`
# What a resumed run may change: how it is spread, computed, validated and stored, and when it ends. Everything else,
# every hyperparameter among it, must be as in the run that made the checkpoint.
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
    """What follows from parameters and number of ranks, see the tasks' preflight. `shape` is a dataclass."""

    @property
    def shape(self) -> Any:
        """The model's shape, with the number of its `parameters`."""

    @property
    def layout(self) -> Layout:
        """Which rank does what."""

    @property
    def global_batch(self) -> int:
        """Sequences of an update."""

    @property
    def passes(self) -> int:
        """Passes of a rank in an update."""

    @property
    def micro_batch(self) -> int:
        """Sequences of a pass."""

    @property
    def memory(self) -> Memory:
        """The estimate for one rank."""


P = TypeVar("P", bound=PretrainingPlan)
MakeWorkload = Callable[[World], Workload[B]]


@dataclass(frozen=True)
class Program(Generic[S, P, M, B]):
    """What one pretraining has of its own.

    name           of the task; what: the model in the log's words
    settings       type of its parameters
    make_plan      (parameters, ranks, ranks of a node) -> plan, from numbers alone; raises LayoutError
    load           (settings, contract, plan) -> corpus, and what makes the workload of a rank
    make_model     from plan and settings, without memory for its parameters
    blocks         of the model: those that are compiled, gathered and computed again one at a time
    deviation      of initial values by the parameter's name
    split_tensor   splits the layers over tensor-parallel ranks; None: there is no way
    unused_rows    rows at the end of a parameter, by its name, that stay 0
    goal_metric    of the validation
    flops          of one update of all ranks; formula: its source
    unit           what throughput is counted in
    details        further facts for the result
    compiled       modules that are compiled besides the blocks
    apart          modules before and behind the blocks that are gathered by themselves
    make_optimizer from settings and world, what makes the optimizer; None: AdamW
    check          raises TaskUsageError for settings that the device or the plan cannot have
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

        Raises TaskUsageError for settings that do not go together.
        """
        settings = self._read_settings(contract)
        with layout_errors_as_usage():
            plan = self.make_plan(asdict(settings), contract.world_size, contract.local_world_size)
        settings = replace(settings, global_batch=plan.global_batch)
        data = f"{settings.data} for {self.what}"
        with training_session(contract, data, settings.data in MADE_UP) as (world, report):
            seed_all(contract.seed, contract.rank)  # initial values have generators of their own
            corpus, make_workload = self.load(settings, contract, plan)
            report.data_identity(corpus.identify())
            refuse_on_device(plan.memory, world.device)
            report.say(f"memory: about {plan.memory}, estimated")
            self.check(settings, plan, world)
            dtype = torch.bfloat16 if settings.precision == "bf16" else torch.float32
            size = plan.shape.width // plan.shape.heads
            sizes = (1, plan.shape.heads, settings.sequence_length, size)
            attention = choose_attention(settings.attention, sizes, world.device, dtype)
            world.await_loading()  # models in shards are made by all ranks together
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
                memory=plan.memory,
                identity={
                    "shape": asdict(plan.shape),
                    "seed": contract.seed,
                    # In an object of their own: a checkpoint has a schedule and an optimizer, too.
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
                f"compile={settings.compile} needs the whole model, and parallel={settings.parallel} has it in parts",
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
        """The model over the ranks, with initial values that do not depend on the layout."""
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


def require_data_dir(contract: Contract, what: str) -> Path:
    """The folder with the user's text. Raises EnvironmentUnfitError without one."""
    if contract.data_dir is None:
        raise EnvironmentUnfitError(
            f"no folder with {what} was given",
            "Run with --data-dir FOLDER, or --preset tiny, which brings its own text.",
        )
    return Path(contract.data_dir)
