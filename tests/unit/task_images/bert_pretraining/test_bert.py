"""BERT: sizes as published, outputs and losses as transformers', samples with the right masks."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from mlbench_cli.tasks.catalog import load_task
from task_images.bert_pretraining.data import (
    Samples,
    Specials,
    legacy_batch,
    load_bytes,
    load_text,
    training_batches,
    validation_batches,
)
from task_images.bert_pretraining.model import Bert
from task_images.bert_pretraining.plan import SHAPES, Shape, make_plan
from task_images.bert_pretraining.texts import SPECIAL
from task_images.contract import EnvironmentUnfitError, TaskUsageError
from task_images.language.model import fill_parameters
from task_images.language.plan import PlanError
from task_images.language.tokens import Corpus, Part
from tests.needs import needs

SMALL = Shape(96, 32, 64, 2, 4, 128)
NAMES = (
    *(("embedding.", "bert.embeddings.word_embeddings."), ("places.", "bert.embeddings.position_embeddings.")),
    *(("types.", "bert.embeddings.token_type_embeddings."), ("pooler.", "bert.pooler.dense.")),
    *(("following.", "cls.seq_relationship."), ("transform.", "cls.predictions.transform.dense.")),
    *(("transform_norm.", "cls.predictions.transform.LayerNorm."), ("output_bias", "cls.predictions.bias")),
)
LAYER_NAMES = {
    **{name: f"attention.self.{name}" for name in ("query", "key", "value")},
    "output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "norm": "output.LayerNorm",
}


def bert_name(name: str) -> str:
    if name.startswith("layers."):
        _, number, part, kind = name.split(".")
        return f"bert.encoder.layer.{number}.{LAYER_NAMES[part]}.{kind}"
    if name.startswith("norm."):
        return name.replace("norm.", "bert.embeddings.LayerNorm.")
    return next(name.replace(own, theirs) for own, theirs in NAMES if name.startswith(own))


def make_bert(shape: Shape) -> Bert:
    model = Bert(shape, dropout=0.0)
    fill_parameters(model, lambda name: 0.2, seed=1)
    return model.eval()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count", "tensors"), [("base", 110_111_042, 206), ("large", 336_232_258, 398)])
def test_the_models_have_exactly_the_published_numbers_of_parameters(name: str, count: int, tensors: int) -> None:
    with torch.device("meta"):
        parameters = list(Bert(SHAPES[name]).parameters())
    assert sum(parameter.numel() for parameter in parameters) == SHAPES[name].parameters == count
    assert len(parameters) == tensors


@pytest.mark.slow
@pytest.mark.parametrize(("length", "scored"), [(128, 128), (128, 19)])
def test_the_formula_of_flops_is_what_torch_counts(length: int, scored: int) -> None:
    with torch.device("meta"):
        model, tokens = Bert(SHAPES["base"], 0.0), torch.zeros(1, length, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        masked, following = model(tokens, tokens, None, tokens[:, :scored])
        (masked.sum() + following.sum()).backward()
    assert SHAPES["base"].flops_per_sequence(length, scored) == counter.get_total_flops()


@pytest.mark.slow
def test_logits_and_loss_equal_those_of_transformers_with_the_same_weights() -> None:
    transformers = needs("transformers")
    theirs = transformers.BertForPreTraining(
        transformers.BertConfig(
            vocab_size=SMALL.vocabulary,
            hidden_size=SMALL.width,
            num_hidden_layers=SMALL.layers,
            num_attention_heads=SMALL.heads,
            intermediate_size=SMALL.hidden,
            max_position_embeddings=SMALL.context,
        )
    ).eval()
    ours = make_bert(SMALL)
    own = {bert_name(name): value for name, value in ours.state_dict().items()}
    missing, unexpected = theirs.load_state_dict(own, strict=False)
    assert not unexpected
    assert set(missing) <= {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"}
    theirs.tie_weights()
    theirs.cls.predictions.decoder.bias.data.copy_(own["cls.predictions.bias"])
    stream = torch.Generator().manual_seed(3)
    tokens = torch.randint(SMALL.vocabulary, (3, 32), generator=stream)
    types = (torch.arange(32) > 15).long().repeat(3, 1)
    mask = torch.ones(3, 32, dtype=torch.bool)
    mask[1, 20:] = False
    positions = torch.tensor([[1, 5, 9]] * 3)
    labels, follows = tokens.gather(1, positions), torch.tensor([0, 1, 0])
    every = torch.full_like(tokens, -100).scatter(1, positions, labels)
    with torch.no_grad():
        masked, following = ours(tokens, types, mask, positions)
        expected = theirs(
            tokens, attention_mask=mask.long(), token_type_ids=types, labels=every, next_sentence_label=follows
        )
    picked = expected.prediction_logits.gather(1, positions.unsqueeze(-1).expand(-1, -1, SMALL.vocabulary))
    torch.testing.assert_close(masked, picked, rtol=0, atol=2e-5)
    torch.testing.assert_close(following, expected.seq_relationship_logits, rtol=0, atol=1e-5)
    loss = cross_entropy(masked.flatten(0, 1), labels.flatten()) + cross_entropy(following, follows)
    torch.testing.assert_close(loss, expected.loss, rtol=0, atol=1e-5)


# --- samples --------------------------------------------------------------------------------------------------------

SPECIALS = Specials(padding=0, begin=1, end=2, mask=3, low=10, high=1000)
ROW = np.arange(10, 1000, dtype=np.uint32)
CORPUS = Corpus(ROW, ROW, 1000, "numbers")


def test_a_sample_asks_for_hidden_tokens_and_keeps_the_rest() -> None:
    samples = Samples(CORPUS, "train", 43, SPECIALS, seed=1)
    kinds = {"mask": 0, "same": 0, "other": 0}
    lengths, following = set(), 0
    for number in range(samples.count):
        for epoch in range(40):
            many = samples.make(np.array([epoch]), np.array([number]))
            found = {name: column[0] for name, column in many.items()}
            row, size = found["tokens"], int(found["mask"].sum())
            lengths.add(size)
            assert samples.asked == len(set(found["positions"])) == round(0.15 * 43)
            assert (row[size:] == SPECIALS.padding).all()
            assert (found["types"][size:] == 0).all()
            assert row[0] == SPECIALS.begin
            assert row[size - 1] == SPECIALS.end
            border = int(np.argmax(found["types"]))
            assert row[border - 1] == SPECIALS.end
            assert found["types"][border:size].all()
            whole = row.copy()
            whole[found["positions"]] = found["labels"]
            first, second = whole[1 : border - 1], whole[border : size - 1]
            assert (np.diff(first) == 1).all()
            assert (np.diff(second) == 1).all()
            assert (second[0] == first[-1] + 1) == (int(found["follows"]) == 0)
            following += int(found["follows"]) == 0
            for position, label in zip(found["positions"], found["labels"], strict=True):
                kind = "mask" if row[position] == SPECIALS.mask else "same" if row[position] == label else "other"
                kinds[kind] += 1
    total = sum(kinds.values())
    assert kinds["mask"] / total == pytest.approx(0.8, abs=0.03)
    assert kinds["other"] / total == pytest.approx(0.1, abs=0.02)
    assert following / (samples.count * 40) == pytest.approx(0.5, abs=0.06)
    assert max(lengths) == 43
    assert min(lengths) < 35


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_global_batch_is_the_same_on_any_number_of_ranks(ranks: int) -> None:
    samples = Samples(CORPUS, "train", 43, SPECIALS, seed=1)
    whole = next(training_batches(samples, 3, 8, Part(8, 0, 1)))
    parts = [next(training_batches(samples, 3, 8, Part(8 // ranks, rank, ranks))) for rank in range(ranks)]
    rows = sorted(row.tolist() for part in parts for row in part.tokens)  # each rank has its short samples last
    assert rows == sorted(row.tolist() for row in whole.tokens)
    assert {part.terms for part in parts} == {8.0 * samples.asked}
    scored = [batch for rank in range(ranks) for batch in validation_batches(samples, 10, Part(3, rank, ranks))]
    assert sum(float(batch.weights.sum()) for batch in scored) == 10


def test_the_batch_of_2020_has_zeros_for_types_and_answers() -> None:
    batch = legacy_batch(1000, 16, 4, 1, 64.0)
    assert batch.mask is None
    assert not batch.types.any()
    assert not batch.labels.any()
    assert batch.positions.shape == batch.tokens.shape == (4, 16)


def test_the_text_of_python_needs_260_tokens() -> None:
    corpus, specials = load_bytes()
    assert max(specials.padding, specials.begin, specials.end, specials.mask) < 264
    assert Samples(corpus, "valid", 32, specials, 1).count > 384


def test_texts_are_read_with_an_imported_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentUnfitError, match=r"train\.txt"):
        load_text(tmp_path, 50)
    for name in ("train.txt", "valid.txt"):
        (tmp_path / name).write_text("the cat sat on the mat. " * 20)
    with pytest.raises(EnvironmentUnfitError, match=r"vocab\.txt"):
        load_text(tmp_path, 50)
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIAL, *"abcdefghij"]))
    corpus, specials = load_text(tmp_path, 50)
    assert (corpus.vocabulary, specials.mask) == (15, SPECIAL.index("[MASK]"))
    with pytest.raises(TaskUsageError, match="has 15 pieces, the model's vocabulary 12") as caught:
        load_text(tmp_path, 12)
    assert "vocabulary=16" in str(caught.value.hint)
    (tmp_path / "vocab.txt").write_text("a\nb")
    with pytest.raises(EnvironmentUnfitError, match=r"has no \[PAD\]"):
        load_text(tmp_path, 50)


def test_every_preset_fits() -> None:
    task = load_task("bert_pretraining")
    for preset in task.presets:
        values = task.resolve(preset)
        plan = make_plan(values, 2)
        assert plan.passes * plan.micro_batch * 2 == plan.global_batch
    with pytest.raises(PlanError, match="has 512 positions"):
        make_plan({**task.resolve("spec"), "sequence_length": 600}, 2)


def test_the_batch_of_2020_is_for_throughput_only() -> None:
    """It is refused from numbers alone, before anything starts."""
    parameters = load_task("bert_pretraining").resolve("tiny", {"data": "legacy"})
    with pytest.raises(PlanError, match="trains on one fixed batch") as error:
        make_plan(parameters, 1)
    assert error.value.hint == "--set blocks=10"
    assert make_plan(parameters | {"blocks": 10}, 1).scored == parameters["sequence_length"]


def test_only_masked_positions_have_logits() -> None:
    """15 % of 128 tokens are 19."""
    assert make_plan(load_task("bert_pretraining").resolve("spec"), 1).scored == 19
