"""BERT on real ranks: layouts have the curve of one process, the protocol counts sentences, tiny reaches its goal."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.tasks.catalog import load_task
from tests import NIGHTLY
from tests.contract.task_images.ranks import Ended, RankServer

TASK = "task_images.run bert_pretraining"
SHORT: Mapping[str, Any] = {
    "steps": 6,
    "warmup_steps": 2,
    "evaluate_every": 3,
    "goal_full": 0.1,
    "goal_light": 0.2,
    "global_batch": 8,
}


def train(ranks: RankServer, size: int, folder: Path, preset: str = "tiny", **changes: Any) -> list[Ended]:
    folder.mkdir(exist_ok=True)
    method = {"name": changes.pop("method", "ddp")}
    parameters = load_task("bert_pretraining").resolve(preset, changes)
    ended = ranks.run(TASK, size, folder, parameters, MLBENCH_METHOD=json.dumps(method))
    assert [one.code for one in ended] == [0] * size, ended[0].stderr[-2000:]
    return ended


@pytest.mark.nightly
def test_layouts_have_the_curve_of_one_process(ranks: RankServer, tmp_path: Path) -> None:
    [alone] = train(ranks, 1, tmp_path / "alone", **SHORT, validation_sequences=30)
    expected = alone.result["details"]["curve"]
    cases: list[tuple[str, Mapping[str, Any]]] = [
        ("ddp", {"micro_batch": 2}),
        ("fsdp2", {"activation_checkpointing": "full"}),
    ]
    for method, more in cases:
        found = train(ranks, 2, tmp_path / method, **SHORT, validation_sequences=30, method=method, **more)
        for point, wanted in zip(found[0].result["details"]["curve"], expected, strict=True):
            for name in ("train_loss", "loss", "mlm_loss", "nsp_loss", "mlm_accuracy", "nsp_accuracy"):
                assert point[name] == pytest.approx(wanted[name], abs=1e-5)


@pytest.mark.parametrize("data", ("legacy", "synthetic") if NIGHTLY else ("synthetic",))
def test_throughput_counts_sentences_of_all_ranks(ranks: RankServer, tmp_path: Path, data: str) -> None:
    protocol: Mapping[str, Any] = {"blocks": 2, "block_updates": 2, "blocks_after": 1, "batch_per_rank": 4}
    first, _ = train(ranks, 2, tmp_path, data=data, **protocol)
    measured = first.result["details"]["throughput_protocol"]
    assert (measured["unit"], measured["per_update"]) == ("sentences", 8)
    assert measured["rates"] == [8 * 2 / max(times) for times in measured["seconds"]]
    training = [event for event in first.events("phase") if event["phase"] == "training"]
    assert training
    assert not any("epoch" in event for event in training)  # of how many, nobody knows


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_tiny_reaches_its_light_goal(ranks: RankServer, tmp_path: Path) -> None:
    parameters = load_task("bert_pretraining").resolve("tiny")
    [ended] = ranks.wait(ranks.start(TASK, 1, tmp_path, parameters, {"MLBENCH_GOAL": "light"}), seconds=800)
    assert ended.code == 0, ended.stderr[-2000:]
    assert ended.result["outcome"] == "goal_reached"
    assert ended.result["goal"]["metric"] == "mlm_loss"
