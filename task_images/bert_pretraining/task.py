"""Pretraining of BERT: masked tokens and next sentence, AdamW with every method, to a loss or for throughput."""

from collections.abc import Iterator, Mapping

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from task_images.bert_pretraining import Settings
from task_images.bert_pretraining.data import (
    Batch,
    Samples,
    Specials,
    legacy_batch,
    load_bytes,
    load_synthetic,
    load_text,
    training_batches,
    validation_batches,
)
from task_images.bert_pretraining.model import Bert
from task_images.bert_pretraining.preflight import Plan, make_plan
from task_images.bert_pretraining.shapes import FLOPS_FORMULA
from task_images.contract import Contract
from task_images.language.pretraining import Workload
from task_images.language.program import MakeWorkload, Program, require_data_dir
from task_images.language.tokens import Corpus, Part
from task_images.loop import Unit
from task_images.world import World


def main(contract: Contract) -> None:
    """Train BERT. Raises TaskUsageError for settings that do not go together."""
    Program(
        "bert_pretraining",
        "BERT",
        Settings,
        make_plan,
        load,
        make_model=lambda plan, settings: Bert(plan.shape, settings.dropout),
        blocks=lambda model: model.layers,
        deviation=lambda plan: lambda name: plan.shape.initial,
        goal_metric="mlm_loss",
        flops=lambda plan, settings: (
            plan.shape.flops_per_sequence(settings.sequence_length, plan.scored) * plan.global_batch
        ),
        formula=FLOPS_FORMULA,
        unit=lambda settings: Unit("sentences"),
        details=lambda plan, settings: {"scored_positions": plan.scored},
    ).run(contract)


def load(settings: Settings, contract: Contract, plan: Plan) -> tuple[Corpus, MakeWorkload[Batch]]:
    """The text that the settings ask for, as tokens. Raises EnvironmentUnfitError or TaskUsageError."""
    corpus, specials = load_corpus(settings, contract, plan.shape.vocabulary)
    return corpus, lambda world: TwoQuestions(world, plan, settings, corpus, specials)


def load_corpus(settings: Settings, contract: Contract, vocabulary: int) -> tuple[Corpus, Specials]:
    """The text that the settings ask for, as tokens. Raises EnvironmentUnfitError or TaskUsageError."""
    if settings.data == "python-text":
        return load_bytes()
    if settings.data in ("synthetic", "legacy"):
        return load_synthetic(vocabulary, settings.synthetic_tokens, contract.seed)
    return load_text(require_data_dir(contract, "a text"), vocabulary, settings.data)


class TwoQuestions(Workload[Batch]):
    """Which tokens were hidden, and whether the second sentence follows the first."""

    def __init__(self, world: World, plan: Plan, settings: Settings, corpus: Corpus, specials: Specials) -> None:
        self._device, self._settings, seed = world.device, settings, world.contract.seed
        self.samples = plan.global_batch
        self.tokens = plan.global_batch * settings.sequence_length
        self._part = Part(plan.micro_batch, plan.layout.data_rank(world.rank), plan.layout.data)
        self._train = Samples(corpus, "train", settings.sequence_length, specials, seed)
        self._valid = Samples(corpus, "valid", settings.sequence_length, specials, seed)
        self.updates_per_epoch = self._train.count / plan.global_batch
        self._scored = plan.scored
        self._legacy: Batch | None = None
        if settings.data == "legacy":
            terms = float(plan.global_batch * plan.scored)
            size, vocabulary = plan.micro_batch, plan.shape.vocabulary
            self._legacy = legacy_batch(vocabulary, settings.sequence_length, size, seed, terms)

    def training(self, update: int) -> Iterator[Batch]:
        """This rank's passes of an update."""
        if self._legacy is None:
            yield from training_batches(self._train, update, self.samples, self._part)
            return
        for _ in range(self.samples // (self._part.ranks * self._part.micro_batch)):
            yield self._legacy

    def validation(self) -> Iterator[Batch]:
        """This rank's part of the validation samples."""
        return validation_batches(self._valid, self._settings.validation_sequences, self._part)

    def prepare(self, part: Batch) -> Batch:
        return part.to(self._device)

    def forward(self, model: nn.Module, data: Batch) -> tuple[Tensor, Tensor]:
        answers: tuple[Tensor, Tensor] = model(data.tokens, data.types, data.mask, data.positions)
        return answers

    def sum_loss(self, outputs: tuple[Tensor, Tensor], data: Batch) -> Tensor:
        """Sum over hidden tokens, so weighted that the mean is the mean of both losses' means, as BERT adds them."""
        logits, following = outputs
        masked = cross_entropy(logits.flatten(0, 1).float(), data.labels.flatten(), reduction="sum")
        follows = cross_entropy(following.float(), data.follows, reduction="sum")
        return masked + self._scored * follows

    def score(self, outputs: tuple[Tensor, Tensor], data: Batch) -> Mapping[str, tuple[Tensor | float, float]]:
        """Both losses and shares of right answers over the samples that count."""
        logits, following = outputs
        masked = cross_entropy(logits.float().transpose(1, 2), data.labels, reduction="none").mean(1)
        second = cross_entropy(following.float(), data.follows, reduction="none")
        values = {
            "loss": masked + second,
            "mlm_loss": masked,
            "mlm_accuracy": (logits.argmax(-1) == data.labels).float().mean(1),
            "nsp_loss": second,
            "nsp_accuracy": (following.argmax(-1) == data.follows).float(),
        }
        # In validation the terms are the samples that count.
        return {
            name: ((value * data.weights).sum() / max(1.0, data.terms), data.terms) for name, value in values.items()
        }
