"""Pretraining of a decoder: next-token prediction by AdamW, on any layout of ranks, to a loss or for throughput."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from task_images.contract import Contract
from task_images.gpt_pretraining.model import Decoder, count_unused_rows, initial_deviation
from task_images.gpt_pretraining.preflight import Plan, make_plan
from task_images.gpt_pretraining.shapes import FLOPS_FORMULA, SHAPES
from task_images.gpt_pretraining.split import split_decoder
from task_images.harness.distributed import World
from task_images.harness.errors import TaskUsageError
from task_images.harness.language.chunked_loss import sum_cross_entropy
from task_images.harness.language.pretraining import PretrainingSettings, Workload
from task_images.harness.language.program import MakeWorkload, Program, require_data_dir
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


@dataclass(frozen=True)
class Settings(PretrainingSettings):
    """The parameters of task.yaml; the defaults are the preset `spec`."""

    model: str = "124M"
    vocabulary_multiple: int = 64
    data: str = "tokens"
    documents: str = "joined"
    loss_chunk: int = 0
    steps: int = 10_000
    warmup_steps: int = 700
    evaluate_every: int = 250
    precision: str = "bf16"
    goal_full: float = 3.28
    goal_light: float = 3.6


def main(contract: Contract) -> None:
    """Train a decoder. Raises TaskUsageError for settings that do not go together."""
    Program(
        "gpt_pretraining",
        "a decoder",
        Settings,
        {
            "data": ("tokens", "python-text", "synthetic"),
            "model": tuple(SHAPES),
            "documents": ("joined", "separate"),
        },
        make_plan,
        load,
        make_model=lambda plan, settings: Decoder(plan.shape),
        blocks=lambda model: model.blocks,
        deviation=lambda plan: partial(initial_deviation, shape=plan.shape),
        split_tensor=split_decoder,
        unused_rows=lambda plan: count_unused_rows(plan.shape),
        goal_metric="loss",
        flops=lambda plan, settings: plan.shape.flops_per_token(settings.sequence_length) * count_tokens(settings),
        formula=FLOPS_FORMULA,
        unit=lambda settings: Unit("tokens", settings.sequence_length),
        same=("documents",),
        details=lambda plan, settings: {
            "documents": settings.documents,
            "loss_chunk": settings.loss_chunk,
            "vocabulary": plan.shape.vocabulary,
            "padded_vocabulary": plan.shape.padded_vocabulary,
        },
    ).run(contract)


def load(settings: Settings, contract: Contract, plan: Plan) -> tuple[Corpus, MakeWorkload[Batch]]:
    """The tokens that the settings ask for. Raises EnvironmentUnfitError or TaskUsageError."""
    corpus = load_corpus(settings, contract, plan.shape.vocabulary)
    return corpus, lambda world: NextToken(world, plan, settings, corpus)


def load_corpus(settings: Settings, contract: Contract, vocabulary: int) -> Corpus:
    """The tokens that the settings ask for. Raises EnvironmentUnfitError or TaskUsageError."""
    if settings.documents == "separate" and settings.data == "synthetic":
        raise TaskUsageError("synthetic tokens have no documents to keep apart", "--set documents=joined")
    if settings.data == "python-text":
        return python_text()
    if settings.data == "synthetic":
        return synthetic_tokens(vocabulary, settings.synthetic_tokens, contract.seed)
    corpus = read_tokens(require_data_dir(contract, "token files"), vocabulary)
    if settings.documents == "separate" and corpus.end is None:
        raise TaskUsageError('tokens.json names no token that ends a document ("end")', "--set documents=joined")
    return corpus


def count_tokens(settings: Settings) -> int:
    """Tokens of an update."""
    return settings.global_batch * settings.sequence_length


class NextToken(Workload[Batch]):
    """Windows of tokens; each token is predicted from those before it."""

    def __init__(self, world: World, plan: Plan, settings: Settings, corpus: Corpus) -> None:
        layout = plan.layout
        self._device = world.device
        self._loss_chunk = settings.loss_chunk
        self.samples = settings.global_batch
        self.tokens = count_tokens(settings)
        separate = settings.documents == "separate"
        make = partial(
            Windows, length=settings.sequence_length, seed=world.contract.seed, end=corpus.end, separate=separate
        )
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
        """Logits [B, T, padded vocabulary]; the sum of losses if these are wanted in chunks."""
        chunks = (data.targets, self._loss_chunk) if self._loss_chunk else ()
        outputs: Tensor = model(data.inputs, data.places, data.mask, *chunks)
        return outputs

    def sum_loss(self, outputs: Tensor, data: Batch) -> Tensor:
        """Sum of cross-entropies, in nats."""
        return outputs if self._loss_chunk else sum_cross_entropy(outputs.flatten(0, 1), data.targets.flatten())

    def score(self, outputs: Tensor, data: Batch) -> Mapping[str, tuple[Tensor | float, float]]:
        """The mean loss of a pass, with the number of tokens as its weight."""
        return {"loss": (self.sum_loss(outputs, data) / max(1.0, data.terms), data.terms)}
