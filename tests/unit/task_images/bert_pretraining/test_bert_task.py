"""BERT's task: losses and scores of its two questions by hand, passes of ranks, and what a run is made of."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from mlbench_cli.tasks.catalog import load_task
from task_images.bert_pretraining.data import Specials
from task_images.bert_pretraining.model import Bert
from task_images.bert_pretraining.plan import Shape
from task_images.bert_pretraining.task import BertPretraining
from task_images.contract import Contract
from task_images.language.tokens import Corpus
from tests.unit.task_images.test_images import one_of

ROW = np.arange(10, 250, dtype=np.uint32)
SPECIALS = Specials(padding=0, begin=1, end=2, mask=3, low=10, high=250)
CORPUS = Corpus(ROW, ROW[:120], 264, "numbers")


def make(rank: int = 0, size: int = 1, **changes: Any) -> BertPretraining:
    given = {
        **load_task("bert_pretraining").resolve("tiny"),
        "sequence_length": 23,
        "global_batch": 8,
        "micro_batch": 2,
        "batch_per_rank": 0,
        **changes,
    }
    variables = {"MLBENCH_SEED": "3", "RANK": str(rank), "WORLD_SIZE": str(size)}
    task = BertPretraining(Contract({**variables, "MLBENCH_PARAMETERS": json.dumps(given)}))
    task.world, task.specials = one_of(rank, size), SPECIALS
    task.use_corpus(CORPUS)
    return task


# --- batches --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("most", "counted"), [(4, 4.0), (6, 6.0), (1000, 6.0)])
def test_validation_has_the_wanted_samples_of_its_own_text(most: int, counted: float) -> None:
    batches = list(make(validation_sequences=most).validation())
    assert sum(float(batch.weights.sum()) for batch in batches) == counted  # 120 tokens are six samples
    assert max(int(batch.labels.max()) for batch in batches) < 130  # tokens of the validation text only


# --- the model ------------------------------------------------------------------------------------------------------

SMALL = Shape(40, 16, 8, 2, 2, 12)


def make_bert(dropout: float = 0.0) -> Bert:
    torch.manual_seed(0)
    return Bert(SMALL, dropout).eval()


def ask(model: Bert, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    types = torch.zeros_like(tokens)
    positions = torch.tensor([[1, 3]]).expand(len(tokens), -1)
    found: tuple[torch.Tensor, torch.Tensor] = model(tokens, types, mask, positions)
    return found


def test_padding_changes_nothing() -> None:
    model, tokens = make_bert(), torch.tensor([[5, 6, 7, 8, 9]])
    padded = torch.cat([tokens, torch.tensor([[30, 31]])], 1)
    mask = torch.tensor([[True] * 5 + [False] * 2])
    for found, wanted in zip(ask(model, padded, mask), ask(model, tokens), strict=True):
        torch.testing.assert_close(found, wanted)
    assert not torch.allclose(ask(model, padded)[0], ask(model, tokens)[0])


def test_every_token_sees_all_others_in_their_order() -> None:
    model = make_bert()
    one, last, swapped = (torch.tensor([row]) for row in ([5, 6, 7, 8, 9], [5, 6, 7, 8, 10], [5, 7, 6, 8, 9]))
    for other in (last, swapped):
        for found, wanted in zip(ask(model, one), ask(model, other), strict=True):
            assert not torch.allclose(found[..., :4], wanted[..., :4])


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.types.weight.data[0].add_(torch.randn(8)),
        lambda model: model.output_bias.data.add_(torch.randn(40)),
        lambda model: model.transform.weight.data.add_(torch.randn(8, 8)),
    ],
)
def test_parts_of_the_head_of_masked_tokens(change: Callable[[Bert], None]) -> None:
    model, tokens = make_bert(), torch.tensor([[5, 6, 7, 8, 9]])
    before = ask(model, tokens)[0].clone()
    change(model)
    assert not torch.allclose(ask(model, tokens)[0], before)
