"""What methods compute to compress gradients, timed without a network by the code that trains."""

import pytest
import torch

from task_images.comm.codecs import TopK
from task_images.comm.presets import PRESETS, resolve
from task_images.contract import Contract
from task_images.harness import codec_costs
from task_images.harness.codec_costs import SIZES, list_compressing, measure_codecs
from task_images.harness.distributed import open_world

SHAPES = [(40, 25), (40,), (8, 5, 5, 5)]


def test_every_method_that_compresses_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec_costs, "SAMPLES", 1)
    before = torch.random.get_rng_state()
    rows = measure_codecs(open_world(Contract()), SHAPES)
    assert torch.equal(torch.random.get_rng_state(), before)
    compressing = {name for name in PRESETS if resolve(name).codec != "none"} - {"choco"}  # whose messages are weights
    assert {(row["method"], row["ranks"]) for row in rows} == {
        (name, size) for name in {*compressing, "onebit-adam"} for size in SIZES
    }
    assert all(row["bytes"] == 4 * 2040 and row["before"] > 0 and row["after"] >= 0 for row in rows)


def test_a_codec_that_takes_long_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    select = TopK.select

    def slowly(self: TopK, flat: torch.Tensor, seed: int) -> torch.Tensor:
        time.sleep(0.02)
        return select(self, flat, seed)

    monkeypatch.setattr(TopK, "select", slowly)
    monkeypatch.setattr(codec_costs, "SAMPLES", 1)
    found = {row["method"]: row["before"] for row in measure_codecs(open_world(Contract()), SHAPES)}
    assert min(found["topk"], found["eftopk"], found["dgc"], found["gtopk"]) >= 0.02


def test_large_models_are_represented_by_fewer_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec_costs, "SAMPLES", 1)
    monkeypatch.setattr(codec_costs, "MAX_NUMBERS", 1100)
    monkeypatch.setattr(codec_costs, "list_compressing", lambda: list_compressing()[:1])
    assert {row["bytes"] for row in measure_codecs(open_world(Contract()), SHAPES)} == {4 * (22 * 25 + 40 + 5 * 125)}
