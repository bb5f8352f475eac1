"""The decoder's task: options that do not go together, groups of the optimizer, corpora, and windows of a rank."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from task_images.contract import Contract
from task_images.gpt_pretraining import task
from task_images.gpt_pretraining.model import Decoder
from task_images.gpt_pretraining.preflight import make_plan
from task_images.gpt_pretraining.settings import Settings
from task_images.gpt_pretraining.shapes import Shape
from task_images.gpt_pretraining.task import (
    NextToken,
    check_options,
    count_tokens,
    load_corpus,
    make_model,
    make_optimizer,
)
from task_images.harness.distributed import World
from task_images.harness.errors import EnvironmentUnfitError, TaskUsageError
from task_images.harness.language.float8 import Float8Linear
from task_images.harness.language.muon import Muon
from task_images.harness.language.parallel import fill_parameters
from task_images.harness.language.tokens import Corpus, write_tokens

CPU = torch.device("cpu")
SMALL = Shape(100, 32, 64, 2, 4, 2, 176, positions="learned", bias=True)


def make_world(size: int = 1, rank: int = 0, method: str = "") -> World:
    variables = {"RANK": str(rank), "WORLD_SIZE": str(size), "MLBENCH_METHOD": method, "MLBENCH_SEED": "3"}
    return World(Contract(variables), CPU, 1, grouped=False)


@pytest.mark.parametrize(
    ("settings", "method", "words", "hint"),
    [
        ({}, "", "", ""),
        ({"stream": "bf16"}, "", "", ""),
        ({"stream": "bf16", "precision": "fp32"}, "", "stream=bf16 rounds", "precision=bf16"),
        ({"float8": "head", "parallel": "fsdp2"}, "", "8-bit products do not support sharded", "parallel=ddp"),
        ({"optimizer": "muon"}, "", "", ""),
        ({"optimizer": "muon"}, '{"engine": "ddp"}', "", ""),
        ({"optimizer": "muon", "matrix_rate": 0.1}, "", "", ""),
        ({"optimizer": "muon"}, '{"engine": "zero1"}', "Muon needs every rank's whole gradients", "--method bsp"),
        ({"optimizer": "muon", "parallel": "fsdp2"}, "", "Muon needs every rank's whole gradients", "parallel=ddp"),
        ({"matrix_rate": 0.1}, "", "matrix_rate is the rate of Muon", "optimizer=muon"),
    ],
)
def test_options_that_do_not_go_together(settings: dict[str, Any], method: str, words: str, hint: str) -> None:
    world, plan = make_world(method=method), None
    if not words:
        check_options(Settings(**settings), plan, world)  # type: ignore[arg-type]
        return
    with pytest.raises(TaskUsageError, match=words) as caught:
        check_options(Settings(**settings), plan, world)  # type: ignore[arg-type]
    assert hint in str(caught.value.hint)


def test_8_bit_products_are_tried_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[torch.device] = []
    monkeypatch.setattr(task, "require_float8", tried.append)
    check_options(Settings(float8="all"), None, make_world())  # type: ignore[arg-type]
    assert tried == [CPU]
    plan: Any = type("Plan", (), {"shape": replace(SMALL, vocabulary=96)})
    for name, all_layers, head in (("none", False, False), ("head", False, True), ("all", True, True)):
        model = make_model(plan, Settings(float8=name))
        assert isinstance(model.output.head, Float8Linear) is head
        kinds = {type(module) for module in model.blocks.modules() if isinstance(module, nn.Linear)}
        assert kinds == {Float8Linear if all_layers else nn.Linear}


def make_groups(**settings: Any) -> tuple[Any, dict[str, Any]]:
    """The optimizer, and its groups by the name of one of their parameters."""
    model = Decoder(SMALL)
    fill_parameters(model, lambda name: 0.2, seed=1)
    make = make_optimizer(Settings(**settings), make_world(4, 1))
    assert make is not None
    optimizer = make(model)
    found = {}
    for name, parameter in model.named_parameters():
        [group] = [one for one in optimizer.param_groups if any(item is parameter for item in one["params"])]
        found[name] = (group["muon"], round(group["rate_factor"], 6), group["weight_decay"])
    return optimizer, found


def test_groups_of_the_optimizer_have_their_rates_and_decay() -> None:
    assert make_optimizer(Settings(), make_world()) is None
    optimizer, found = make_groups(
        optimizer="muon", learning_rate=0.01, matrix_rate=0.02, embedding_rate=0.3, matrix_decay=0.05, weight_decay=0.1,
        beta1=0.8, beta2=0.9, epsilon=1e-6,
    )  # fmt: skip
    assert isinstance(optimizer, Muon)
    assert found["embedding.weight"] == found["positions.weight"] == (False, 30.0, 0.1)
    assert found["output.head.weight"] == (False, 1.0, 0.1)
    for name in (
        "attention.qkv.weight",
        "attention.output.weight",
        "feed_forward.up.weight",
        "feed_forward.down.weight",
    ):
        assert found[f"blocks.1.{name}"] == (True, 2.0, 0.05), name
    for name in ("blocks.0.attention.qkv.bias", "blocks.0.attention_norm.weight", "output.norm.weight"):
        assert found[name] == (False, 1.0, 0.0), name
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"]) == (0.01, (0.8, 0.9), 1e-6)
    assert (optimizer._rank, optimizer._ranks, len(optimizer._splits)) == (1, 4, 2)


def test_adamw_may_have_its_own_rate_for_the_ends_of_the_model() -> None:
    for settings, embedding, head in (({"embedding_rate": 0.02}, 2.0, 1.0), ({"head_rate": 0.03}, 1.0, 3.0)):
        _, found = make_groups(learning_rate=0.01, weight_decay=0.1, **settings)
        assert found["embedding.weight"] == (False, embedding, 0.1)
        assert found["output.head.weight"] == (False, head, 0.1)
        assert found["blocks.0.attention.qkv.weight"] == (False, 1.0, 0.1)
        assert found["output.norm.weight"] == (False, 1.0, 0.0)


def test_a_corpus_is_that_of_the_parameters(tmp_path: Path) -> None:
    contract = Contract({"MLBENCH_DATA_DIR": str(tmp_path), "MLBENCH_SEED": "3"})
    assert load_corpus(Settings(data="python-text"), contract, 256).end == 0
    synthetic = load_corpus(Settings(data="synthetic", synthetic_tokens=2048), contract, 300)
    assert (len(synthetic.train), synthetic.vocabulary, synthetic.synthetic) == (2048, 300, True)
    with pytest.raises(TaskUsageError, match="synthetic tokens have no documents"):
        load_corpus(Settings(data="synthetic", documents="separate"), contract, 300)
    with pytest.raises(EnvironmentUnfitError, match="there are no shards"):
        load_corpus(Settings(data="shards"), contract, 50_257)
    write_tokens(tmp_path, {"train": [[1, 2, 3]], "valid": [[4, 5]]}, 10, None, "mine")
    assert load_corpus(Settings(data="tokens"), contract, 10).name == "mine"
    with pytest.raises(TaskUsageError, match="does not name the end-of-document token") as caught:
        load_corpus(Settings(data="tokens", documents="separate"), contract, 10)
    assert caught.value.hint == "--set documents=joined"
    write_tokens(tmp_path, {"train": [[1, 2, 3]], "valid": [[4, 5]]}, 10, 9, "mine")
    assert load_corpus(Settings(data="tokens", documents="separate"), contract, 10).end == 9


def make_workload(rank: int = 0, size: int = 1, **settings: Any) -> NextToken:
    made = Settings(
        **{"model": "tiny", "data": "tokens", "sequence_length": 8, "global_batch": 4, "micro_batch": 2, **settings}
    )
    plan = make_plan(asdict(made), size)
    row = np.arange(100, dtype=np.uint16)
    row[13::10] = 200
    return NextToken(make_world(size, rank), plan, made, Corpus(row, row[:50], 256, 200, "numbers"))


def test_windows_come_in_the_order_of_the_files_or_shuffled() -> None:
    workload = make_workload()
    assert (workload.samples, workload.tokens, workload.updates_per_epoch) == (4, 32, 3.0)
    first = [batch.inputs[:, 0].tolist() for batch in workload.training(0)]
    assert first == [[0, 8], [16, 24]]
    # Twelve windows: the fourth update begins anew.
    assert [batch.inputs[:, 0].tolist() for batch in workload.training(3)] == first
    shuffled = make_workload(order="shuffled")
    starts = [int(start) for update in range(3) for batch in shuffled.training(update) for start in batch.inputs[:, 0]]
    assert starts != list(range(0, 96, 8))
    assert sorted(starts) == list(range(0, 96, 8))
    assert shuffled.updates_per_epoch == 3.0
    assert count_tokens(Settings(global_batch=5, sequence_length=7)) == 35


def test_each_rank_has_its_part_of_the_update() -> None:
    parts = [[batch.inputs[:, 0].tolist() for batch in make_workload(rank, 2).training(1)] for rank in range(2)]
    assert parts == [[[32, 40]], [[48, 56]]]


def test_documents_that_are_kept_apart_have_their_own_positions() -> None:
    joined, apart = next(make_workload().training(0)), next(make_workload(documents="separate").training(0))
    assert joined.mask is None
    assert apart.mask is not None
    assert (joined.terms, apart.terms) == (32.0, 30.0)  # documents end at 13 and 23; 33 is not an input


def test_validation_has_the_wanted_sequences_and_means_over_their_tokens() -> None:
    workload = make_workload(validation_sequences=3)
    batches = list(workload.validation())
    assert [batch.terms for batch in batches] == [16.0, 8.0]
    total = torch.tensor(40.0)
    value, weight = workload.score(total, batches[1])["loss"]
    assert (float(value), weight) == (5.0, 8.0)
    assert workload.sum_loss(total, batches[0]) is total
    value, weight = workload.score(torch.tensor(0.0), replace(batches[1], terms=0.0))["loss"]
    assert (float(value), weight) == (0.0, 0.0)
    assert sum(batch.terms for batch in make_workload().validation()) == 48.0
