"""Pretraining of a decoder: next-token prediction by AdamW, with every method, to a loss or for throughput."""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from task_images.cache import require_data_dir
from task_images.contract import Contract, TaskUsageError
from task_images.gpt_pretraining.model import Decoder, count_unused_rows, initial_deviation
from task_images.gpt_pretraining.plan import FLOPS_FORMULA, SHAPES, make_plan
from task_images.language.plan import PretrainingPlan
from task_images.language.pretraining import Pretraining, PretrainingSettings
from task_images.language.tokens import (
    Batch,
    Corpus,
    Part,
    Tokens,
    Windows,
    batches_of_update,
    has_shards,
    has_tokens,
    prepare_shards,
    python_text,
    read_shards,
    read_tokens,
    synthetic_tokens,
    validation_batches,
)
from task_images.parameters import Task, parameter
from task_images.published import FINEWEB, fetch_published, is_begun
from task_images.report import DataIdentity
from task_images.train import Unit


@dataclass(frozen=True)
class Settings(PretrainingSettings):
    """Parameters of the task, with the preset `spec` as defaults: GPT-2's smallest size by llm.c's recipe
    (scripts/run_gpt2_124M.sh): 18 865 updates of 524 288 tokens, 9.89 billion in all. llm.c and its PyTorch trainer end
    at 3.27 to 3.29 there."""

    model: str = parameter(
        "124M",
        "shape of the decoder: 124M as GPT-2, the others as Llama 3",
        choices=tuple(SHAPES),
    )
    data: str = parameter(
        "shards",
        "shards: FineWeb-10B's files in the data folder; tokens: token files of your own; python-text: bytes "
        "of the text that comes with Python; synthetic: random, for throughput only",
        choices=("shards", "tokens", "python-text", "synthetic"),
    )
    order: str = parameter(
        "files",
        "files: windows in file order; shuffled: reshuffled every epoch",
        choices=("files", "shuffled"),
    )
    vocabulary_multiple: int = parameter(
        64,
        "pad the rows of embedding and output layer to a multiple of this, which suits GPUs; same loss; 1: no padding",
        min=1,
        max=65536,
    )
    stream: str = parameter(
        "fp32",
        "number format of the residual stream; bf16 only with precision=bf16",
        choices=("fp32", "bf16"),
    )
    validation_sequences: int = 10240
    goal_full: float = 3.28
    global_batch: int = 512
    micro_batch: int = 64
    steps: int = 18865
    final_rate: float = 0.0
    compile: str = "whole"


_LLAMA = {
    "data": "synthetic",
    "order": "shuffled",
    "compile": "blocks",
    "sequence_length": 8192,
    "batch_per_rank": 2,
    "micro_batch": 1,
    "activation_checkpointing": "selective",
    "learning_rate": 0.0003,
    "blocks": 10,
    "block_updates": 5,
}
TASK = Task(
    settings=Settings,
    number="5a",
    title="GPT and Llama pretraining",
    backends=["gloo", "nccl"],
    measured_on=["CPU", "1 x H100"],
    method={"own": "ddp"},
    goal={"metric": "loss", "comparison": "<=", "wording": "validation loss of {threshold} nats per token"},
    data=(
        "FineWeb-10B as GPT-2's tokens in llm.c's shards (fineweb_train_000001.bin, ...), 20 GB, or "
        "your own token files (train.bin, val.bin, tokens.json); the preset tiny uses text that comes"
        " with Python"
    ),
    free=[
        "micro_batch",
        "activation_checkpointing",
        "compile",
        "attention",
        "checkpoint_every",
        "checkpoint_dir",
        "vocabulary_multiple",
    ],
    files={
        "when": {"data": ["shards", "tokens"]},
        "folders": ["."],
        "wanted": [["*_train_000001.bin", "train.bin"], ["*_val_000000.bin", "val.bin"]],
        "imports": ["*_train_*.bin", "tokens.json"],
        "instead": "--set data=synthetic, or --preset tiny",
    },
    preflight="task_images.gpt_pretraining.plan",
    notes=[
        "models: tiny 125,248 parameters, 124M (GPT-2) 124,439,808, 1B 1,235,814,400, 8B (Llama 3) 8,030,261,248",
        "embedding and output layer of 124M have 50,304 rows for GPT-2's 50,257 words, a multiple of 64 "
        "(vocabulary_multiple); padding rows stay 0, have no probability, and count neither as parameters nor "
        "as FLOPs. The gain on a GPU has not been measured",
    ],
    presets={
        # The defaults, under the name of llm.c.
        "llmc": {},
        # Your own token files, with the same goal or another: shuffled windows.
        "own": {
            "data": "tokens",
            "order": "shuffled",
            "validation_sequences": 0,
        },
        # The protocol of all tasks' throughput presets, on synthetic tokens; no goal.
        "throughput": {
            "data": "synthetic",
            "order": "shuffled",
            "batch_per_rank": 64,
            "micro_batch": 64,
            "clip": 0.0,
            "blocks": 10,
        },
        "124M": {
            "data": "synthetic",
            "order": "shuffled",
            "compile": "blocks",
            "batch_per_rank": 64,
            "micro_batch": 64,
            "blocks": 10,
        },
        # Their state is too large for a GPU: --method fsdp2 shards it.
        "1B": {"model": "1B", **_LLAMA},
        "8B": {"model": "8B", **_LLAMA},
        # Bytes of the language reference that comes with Python; half a minute on one core.
        "tiny": {
            "model": "tiny",
            "data": "python-text",
            "order": "shuffled",
            "compile": "no",
            "validation_sequences": 0,
            "final_rate": 0.1,
            "sequence_length": 64,
            "global_batch": 32,
            "micro_batch": 0,
            "steps": 800,
            "learning_rate": 0.005,
            "warmup_steps": 40,
            "evaluate_every": 50,
            "precision": "fp32",
            "goal_full": 1.5,
            "goal_light": 1.75,
        },
    },
)


