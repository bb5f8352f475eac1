"""Pretraining of a decoder: next-token prediction by AdamW, on any layout of ranks, to a loss or for throughput."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from task_images.contract import Contract, TaskUsageError
from task_images.gpt_pretraining import Settings
from task_images.gpt_pretraining.model import Decoder, count_unused_rows, initial_deviation
from task_images.gpt_pretraining.plan import FLOPS_FORMULA, make_plan
from task_images.language.layout import PretrainingPlan
from task_images.language.pretraining import Pretraining, require_data_dir
from task_images.language.shards import read_shards
from task_images.language.tokens import (
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
from task_images.train import Unit


def main(contract: Contract) -> None:
    """Train a decoder. Raises TaskUsageError for settings that do not go together."""
    DecoderPretraining(contract).run()


class DecoderPretraining(Pretraining[Settings, Batch]):
    """Windows of tokens; each token is predicted from those before it."""

    name, what, settings_type = "gpt_pretraining", "a decoder", Settings
    goal_metric, formula = "loss", FLOPS_FORMULA

    def make_plan(self, parameters: Mapping[str, Any], ranks: int, per_node: int) -> PretrainingPlan:
        return make_plan(parameters, ranks, per_node)

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
        self.updates_per_epoch = self._train.count / plan.global_batch
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

    def deviation(self, name: str) -> float | None:
        return initial_deviation(name, shape=self.plan.shape)

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
