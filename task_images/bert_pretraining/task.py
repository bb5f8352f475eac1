"""Pretraining of BERT: masked tokens and next sentence, AdamW with every method, to a loss or for throughput."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

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
from task_images.bert_pretraining.plan import FLOPS_FORMULA, make_plan
from task_images.contract import Contract
from task_images.language.layout import PretrainingPlan
from task_images.language.pretraining import Pretraining, require_data_dir
from task_images.language.tokens import Corpus, Part
from task_images.train import Unit


def main(contract: Contract) -> None:
    """Train BERT. Raises TaskUsageError for settings that do not go together."""
    BertPretraining(contract).run()


class BertPretraining(Pretraining[Settings, Batch]):
    """Which tokens were hidden, and whether the second sentence follows the first."""

    name, what, settings_type = "bert_pretraining", "BERT", Settings
    goal_metric, formula = "mlm_loss", FLOPS_FORMULA

    def make_plan(self, parameters: Mapping[str, Any], ranks: int, per_node: int) -> PretrainingPlan:
        return make_plan(parameters, ranks, per_node)

    # --- data -------------------------------------------------------------------------------------------------------

    def load_corpus(self) -> Corpus:
        corpus, self.specials = self._load()
        return corpus

    def _load(self) -> tuple[Corpus, Specials]:
        settings, vocabulary = self.settings, self.plan.shape.vocabulary
        if settings.data == "python-text":
            return load_bytes()
        if settings.data in ("synthetic", "legacy"):
            return load_synthetic(vocabulary, settings.synthetic_tokens, self.contract.seed)
        return load_text(require_data_dir(self.contract, "a text"), vocabulary, settings.data)

    def use_corpus(self, corpus: Corpus) -> None:
        settings, plan, seed = self.settings, self.plan, self.contract.seed
        self._part = Part(plan.micro_batch, self.world.rank, self.world.size)
        self._train = Samples(corpus, "train", settings.sequence_length, self.specials, seed)
        self._valid = Samples(corpus, "valid", settings.sequence_length, self.specials, seed)
        self.updates_per_epoch = self._train.count / plan.global_batch
        self._legacy: Batch | None = None
        if settings.data == "legacy":
            terms = float(plan.global_batch * plan.scored)
            size, vocabulary = plan.micro_batch, plan.shape.vocabulary
            self._legacy = legacy_batch(vocabulary, settings.sequence_length, size, seed, terms)

    def training(self, update: int) -> Iterator[Batch]:
        if self._legacy is None:
            yield from training_batches(self._train, update, self.plan.global_batch, self._part)
            return
        for _ in range(self.plan.global_batch // (self._part.ranks * self._part.micro_batch)):
            yield self._legacy

    def validation(self) -> Iterator[Batch]:
        return validation_batches(self._valid, self.settings.validation_sequences, self._part)

    # --- model and loss ---------------------------------------------------------------------------------------------

    def make_model(self) -> Bert:
        return Bert(self.plan.shape, self.settings.dropout)

    def blocks(self, model: Bert) -> Iterable[nn.Module]:
        return model.layers

    def deviation(self, name: str) -> float | None:
        return float(self.plan.shape.initial)

    def forward(self, model: nn.Module, data: Batch) -> tuple[Tensor, Tensor]:
        answers: tuple[Tensor, Tensor] = model(data.tokens, data.types, data.mask, data.positions)
        return answers

    def sum_loss(self, outputs: tuple[Tensor, Tensor], data: Batch) -> Tensor:
        """Sum over hidden tokens, so weighted that the mean is the mean of both losses' means, as BERT adds them."""
        logits, following = outputs
        masked = cross_entropy(logits.flatten(0, 1).float(), data.labels.flatten(), reduction="sum")
        follows = cross_entropy(following.float(), data.follows, reduction="sum")
        return masked + self.plan.scored * follows

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

    # --- what the result says ---------------------------------------------------------------------------------------

    def flops(self) -> float:
        each = self.plan.shape.flops_per_sequence(self.settings.sequence_length, self.plan.scored)
        return float(each * self.plan.global_batch)

    def unit(self) -> Unit:
        return Unit("sentences")

    def details(self) -> Mapping[str, object]:
        return {"scored_positions": self.plan.scored}
