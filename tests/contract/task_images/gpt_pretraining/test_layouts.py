"""Every way to spread a model over ranks trains the same one: real processes, real gloo groups, against one process."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.tasks.catalog import load_task
from tests import NIGHTLY
from tests.contract.task_images.ranks import Ended, RankServer

TASK = "task_images.run gpt_pretraining"
SHORT = {
    "steps": 8,
    "warmup_steps": 2,
    "evaluate_every": 2,
    "goal_full": 0.1,
    "goal_light": 0.2,
    "global_batch": 8,
    "validation_sequences": 30,
}
# Losses after 8 AdamW updates in fp32, which differ by the order of sums.
EQUAL = 5e-6


def train(
    ranks: RankServer,
    size: int,
    folder: Path,
    preset: str = "tiny",
    code: int = 0,
    method: str | None = None,
    reshard: str | None = None,
    **changes: Any,
) -> list[Ended]:
    parameters = load_task("gpt_pretraining").resolve(preset, {**SHORT, **changes})
    folder.mkdir(exist_ok=True)
    document = {"name": method, **({} if reshard is None else {"reshard": reshard})}
    ended = ranks.run(TASK, size, folder, parameters, **({"MLBENCH_METHOD": json.dumps(document)} if method else {}))
    assert [one.code for one in ended] == [code] * size, ended[0].stderr[-2000:]
    return ended


@pytest.fixture(scope="module")
def alone(ranks: RankServer, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """The curve of one process."""
    [ended] = train(ranks, 1, tmp_path_factory.mktemp("alone"))
    return curve_of(ended)


def curve_of(ended: Ended) -> list[dict[str, float]]:
    curve: list[dict[str, float]] = ended.result["details"]["curve"]
    assert len(curve) == 4
    return curve


def measure_difference(ended: Ended, expected: list[dict[str, float]]) -> float:
    """The greatest difference of training and validation losses."""
    pairs = zip(curve_of(ended), expected, strict=True)
    return max(abs(found[name] - wanted[name]) for found, wanted in pairs for name in ("train_loss", "loss"))


def check_equal(ended: Ended, expected: list[dict[str, float]], tolerance: float = EQUAL) -> None:
    assert measure_difference(ended, expected) <= tolerance


def test_one_process_learns(alone: list[dict[str, float]]) -> None:
    assert alone[0]["train_loss"] == pytest.approx(math.log(256), abs=0.2)
    assert alone[-1]["loss"] < alone[0]["loss"] - 0.5


LAYOUTS: list[tuple[int, Mapping[str, Any]]] = [
    (1, {"micro_batch": 2}),
    (1, {"method": "fsdp2"}),
    (1, {"method": "bsp"}),
    (2, {}),
    (2, {"method": "wfbp", "micro_batch": 2}),
    (2, {"micro_batch": 1}),
    (2, {"method": "fsdp2"}),
    (2, {"method": "fsdp2", "reshard": "0", "micro_batch": 2}),
    (2, {"method": "fsdp2", "activation_checkpointing": "full"}),
    (2, {"method": "fsdp2", "activation_checkpointing": "selective"}),
    (4, {"method": "hsdp"}),
]
EVERY_TIME = [LAYOUTS[-3]]  # fsdp2; BERT is tried with ddp


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "changes"),
    LAYOUTS if NIGHTLY else EVERY_TIME,
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else str(value),
)
def test_every_layout_has_the_curve_of_one_process(
    ranks: RankServer, tmp_path: Path, alone: list[dict[str, float]], size: int, changes: Mapping[str, Any]
) -> None:
    check_equal(train(ranks, size, tmp_path, **changes)[0], alone)


@pytest.mark.nightly
def test_a_padded_vocabulary_has_the_same_curve_on_every_layout(ranks: RankServer, tmp_path: Path) -> None:
    """260 words in tensors of 320 rows."""
    [plain] = train(ranks, 1, tmp_path / "plain", vocabulary=260, vocabulary_multiple=1)
    assert plain.result["details"]["padded_vocabulary"] == 260
    for size, method in ((1, "ddp"), (2, "fsdp2")):
        folder = tmp_path / str(size)
        padded = train(ranks, size, folder, vocabulary=260, vocabulary_multiple=64, method=method)[0]
        check_equal(padded, curve_of(plain))
        details = padded.result["details"]
        assert (details["vocabulary"], details["padded_vocabulary"]) == (260, 320)
        assert details["parameters"] == plain.result["details"]["parameters"]


@pytest.mark.nightly
def test_a_checkpoint_of_two_ranks_goes_on_on_one_and_with_another_layout(
    ranks: RankServer, tmp_path: Path, alone: list[dict[str, float]]
) -> None:
    folder = tmp_path / "checkpoints"
    kept: Mapping[str, Any] = {"checkpoint_every": 4, "checkpoint_dir": str(folder)}
    [interrupted, _] = train(ranks, 2, tmp_path / "first", method="fsdp2", **kept)
    check_equal(interrupted, alone)
    assert sorted(path.name for path in folder.iterdir()) == ["4", "8"]
    resume = str(folder / "4")
    for size, method in ((1, "ddp"), (2, "fsdp2")):
        [first, *_] = train(ranks, size, tmp_path / method, method=method, resume=resume)
        rest = first.result["details"]["curve"]
        assert [point["update"] for point in rest] == [6, 8]
        assert [point["loss"] for point in rest] == pytest.approx([point["loss"] for point in alone[2:]], abs=EQUAL)
        # The clock goes on from the one of the checkpoint.
        assert rest[0]["seconds"] > curve_of(interrupted)[1]["seconds"]
        assert first.result["updates"] == 8
    others = {"global_batch": (8, 4), "weight_decay": (0.1, 0.2), "beta2": (0.95, 0.9), "warmup_steps": (2, 3)}
    for name, (before, now) in others.items():
        refused = load_task("gpt_pretraining").resolve("tiny", {**SHORT, "resume": resume, name: now})
        [other] = ranks.run(TASK, 1, tmp_path, refused)
        assert other.code == 64
        assert f"was made with {name} = {before}, this run has {now}" in other.stderr


def test_the_throughput_protocol_reports_tokens_and_utilization(ranks: RankServer, tmp_path: Path) -> None:
    changes: Mapping[str, Any] = {"data": "synthetic", "blocks": 3, "block_updates": 2, "blocks_after": 1}
    [first, _] = train(ranks, 2, tmp_path, **changes)
    result = first.result
    assert result["outcome"] == "completed"
    assert result["synthetic"]
    assert result["updates"] == 6
    details = result["details"]
    measured = details["throughput_protocol"]
    assert [len(times) for times in measured["seconds"]] == [2, 2, 2]
    assert measured["rates"] == [8 * 64 * 2 / max(times) for times in measured["seconds"]]
    assert 0 < details["mfu_of_measured_peak"] < 1
    assert "mfu" not in details  # nobody knows this CPU's peak


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stream": "bf16"}, "stream=bf16 rounds what an fp32 model adds up"),
        ({"compile": "graphs", "method": "fsdp2"}, "compile=graphs replays the whole model"),
        ({"attention": "cudnn"}, "no implementation of attention called cudnn"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    ranks: RankServer, tmp_path: Path, changes: Mapping[str, Any], words: str
) -> None:
    [ended] = train(ranks, 1, tmp_path, code=64, **changes)
    assert words in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "tolerance"),
    [
        ({"attention": "flash"}, EQUAL),
        ({"precision": "bf16", "stream": "bf16"}, 2e-2),
    ],
)
def test_options_that_compute_otherwise_follow_the_curve(
    ranks: RankServer, tmp_path: Path, alone: list[dict[str, float]], changes: Mapping[str, Any], tolerance: float
) -> None:
    [ended] = train(ranks, 1, tmp_path, **changes)
    check_equal(ended, alone, tolerance)
    details = ended.result["details"]
    recorded = {**details, **details["options"]}
    assert {name: recorded[name] for name in changes} == changes
    assert details["options"]["attention_kernel"] in ("flash", "math")


@pytest.mark.nightly
@pytest.mark.parametrize("method", ("eftopk", "localsgd", "zero1") if NIGHTLY else ("eftopk",))
def test_a_method_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(
    ranks: RankServer, tmp_path: Path, method: str
) -> None:
    """Residuals, each rank's own optimizer, and an optimizer in parts."""
    variables = {"MLBENCH_METHOD": json.dumps({"name": method})}
    kept: Mapping[str, Any] = {"checkpoint_every": 4, "checkpoint_dir": str(tmp_path / "checkpoints")}
    whole = run_method(ranks, tmp_path / "whole", variables, **kept)
    rest = run_method(ranks, tmp_path / "rest", variables, resume=str(tmp_path / "checkpoints" / "4"))
    assert [point["update"] for point in rest] == [6, 8]
    assert [point["loss"] for point in rest] == [point["loss"] for point in whole[2:]]
    place = tmp_path / "checkpoints" / "4"
    assert {file.name for file in place.glob("*.pt")} == {"main.pt", "rank-0.pt", "rank-1.pt"}
    if method == "eftopk":  # on four ranks: the residuals of two are shared out
        rest = run_method(ranks, tmp_path / "more", variables, 4, resume=str(place))
        assert [point["update"] for point in rest] == [6, 8]


@pytest.mark.slow
def test_a_part_of_a_checkpoint_that_is_cut_off_is_refused_by_every_rank(ranks: RankServer, tmp_path: Path) -> None:
    train(ranks, 2, tmp_path / "whole", checkpoint_every=4, checkpoint_dir=str(tmp_path), method="fsdp2")
    part = tmp_path / "4" / "__1_0.distcp"
    part.write_bytes(part.read_bytes()[:1000])
    for one in train(ranks, 2, tmp_path / "rest", code=78, resume=str(part.parent), method="fsdp2"):
        assert "cannot be read as a checkpoint" in one.stderr


def run_method(
    ranks: RankServer, folder: Path, variables: Mapping[str, str], size: int = 2, **changes: Any
) -> list[dict[str, float]]:
    """The curve of a training with a method."""
    folder.mkdir()
    parameters = load_task("gpt_pretraining").resolve("tiny", {**SHORT, **changes})
    ended = ranks.run(TASK, size, folder, parameters, **variables)
    assert [one.code for one in ended] == [0] * size, ended[0].stderr[-2000:]
    curve: list[dict[str, float]] = ended[0].result["details"]["curve"]
    return curve
