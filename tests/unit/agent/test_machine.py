"""What an agent reads of its machine: devices, memory, clocks, interfaces, streams and control groups."""

from pathlib import Path

import pytest

from mlbench_cli.agent.machine import visible_gpus

# --- devices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "files", "found"),
    [
        ("0,2", ["nvidia0"], ["0", "2"]),
        ("", ["nvidia0"], []),
        ("GPU-abc", ["nvidia0"], ["GPU-abc"]),
        ("NoDevFiles", ["nvidia0"], []),
        ("0", [], []),
        ("1,-1,0", ["nvidia0", "nvidia1"], ["1"]),
        ("0", ["dxg"], ["0"]),
        (None, ["nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm", "null"], ["2", "10"]),
        (None, ["kfd"], ["0", "1"]),
        (None, ["kfd", "nvidia0"], ["0"]),
        (None, ["null"], []),
    ],
)
def test_gpus_are_those_of_the_environment_or_of_the_kernel(
    tmp_path: Path, given: str | None, files: list[str], found: list[str]
) -> None:
    (tmp_path / "dev").mkdir()
    for name in files:
        (tmp_path / "dev" / name).touch()
    nodes = tmp_path / "sys/class/kfd/kfd/topology/nodes"
    for number, gpu in enumerate(("0", "4098", "4099", "no number")):  # 0 is a CPU
        (nodes / str(number)).mkdir(parents=True)
        (nodes / str(number) / "gpu_id").write_text(gpu)
    (nodes / "9").mkdir()
    environ = {} if given is None else {"CUDA_VISIBLE_DEVICES": given}
    assert visible_gpus(environ, str(tmp_path)) == found
    assert visible_gpus({}, str(tmp_path / "nowhere")) == []
