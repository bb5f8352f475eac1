"""BERT's task: losses and scores of its two questions by hand, passes of ranks, and what a run is made of."""

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mlbench_cli.tasks.catalog import load_task
from task_images.bert_pretraining import task
from task_images.bert_pretraining.data import Batch, Specials
from task_images.bert_pretraining.model import Bert
from task_images.bert_pretraining.preflight import Plan, make_plan
from task_images.bert_pretraining.settings import Settings
from task_images.bert_pretraining.shapes import FLOPS_FORMULA, Shape
from task_images.bert_pretraining.task import TwoQuestions, load_corpus
from task_images.contract import Contract
from task_images.harness.errors import EnvironmentUnfitError
from task_images.harness.language.tokens import Corpus
from task_images.harness.parameters import read_parameters
from tests.unit.task_images.harness.test_images import one_of

ROW = np.arange(10, 250, dtype=np.uint32)
SPECIALS = Specials(padding=0, begin=1, end=2, mask=3, low=10, high=250)
CORPUS = Corpus(ROW, ROW[:120], 264, None, "numbers")


def make(rank: int = 0, size: int = 1, **changes: Any) -> tuple[TwoQuestions, Plan, Settings]:
    given = {
        **load_task("bert_pretraining").resolve("tiny"),
        "sequence_length": 23,
        "global_batch": 8,
        "micro_batch": 2,
        "batch_per_rank": 0,
        **changes,
    }
    plan, settings = make_plan(given, size), read_parameters(Settings, given)
    world = one_of(rank, size)
    world.contract = Contract({"MLBENCH_SEED": "3", "RANK": str(rank), "WORLD_SIZE": str(size)})
    return TwoQuestions(world, plan, settings, CORPUS, SPECIALS), plan, settings


# --- losses and scores ----------------------------------------------------------------------------------------------

# Two samples, two positions each, three words; the second sample only fills the batch.
LOGITS = torch.tensor([[[2.0, 0.0, 0.0], [0.0, 0.0, 1.0]], [[0.0, 3.0, 0.0], [0.0, 0.0, 0.0]]])
FOLLOWING = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
NOTHING = torch.zeros(2, 4, dtype=torch.int64)
BATCH = Batch(
    NOTHING, NOTHING, None, NOTHING[:, :2], torch.tensor([[0, 1], [1, 0]]), torch.tensor([0, 1]),
    torch.tensor([1.0, 0.0]), 1.0,
)  # fmt: skip


def entropy(logits: list[float], right: int) -> float:
    return math.log(sum(math.exp(one) for one in logits)) - logits[right]


MASKED = [
    (entropy([2, 0, 0], 0) + entropy([0, 0, 1], 1)) / 2,
    (entropy([0, 3, 0], 1) + entropy([0, 0, 0], 0)) / 2,
]
SECOND = [entropy([1, 0], 0), entropy([0, 2], 1)]


def test_the_loss_adds_the_means_of_both_questions() -> None:
    """Devlin et al. 2018, A.2: the sum of the mean masked likelihood and the mean next-sentence likelihood. The
    gradient is divided by the four positions asked for in these two samples."""
    work, _, _ = make()
    work._scored = 2
    total = float(work.sum_loss((LOGITS, FOLLOWING), BATCH))
    assert total / 4 == pytest.approx((sum(MASKED) + sum(SECOND)) / 2)


def test_scores_are_means_over_the_samples_that_count() -> None:
    work, _, _ = make()
    found = {name: (float(value), weight) for name, (value, weight) in work.score((LOGITS, FOLLOWING), BATCH).items()}
    assert found == {
        "loss": (pytest.approx(MASKED[0] + SECOND[0]), 1.0),
        "mlm_loss": (pytest.approx(MASKED[0]), 1.0),
        "mlm_accuracy": (0.5, 1.0),
        "nsp_loss": (pytest.approx(SECOND[0]), 1.0),
        "nsp_accuracy": (1.0, 1.0),
    }
    both = work.score((LOGITS, FOLLOWING), replace(BATCH, weights=torch.ones(2), terms=2.0))
    assert float(both["mlm_accuracy"][0]) == 0.75
    assert float(both["loss"][0]) == pytest.approx((sum(MASKED) + sum(SECOND)) / 2)
    nobody = work.score((LOGITS, FOLLOWING), replace(BATCH, weights=torch.zeros(2), terms=0.0))
    assert {(float(value), weight) for value, weight in nobody.values()} == {(0.0, 0.0)}


def test_a_model_is_asked_at_the_hidden_positions() -> None:
    work, _, _ = make()
    batch = next(work.training(0))
    seen: list[Any] = []

    class Model(nn.Module):
        def forward(self, *words: Any) -> Any:
            seen.extend(words)
            return "masked", "following"

    answers: Any = work.forward(Model(), batch)
    assert answers == ("masked", "following")
    assert [one is other for one, other in zip(
        seen, (batch.tokens, batch.types, batch.mask, batch.positions), strict=True
    )] == [True] * 4  # fmt: skip
    assert work.prepare(batch).tokens.device.type == "cpu"