def main(contract: Contract) -> None:
    """Train a decoder. Raises TaskUsageError for settings that do not go together."""
    DecoderPretraining(contract).run()


class DecoderPretraining(Pretraining[Settings, Batch]):
    """Windows of tokens; each token is predicted from those before it."""

    name, what, settings_type = "gpt_pretraining", "a decoder", Settings
    goal_metric, formula = "loss", FLOPS_FORMULA

    def make_plan(self, parameters: Mapping[str, Any], ranks: int) -> PretrainingPlan:
        return make_plan(parameters, ranks)

    def check_options(self) -> None:
        if self.settings.stream == "bf16" and self.settings.precision != "bf16":
            raise TaskUsageError("stream=bf16 rounds what an fp32 model adds up", "--set precision=bf16")

    # --- data -------------------------------------------------------------------------------------------------------

    def load_corpus(self) -> Corpus:
        settings, contract, vocabulary = self.settings, self.contract, self.plan.shape.vocabulary
        if settings.data == "python-text":
            return python_text()
        if settings.data == "synthetic":
            return synthetic_tokens(vocabulary, settings.synthetic_tokens, contract.seed)
        if settings.data == "shards":
            return read_shards(require_data_dir(contract, "shards"), vocabulary)
        return read_tokens(require_data_dir(contract, "token files"), vocabulary)

    def use_corpus(self, corpus: Corpus) -> None:
        settings, plan = self.settings, self.plan
        make = partial(Windows, length=settings.sequence_length, seed=self.contract.seed)
        # In the order of the files, windows follow each other; synthetic tokens and bytes are one row of them.
        self._train = make(corpus.rows, block=plan.global_batch if settings.order == "files" else 0)
        self._valid = make(corpus.valid)
        self._part = Part(plan.micro_batch, self.world.rank, self.world.size)

    def training(self, update: int) -> Iterator[Batch]:
        return batches_of_update(self._train, update, self.plan.global_batch, self._part)

    def validation(self) -> Iterator[Batch]:
        return validation_batches(self._valid, self._part, self.settings.validation_sequences)

    # --- model and loss ---------------------------------------------------------------------------------------------

    def make_model(self) -> Decoder:
        return Decoder(self.plan.shape, torch.bfloat16 if self.settings.stream == "bf16" else None)

    def blocks(self, model: Decoder) -> Iterable[nn.Module]:
        return model.blocks

    def compiled(self, model: Decoder) -> Iterable[nn.Module]:
        return (model.output,)

    def apart(self, model: Decoder) -> tuple[Sequence[nn.Module], Sequence[nn.Module]]:
        """Tied tensors belong to both ends, and to no group but the root's."""
        return ((), ()) if model.shape.tied else ((model.embedding,), (model.output,))

    def deviation(self, name: str) -> float:
        return initial_deviation(name, self.plan.shape)

    def unused_rows(self) -> Mapping[str, int]:
        return count_unused_rows(self.plan.shape)

    def forward(self, model: nn.Module, data: Batch) -> Tensor:
        """The sum of losses: the model computes it, so that it can be compiled together with the output layer."""
        loss: Tensor = model(data.inputs, data.targets)
        return loss

    def sum_loss(self, outputs: Tensor, data: Batch) -> Tensor:
        """Sum of cross-entropies, in nats."""
        return outputs

    def score(self, outputs: Tensor, data: Batch) -> Mapping[str, tuple[Tensor | float, float]]:
        """The mean loss of a pass, with the number of tokens as its weight."""
        return {"loss": (outputs / max(1.0, data.terms), data.terms)}

    # --- what the result says ---------------------------------------------------------------------------------------

    def flops(self) -> float:
        return float(self.plan.shape.flops_per_token(self.settings.sequence_length) * self.tokens)

    def unit(self) -> Unit:
        return Unit("tokens", self.settings.sequence_length)

    def details(self) -> Mapping[str, object]:
        shape = self.plan.shape
        sizes = {"vocabulary": shape.vocabulary, "padded_vocabulary": shape.padded_vocabulary}
        return {"stream": self.settings.stream, **sizes}


# --- data prepare -----------------------------------------------------------------------------------------------------


def prepare_data(folder: Path, parameters: Mapping[str, object]) -> DataIdentity:
    """Digest shards, or check token files. A folder without either gets FineWeb-10B, 20 GB."""
    if parameters.get("data") == "tokens" or (has_tokens(folder) and not has_shards(folder)):
        return read_tokens(folder, sys.maxsize).identify()
    if not has_shards(folder) or is_begun(folder):
        fetch_published(FINEWEB, folder, print)
    return prepare_shards(folder)


def validation_arrays(folder: Path) -> tuple[Tokens, Tokens]:
    """The validation tokens [n - 1], and those that follow them, mapped. Raises as reading the data."""
    corpus = read_shards(folder, 1 << 16) if has_shards(folder) else read_tokens(folder, sys.maxsize)
    return corpus.valid[:-1], corpus.valid[1:]
