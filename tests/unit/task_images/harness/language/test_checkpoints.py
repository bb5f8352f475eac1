"""Distributed checkpoints with one rank: what is in the folder, what resumes, what is damaged or of another run."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from task_images.contract import Contract
from task_images.harness.distributed import World, open_world
from task_images.harness.errors import EnvironmentUnfitError, TaskUsageError
from task_images.harness.language.checkpoints import (
    check_digests,
    load_method_state,
    load_step,
    read_facts,
    save_step,
)

FACTS = {"task": "a_task", "seed": 1, "parameters": {"width": 8}, "position": {"total": 3}}


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    threads = torch.get_num_threads()
    yield open_world(Contract({"OMP_NUM_THREADS": "1"}))
    torch.set_num_threads(threads)


def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def test_a_folder_has_parts_facts_and_digests_as_sha256sum_reads_them(world: World, tmp_path: Path) -> None:
    model, optimizer = make(1)
    target = tmp_path / "new" / "step-3"
    (tmp_path / "new" / "step-3.partial").mkdir(parents=True)
    (tmp_path / "new" / "step-3.partial" / "rubbish").touch()
    save_step(world, target, model, optimizer, FACTS, {"update": 3, "ranks": [{"residual": torch.ones(2)}]})
    names = {path.name for path in target.iterdir()}
    assert names == {".metadata", "__0_0.distcp", "method-0.pt", "rank-0.sha256", "mlbench.json"}
    assert json.loads((target / "mlbench.json").read_text()) == {"form": 3, **FACTS}
    assert (target / "rank-0.sha256").read_text() == "".join(
        f"{hashlib.sha256((target / name).read_bytes()).hexdigest()}  {name}\n"
        for name in ("__0_0.distcp", "method-0.pt")
    )
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["step-3"]
    check_digests(world, target)


def test_model_optimizer_and_method_resume(world: World, tmp_path: Path) -> None:
    model, optimizer = make(1)
    save_step(world, tmp_path / "step-1", model, optimizer, FACTS, {"update": 3, "ranks": ["own"]})
    other, second = make(2)
    load_step(tmp_path / "step-1", other, second)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(optimizer.state[one]["exp_avg"], second.state[two]["exp_avg"])
    assert load_method_state(tmp_path / "step-1", 0, 1) == {"update": 3, "ranks": ["own"]}


def test_a_method_without_state_leaves_no_file(world: World, tmp_path: Path) -> None:
    model, optimizer = make(1)
    save_step(world, tmp_path / "step-1", model, optimizer, FACTS, {})
    assert not (tmp_path / "step-1" / "method-0.pt").exists()
    assert load_method_state(tmp_path / "step-1", 0, 1) == {}
    save_step(world, tmp_path / "step-1", model, optimizer, {**FACTS, "seed": 2}, {"update": 7})
    assert load_method_state(tmp_path / "step-1", 0, 1) == {"update": 7}
    assert json.loads((tmp_path / "step-1" / "mlbench.json").read_text())["seed"] == 2


def test_a_method_that_has_the_optimizers_state_resumes_only_with_its_like(world: World, tmp_path: Path) -> None:
    model, optimizer = make(1)
    save_step(world, tmp_path / "whole", model, optimizer, FACTS)
    save_step(world, tmp_path / "sharded", model, None, FACTS)
    assert json.loads((tmp_path / "sharded" / "mlbench.json").read_text())["optimizer"] == "method"
    for name, given in (("whole", None), ("sharded", optimizer)):
        with pytest.raises(TaskUsageError, match="its optimizer's state in another form") as caught:
            load_step(tmp_path / name, model, given)
        assert caught.value.hint == "Resume with the method that made it."
    other, _ = make(2)
    load_step(tmp_path / "sharded", other, None)
    assert torch.equal(other.get_parameter("weight"), model.get_parameter("weight"))


@pytest.mark.parametrize("name", ["__0_0.distcp", "method-0.pt"])
def test_damage_is_found_by_digests_before_anything_is_read(world: World, tmp_path: Path, name: str) -> None:
    model, optimizer = make(1)
    save_step(world, tmp_path / "step-1", model, optimizer, FACTS, {"update": 3, "ranks": ["own"]})
    path = tmp_path / "step-1" / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(EnvironmentUnfitError, match=f"is damaged: {name} has changed since it was written") as caught:
        check_digests(world, tmp_path / "step-1")
    assert caught.value.hint == "Use an earlier checkpoint."
    path.unlink()
    with pytest.raises(EnvironmentUnfitError, match=r"is damaged: .*No such file"):
        check_digests(world, tmp_path / "step-1")


@pytest.mark.parametrize("content", [None, b"no part"])
def test_a_part_that_is_missing_or_cannot_be_read_is_an_error_of_the_environment(
    world: World, tmp_path: Path, content: bytes | None
) -> None:
    """Torch wraps both in an exception of its own that is no Exception."""
    model, optimizer = make(1)
    save_step(world, tmp_path / "step-1", model, optimizer, FACTS)
    part = tmp_path / "step-1" / "__0_0.distcp"
    if content is None:
        part.unlink()
    else:
        part.write_bytes(content)
    with pytest.raises(EnvironmentUnfitError, match="step-1 cannot be read as a checkpoint: ") as caught:
        load_step(tmp_path / "step-1", model, optimizer)
    assert caught.value.hint == "Use an earlier one."


def test_a_methods_state_that_cannot_be_read_is_named(world: World, tmp_path: Path) -> None:
    model, optimizer = make(1)
    save_step(world, tmp_path / "step-1", model, optimizer, FACTS, {"update": 3, "ranks": ["own"]})
    (tmp_path / "step-1" / "method-0.pt").write_bytes(b"no state")
    with pytest.raises(EnvironmentUnfitError, match=r"method-0\.pt cannot be read"):
        load_method_state(tmp_path / "step-1", 0, 1)


@pytest.mark.parametrize(
    ("expected", "words"),
    [
        ({"task": "a_task"}, ""),
        ({"task": "a_task", "seed": 1, "parameters": {"width": 8}}, ""),
        ({"task": "other"}, "task = 'a_task', this run has 'other'"),
        ({"seed": 2}, "seed = 1, this run has 2"),
        ({"parameters": {"width": 16}}, "width = 8, this run has 16"),
        ({"parameters": {"depth": 2}}, "depth = None, this run has 2"),
    ],
)
def test_a_checkpoint_belongs_to_runs_with_its_parameters(tmp_path: Path, expected: Any, words: str) -> None:
    (tmp_path / "mlbench.json").write_text(json.dumps({"form": 3, **FACTS}))
    if not words:
        assert read_facts(tmp_path, expected)["position"] == {"total": 3}
        return
    with pytest.raises(TaskUsageError, match=f"was made with {words}"):
        read_facts(tmp_path, expected)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "is not a checkpoint"),
        ("{", "is not a checkpoint"),
        ("[3]", "not of the form 3"),
        ('{"form": 2}', "form 3"),
    ],
)
def test_other_folders_are_no_checkpoints(tmp_path: Path, text: str | None, words: str) -> None:
    if text is not None:
        (tmp_path / "mlbench.json").write_text(text)
    with pytest.raises(EnvironmentUnfitError, match=words):
        read_facts(tmp_path, {})
