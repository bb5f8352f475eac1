"""Pretraining of a decoder: next-token prediction by AdamW, on any layout of ranks, to a loss or for throughput."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from task_images.contract import Contract
from task_images.gpt_pretraining.model import Decoder, initial_deviation
from task_images.gpt_pretraining.preflight import Plan, make_plan
from task_images.gpt_pretraining.shapes import FLOPS_FORMULA, SHAPES, Shape
from task_images.harness.distributed import World
from task_images.harness.errors import EnvironmentUnfitError, TaskUsageError
from task_images.harness.language.chunked_loss import sum_cross_entropy
from task_images.harness.language.parallel import SpreadOptions, choose_runner, split_layers, spread
from task_images.harness.language.pretraining import (
    Pretraining,
    PretrainingSettings,
    Workload,
    check_pretraining,
    layout_errors_as_usage,
    refuse_on_device,
)
from task_images.harness.language.tokens import (
    Batch,
    Corpus,
    Part,
    Windows,
    batches_of_update,
    python_text,
    read_tokens,
    synthetic_tokens,
    validation_batches,
)
from task_images.harness.loop import Unit
from task_images.harness.opening import opening
from task_images.harness.parameters import check_choices, read_parameters
from task_images.harness.report import Reporter
from task_images.harness.seeds import seed_all

DATA = ("tokens", "python-text", "synthetic")
CHOICES = {"data": DATA, "model": tuple(SHAPES), "documents": ("joined", "separate")}


@dataclass(frozen=True)
class Settings(PretrainingSettings):
    """The parameters of task.yaml; the defaults are the preset `spec`."""

    model: str = "124M"
    vocabulary: int = 50_304
    data: str = "tokens"
    documents: str = "joined"
    loss_chunk: int = 0
    synthetic_tokens: int = 4_194_304
    steps: int = 10_000
    warmup_steps: int = 700
    evaluate_every: int = 250
    precision: str = "bf16"
    goal_full: float = 3.28
    goal_light: float = 3.6


def main(contract: Contract) -> None:
    """Check the plan, load the corpus, and train to the loss goal or by the throughput protocol.

    Raises TaskUsageError for settings that do not go together.
    """
    settings = read_parameters(Settings, contract.parameters)
    check_pretraining(settings, contract.world_size)
    check_choices(settings, CHOICES)
    with layout_errors_as_usage():
        plan = make_plan(asdict(settings), contract.world_size)
    settings = replace(settings, global_batch=plan.global_batch)
    synthetic = settings.data == "synthetic"
    with opening(contract, f"{settings.data} for a decoder", synthetic) as (world, report):
        seed_all(contract.seed)
        corpus = load_corpus(settings, contract, plan.shape.vocabulary)
        report.data_identity(corpus.identify())
        refuse_on_device(plan.memory, world.device)
        world.await_loading()  # models in shards are made by all ranks together
        workload = NextToken(world, plan, settings, corpus, contract.seed)
        make_pretraining(world, report, settings, plan, corpus, workload).run()


def make_pretraining(
    world: World, report: Reporter, settings: Settings, plan: Plan, corpus: Corpus, workload: "NextToken"
) -> Pretraining[Batch]:
    seed = world.contract.seed
    return Pretraining(
        world,
        report,
        settings,
        plan.layout,
        make_model(world, plan, settings, seed),
        workload,
        name="gpt_pretraining",
        goal_metric="loss",
        parameters=plan.shape.parameters,
        passes=plan.passes,
        flops=plan.shape.flops_per_token(settings.sequence_length) * workload.tokens,
        flops_formula=FLOPS_FORMULA,
        memory=plan.memory,
        identity=identity(settings, plan.shape, seed),
        unit=Unit("tokens", settings.sequence_length),
        details={
            "bytes_per_token": corpus.bytes_per_token,
            "model": settings.model,
            "tokens": len(corpus.train),
            "micro_batch": plan.micro_batch,
            "data": corpus.name,
            "documents": settings.documents,
            "loss_chunk": settings.loss_chunk,
        },
    )


def load_corpus(settings: Settings, contract: Contract, vocabulary: int) -> Corpus:
    """The tokens that the settings ask for. Raises EnvironmentUnfitError or TaskUsageError."""
    if settings.documents == "separate" and settings.data == "synthetic":
        raise TaskUsageError("synthetic tokens have no documents to keep apart", "--set documents=joined")
    if settings.data == "python-text":
        return python_text()
    if settings.data == "synthetic":
        return synthetic_tokens(vocabulary, settings.synthetic_tokens, contract.seed)
    if contract.data_dir is None:
        raise EnvironmentUnfitError(
            "no folder with token files was given",
            "Run with --data-dir FOLDER, or --preset tiny, which brings its own text.",
        )
    corpus = read_tokens(Path(contract.data_dir), vocabulary)
    if settings.documents == "separate" and corpus.end is None:
        raise TaskUsageError('tokens.json names no token that ends a document ("end")', "--set documents=joined")
    return corpus


def identity(settings: Settings, shape: Shape, seed: int) -> dict[str, object]:
    """What a run that goes on from a checkpoint must have in common with the one that made it."""
    names = ("sequence_length", "global_batch", "data", "documents", "steps", "learning_rate")
    return {"shape": asdict(shape), "seed": seed, **{name: getattr(settings, name) for name in names}}


class NextToken(Workload[Batch]):
    """Windows of tokens; each token is predicted from those before it."""

    def __init__(self, world: World, plan: Plan, settings: Settings, corpus: Corpus, seed: int) -> None:
        layout = plan.layout
        self._device = world.device
        self._loss_chunk = settings.loss_chunk
        self.samples = settings.global_batch
        self.tokens = settings.global_batch * settings.sequence_length
        separate = settings.documents == "separate"
        make = partial(Windows, length=settings.sequence_length, seed=seed, end=corpus.end, separate=separate)
        self._train, self._valid = make(corpus.train), make(corpus.valid)
        self.updates_per_epoch = self._train.count / settings.global_batch
        self._most = settings.validation_sequences
        self._part = Part(plan.micro_batch, layout.data_rank(world.rank), layout.data)

    def training(self, update: int) -> Iterator[Batch]:
        """This rank's passes of an update."""
        return batches_of_update(self._train, update, self.samples, self._part)

    def validation(self) -> Iterator[Batch]:
        """This rank's part of the validation windows."""
        return validation_batches(self._valid, self._part, self._most)

    def prepare(self, part: Batch) -> Batch:
        return part.to(self._device)

    def forward(self, model: nn.Module, data: Batch) -> Tensor:
        """Logits [B, T, vocabulary]; the sum of losses if these are wanted in chunks."""
        chunks = (data.targets, self._loss_chunk) if self._loss_chunk else ()
        outputs: Tensor = model(data.inputs, data.places, data.mask, *chunks)
        return outputs

    def sum_loss(self, outputs: Tensor, data: Batch) -> Tensor:
        """Sum of cross-entropies, in nats."""
        return outputs if self._loss_chunk else sum_cross_entropy(outputs.flatten(0, 1), data.targets.flatten())

    def score(self, outputs: Tensor, data: Batch) -> Mapping[str, tuple[Tensor | float, float]]:
        """The mean loss of a pass, with the number of tokens as its weight."""
        return {"loss": (self.sum_loss(outputs, data) / max(1.0, data.terms), data.terms)}


