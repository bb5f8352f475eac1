"""The way out of a task: exit code and message for every kind of trouble."""

import pytest
import torch

from task_images.contract import (
    Contract,
    DivergedError,
    EnvironmentUnfitError,
    PeerLostError,
    TaskError,
    TaskUsageError,
    WrongResultError,
)
from task_images.run import run
from task_images.world import open_world


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (TaskError("it went wrong"), 1),
        (DivergedError("it went wrong", "try less"), 1),
        (TaskUsageError("it went wrong"), 64),
        (PeerLostError("it went wrong"), 75),
        (EnvironmentUnfitError("it went wrong", "elsewhere"), 78),
        (WrongResultError("it went wrong"), 70),
        (RuntimeError("[gloo/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234"), 75),
    ],
)
def test_foreseeable_trouble_is_a_line_and_a_code(
    error: Exception, code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def main(contract: Contract) -> None:
        raise error

    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(SystemExit) as left:
        run(main)

    assert left.value.code == code
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert all(line.startswith("rank 2: ") for line in said.splitlines())


def test_a_bug_keeps_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def main(contract: Contract) -> None:
        raise RuntimeError("shape mismatch")

    with pytest.raises(SystemExit) as left:
        run(main)
    assert left.value.code == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_broken_contract_is_a_usage_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(SystemExit) as left:
        run(lambda contract: None)
    assert left.value.code == 64
    assert "WORLD_SIZE is 'two'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"MLBENCH_BACKEND": "nccl"}, "nccl needs a GPU"),
        ({"MLBENCH_BACKEND": "carrier-pigeon"}, 'no communication backend "carrier-pigeon"'),
        ({"MLBENCH_DEVICE": "gpu"}, "torch finds none here"),
    ],
)
def test_what_is_not_to_be_had_here(variables: dict[str, str], words: str) -> None:
    if variables.get("MLBENCH_DEVICE") == "gpu" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(EnvironmentUnfitError, match=words):
        open_world(Contract(variables))


def test_a_world_of_one_needs_no_peer_and_honors_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "0")
    try:
        world = open_world(Contract({}))
        assert (world.threads, torch.get_num_threads()) == (1, 1)
        assert world.sum([1.0, 2.5]) == world.max([1.0, 2.5]) == [1.0, 2.5]
        assert world.gather([3.0]) == [[3.0]]
        assert world.agree(7.0) == 7.0
        world.barrier()
        world.close()
    finally:
        torch.set_num_threads(before)