# --- batches --------------------------------------------------------------------------------------------------------


def test_an_update_has_its_global_batch_and_an_epoch_all_samples() -> None:
    work, plan, _ = make()
    assert (work.samples, work.tokens) == (8, 8 * 23)
    assert work.updates_per_epoch == (240 // 20) / 8  # samples of 20 tokens of text
    batches = list(work.training(1))
    assert [batch.tokens.shape for batch in batches] == [(2, 23)] * 4
    assert {batch.terms for batch in batches} == {8.0 * plan.scored}
    assert plan.scored == 3  # 15 % of 23


def test_ranks_have_their_own_samples() -> None:
    parts = [[row.tolist() for batch in make(rank, 2)[0].training(0) for row in batch.tokens] for rank in range(2)]
    whole = [row.tolist() for batch in make()[0].training(0) for row in batch.tokens]
    assert [len(part) for part in parts] == [4, 4]
    assert sorted(parts[0] + parts[1]) == sorted(whole)


@pytest.mark.parametrize(("most", "counted"), [(4, 4.0), (6, 6.0), (1000, 6.0)])
def test_validation_has_the_wanted_samples_of_its_own_text(most: int, counted: float) -> None:
    work, _, _ = make(validation_sequences=most)
    batches = list(work.validation())
    assert sum(float(batch.weights.sum()) for batch in batches) == counted  # 120 tokens are six samples
    assert max(int(batch.labels.max()) for batch in batches) < 130  # tokens of the validation text only


def test_the_batch_of_2020_is_the_same_in_every_pass() -> None:
    work, plan, _ = make(size=2, data="legacy", blocks=5)
    batches = list(work.training(0)) + list(work.training(7))
    assert len(batches) == 2 * 8 // (2 * 2)
    assert all(batch is batches[0] for batch in batches)
    assert batches[0].tokens.shape == (2, 23)
    assert batches[0].terms == 8.0 * 23  # every position is asked for
    assert (plan.scored, work._scored) == (23, 23)


# --- where texts come from ------------------------------------------------------------------------------------------


def test_a_text_is_the_one_that_the_parameters_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    contract = Contract({"MLBENCH_DATA_DIR": str(tmp_path), "MLBENCH_SEED": "3"})
    monkeypatch.setattr(task, "load_text", lambda *words: words)
    monkeypatch.setattr(task, "load_bytes", lambda: "bytes")
    monkeypatch.setattr(task, "load_synthetic", lambda *words: words)
    found: dict[str, Any] = {
        data: load_corpus(Settings(data=data, synthetic_tokens=2000), contract, 300)
        for data in ("python-text", "synthetic", "legacy", "wikitext-103", "wikipedia", "text")
    }
    assert found == {
        "python-text": "bytes",
        "synthetic": (300, 2000, 3),
        "legacy": (300, 2000, 3),
        **{data: (tmp_path, 300, data) for data in ("wikitext-103", "wikipedia", "text")},
    }
    with pytest.raises(EnvironmentUnfitError, match="a text"):
        load_corpus(Settings(data="text"), Contract({}), 300)


def test_a_workload_is_made_for_a_rank_of_its_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "load_corpus", lambda settings, contract, vocabulary: (CORPUS, SPECIALS))
    _, plan, settings = make()
    corpus, make_workload = task.load(settings, Contract({}), plan)
    assert corpus is CORPUS
    assert isinstance(make_workload(one_of(0, 1)), TwoQuestions)


# --- the program ----------------------------------------------------------------------------------------------------


def test_the_common_program_knows_what_bert_is(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def program(*words: Any, **options: Any) -> Any:
        given.update(options, words=words)
        return SimpleNamespace(run=lambda contract: given.update(contract=contract))

    monkeypatch.setattr(task, "Program", program)
    contract = Contract({})
    task.main(contract)
    assert given["contract"] is contract
    assert given["words"] == ("bert_pretraining", "BERT", Settings, make_plan, task.load)
    _, plan, settings = make(dropout=0.25)
    model = given["make_model"](plan, settings)
    assert isinstance(model, Bert)
    assert {module.p for module in model.modules() if isinstance(module, nn.Dropout)} == {0.25}
    assert given["blocks"](model) is model.layers
    assert given["deviation"](plan)("any.weight") == 0.05
    assert (given["goal_metric"], given["formula"]) == ("mlm_loss", FLOPS_FORMULA)
    assert given["flops"](plan, settings) == plan.shape.flops_per_sequence(23, 3) * 8
    assert given["unit"](settings).name == "sentences"
    assert given["details"](plan, settings) == {"scored_positions": 3}


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


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_dropout_acts_in_training_alone(dropout: float) -> None:
    model, tokens = make_bert(dropout), torch.tensor([[5, 6, 7, 8, 9]])
    assert torch.equal(ask(model, tokens)[0], ask(model, tokens)[0])
    model.train()
    assert torch.equal(ask(model, tokens)[0], ask(model, tokens)[0]) is (dropout == 0)