def make_model(world: World, plan: Plan, settings: Settings, seed: int) -> nn.Module:
    """The decoder, spread over the ranks, with initial values that do not depend on the layout."""
    with torch.device("meta"):
        model = Decoder(plan.shape)
    runner = choose_runner(settings.activation_checkpointing)
    if runner is not None:
        model.run_block = runner
    return spread(
        world,
        plan.layout,
        SpreadOptions(settings.precision, settings.reshard, settings.compile),
        model,
        model.blocks,
        deviation=partial(initial_deviation, shape=plan.shape),
        seed=seed,
        plan_tensor=partial(split_decoder, model),
    )


def split_decoder(model: Decoder, mesh: DeviceMesh) -> None:
    """Tensor parallel with sequence parallel: matrices are split by heads and channels; what lies between them (norms,
    the residual stream) by positions. Tied embeddings have to be tied again: splitting makes two tensors of them."""
    whole, by_position = Replicate(), Shard(1)
    plan: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=whole, output_layouts=by_position),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=by_position, output_layouts=whole),
    }
    for number in range(len(model.blocks)):
        block = f"blocks.{number}"
        plan |= {
            f"{block}.attention_norm": SequenceParallel(),
            f"{block}.attention": PrepareModuleInput(
                input_layouts=(by_position, None, None), desired_input_layouts=(whole, None, None)
            ),
            **{f"{block}.attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
            f"{block}.attention.output": RowwiseParallel(output_layouts=by_position),
            f"{block}.feed_forward_norm": SequenceParallel(),
            f"{block}.feed_forward": PrepareModuleInput(input_layouts=by_position, desired_input_layouts=whole),
            **{f"{block}.feed_forward.{name}": ColwiseParallel() for name in ("gate", "up")},
            f"{block}.feed_forward.down": RowwiseParallel(output_layouts=by_position),
        }
    split_layers(model, mesh, plan)
    if model.shape.tied:
        model.head.weight = model.embedding.weight
