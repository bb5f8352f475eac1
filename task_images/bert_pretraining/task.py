"""Pretraining of BERT: masked tokens and next sentence, AdamW with every method, to a loss or for throughput."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

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
from task_images.bert_pretraining.plan import FLOPS_FORMULA, SHAPES, make_plan
from task_images.cache import require_data_dir
from task_images.contract import Contract
from task_images.language.plan import PretrainingPlan
from task_images.language.pretraining import Pretraining, PretrainingSettings
from task_images.language.tokens import Corpus, Part
from task_images.parameters import Task, parameter
from task_images.train import Unit


@dataclass(frozen=True)
class Settings(PretrainingSettings):
    """Parameters of the task, with the preset `spec` as defaults: Devlin et al. 2018, on WikiText-103."""

    model: str = parameter("base", "shape of the encoder", choices=tuple(SHAPES))
    data: str = parameter(
        "wikitext-103",
        "wikitext-103: paragraphs of WikiText-103; text: train.txt, valid.txt and vocab.txt in the data folder; "
        "python-text: bytes of the text that comes with Python; synthetic: random; "
        "legacy: one random batch, the answers 0, as in the benchmark of 2020",
        choices=("wikitext-103", "text", "python-text", "synthetic", "legacy"),
    )
    validation_sequences: int = parameter(
        4096, "sequences per validation, always with the same masked tokens", min=1, max=100000000
    )
    dropout: float = parameter(0.1, "of embeddings, attention and layers", min=0, max=0.9)
    sequence_length: int = parameter(128, "tokens of both sentences, including three special tokens", min=8, max=512)
    goal_full: float = parameter(
        2.0, "validation loss of masked tokens, in nats, at which the clock stops", min=0, max=1000
    )
    global_batch: int = 256
    micro_batch: int = 32
    steps: int = 1000000
    learning_rate: float = 0.0001
    warmup_steps: int = 10000
    final_rate: float = 0.0
    beta2: float = 0.999
    weight_decay: float = 0.01
    evaluate_every: int = 1000
    goal_light: float = 2.4


TASK = Task(
    settings=Settings,
    number="5b",
    title="BERT pretraining",
    packages=["tokenizers>=0.21,<1"],
    backends=["gloo", "nccl"],
    measured_on=["CPU", "1 x H100"],
    method={"own": "ddp"},
    goal={"metric": "mlm_loss", "comparison": "<=", "wording": "validation loss of {threshold} nats per hidden token"},
    data=(
        "WikiText-103 (wikitext-103-raw-v1.zip, 192 MB) with BERT's vocabulary (vocab.txt); or your "
        "own text (preset own: train.txt, valid.txt); the preset tiny uses text that comes with Python"
    ),
    free=[
        "micro_batch",
        "activation_checkpointing",
        "compile",
        "checkpoint_every",
        "checkpoint_dir",
    ],
    files={
        "when": {"data": ["wikitext-103", "text"]},
        "folders": ["."],
        "wanted": [
            ["wikitext-103-raw-v1.zip", "train.txt", "bert-*.cache"],
            ["vocab.txt", "valid.txt", "bert-*.cache"],
        ],
        "instead": "--set data=synthetic, or --preset tiny",
    },
    preflight="task_images.bert_pretraining.plan",
    notes=[
        "base has 110,111,042 parameters in 206 tensors, large 336,232,258 in 398 (vocabulary 30,522, padded to"
        " 30,528)",
        "15 % of the tokens are masked: 80 % of these become [MASK], 10 % a random token, 10 % stay unchanged",
    ],
    presets={
        # Your own train.txt, valid.txt and vocab.txt.
        "own": {
            "data": "text",
        },
        # Sentences per second by the protocol of all tasks' throughput presets; 64 sentences of 64 tokens per rank.
        "throughput": {
            "data": "synthetic",
            "sequence_length": 64,
            "batch_per_rank": 64,
            "micro_batch": 0,
            "precision": "fp32",
            "clip": 0.0,
            "blocks": 10,
        },
        "throughput-512": {
            "data": "synthetic",
            "sequence_length": 512,
            "batch_per_rank": 8,
            "micro_batch": 0,
            "blocks": 10,
        },
        "large": {
            "model": "large",
            "data": "synthetic",
            "sequence_length": 64,
            "batch_per_rank": 8,
            "micro_batch": 0,
            "precision": "fp32",
            "clip": 0.0,
            "blocks": 10,
        },
        # As the benchmark of 2020 ran it: one fixed batch, attention masks, token types and answers all 0, fp32.
        "legacy": {
            "data": "legacy",
            "sequence_length": 64,
            "batch_per_rank": 64,
            "micro_batch": 0,
            "precision": "fp32",
            "clip": 0.0,
            "blocks": 10,
        },
        "legacy-large": {
            "model": "large",
            "data": "legacy",
            "sequence_length": 64,
            "batch_per_rank": 8,
            "micro_batch": 0,
            "precision": "fp32",
            "clip": 0.0,
            "blocks": 10,
        },
        # Bytes of the language reference that comes with Python; half a minute on one core.
        "tiny": {
            "model": "tiny",
            "data": "python-text",
            "validation_sequences": 384,
            "dropout": 0.0,
            "sequence_length": 32,
            "global_batch": 64,
            "micro_batch": 0,
            "steps": 1500,
            "learning_rate": 0.005,
            "warmup_steps": 100,
            "beta2": 0.98,
            "evaluate_every": 100,
            "precision": "fp32",
        },
    },
)


def main(contract: Contract) -> None:
    """Train BERT. Raises TaskUsageError for settings that do not go together."""
    BertPretraining(contract).run()


class BertPretraining(Pretraining[Settings, Batch]):
    """Which tokens were hidden, and whether the second sentence follows the first."""

    name, what, settings_type = "bert_pretraining", "BERT", Settings
    goal_metric, formula = "mlm_loss", FLOPS_FORMULA

    def make_plan(self, parameters: Mapping[str, Any], ranks: int) -> PretrainingPlan:
        return make_plan(parameters, ranks)

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

    def deviation(self, name: str) -> float:
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
