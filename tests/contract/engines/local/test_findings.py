"""Endings that are hard to bring about, from their facts alone; and one that the kernel brings about."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlbench_cli.agent.machine import free_port, gpus_of_worker
from mlbench_cli.engines.diagnosis import diagnose, read_last_lines
from tests.contract.local_runs import Lab, python


def facts(rank: int = 0, **changes: Any) -> dict[str, Any]:
    return {
        "rank": rank,
        "exit_code": 137,
        "signal": 9,
        "stopped": False,
        "out_of_memory": None,
        "start_error": None,
        **changes,
    }


def diagnose_state(state: dict[str, object], **options: Any) -> list[tuple[str, str]]:
    document = {"name": "r-1", "ended": "failed", "first_failed": None, "ranks": [], **state}
    found = diagnose(document, lambda rank: [f"last line of {rank}"], timeout=60, **options)
    return [(finding.code, finding.summary) for finding in found]


def test_memory_is_blamed_as_surely_as_it_was_seen() -> None:
    for counted, words in (("cgroup", "system, out of memory"), ("machine", "system, likely out of memory")):
        ((code, summary),) = diagnose_state({"first_failed": 0, "ranks": [facts(out_of_memory=counted)]})
        assert code == "out_of_memory"
        assert words in summary
    numbers = {"peak_rss_bytes": 33_000_000, "memory_limit_bytes": 24 << 30}
    ((_, summary),) = diagnose_state({"first_failed": 0, "ranks": [facts(out_of_memory="cgroup", **numbers)]})
    assert summary.endswith("out of memory: its largest process used 31.5 MiB, the limit is 24.0 GiB.")
    ((code, summary),) = diagnose_state({"first_failed": 0, "ranks": [facts()]})
    assert code == "rank_crashed"
    assert "SIGKILL, possibly because memory ran out" in summary


def test_a_gpu_without_room_is_named_with_what_was_used_and_what_it_has() -> None:
    line = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of "
        "79.11 GiB of which 12.00 MiB is free. Including non-PyTorch memory, this process has 78.90 GiB memory in use."
    )
    state = {"name": "r-1", "ended": "failed", "first_failed": 0, "ranks": [facts(exit_code=1, signal=None)]}
    [finding] = diagnose(state, lambda rank: ["x", line], timeout=60)
    assert finding.code == "gpu_out_of_memory"
    assert finding.summary == "Rank 0 ran out of GPU memory: it used 78.90 GiB, the GPU has 79.11 GiB."


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("RuntimeError: CUDA error: uncorrectable NVLink error detected during the execution", "gpu_fault"),
        (
            "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized",
            "gpu_fault",
        ),
        ("RuntimeError: The NVIDIA driver on your system is too old (found version 11040).", "driver_mismatch"),
        ("x.py:1: UserWarning: CUDA initialization: The NVIDIA driver on your system is too old", "rank_crashed"),
        ("RuntimeError: No CUDA GPUs are available", "no_gpu"),
        ("RuntimeError: Found no NVIDIA driver on your system.", "no_gpu"),
        ("AssertionError: Torch not compiled with CUDA enabled", "no_gpu"),
        ("ValueError: ProcessGroupNCCL is only supported with GPUs, no GPUs found!", "no_gpu"),
        ("torch.AcceleratorError: CUDA error: out of memory", "gpu_out_of_memory"),
        ("Last error: Cuda failure 2 'out of memory'", "gpu_out_of_memory"),
        ("XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17 bytes.", "gpu_out_of_memory"),
        ("Last error: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 5e000", "shared_gpu"),
        ("AttributeError: Unknown attribute fp32_precision", "torch_lacks_something"),
        ("AttributeError: module 'torch.nn.utils' has no attribute 'get_total_norm'", "torch_lacks_something"),
        ("ModuleNotFoundError: No module named 'PIL'", "module_missing"),
        ("RuntimeError: The server socket has failed to bind to [::]:29500 (errno: 98 - Address", "port_in_use"),
        ("NCCL WARN Invalid rank requested : 1/1", "small_world"),
        ("ValueError: Invalid rank 1, rank should be in the interval [0, 0]", "small_world"),
        ("ncclInternalError: Last error: Bootstrap : no socket interface found", "wrong_interface"),
        ("socketPollConnect: connect to 10.0.0.1<41231> returned Connection timed out", "unreachable_ranks"),
        ("socketStartConnect: Connect to fe80::1%eth0<33000> failed : No route to host", "unreachable_ranks"),
        ("DistStoreError: Timed out after 601 seconds waiting for clients. 1/2 clients joined.", "unreachable_ranks"),
    ],
)
def test_what_drivers_and_nccl_say_is_explained_on_every_engine(line: str, code: str) -> None:
    state = {"name": "r-1", "ended": "failed", "first_failed": 0, "ranks": [facts(exit_code=1, signal=None)]}
    [finding] = diagnose(state, lambda rank: [line, "Traceback"], timeout=60)
    assert finding.code == code


def test_a_failure_behind_an_exit_code_of_0_is_shown_with_its_last_lines() -> None:
    ended = [facts(exit_code=0, signal=None, restarts=restarts, phase="succeeded") for restarts in (0, 1)]
    lines = ["Traceback (most recent call last):", *(f"line {number}" for number in range(15)), "ValueError: no"]
    for rank, count in zip(ended, (1, 0), strict=True):  # what a restarted rank got over is in its log, too
        state = {"name": "r-1", "ended": "exited", "first_failed": None, "ranks": [rank]}
        found = diagnose(state, lambda _: lines, timeout=60)
        assert [finding.code for finding in found] == ["hidden_failure"] * count
        assert all(finding.evidence["log"][-1] == "ValueError: no" for finding in found)


def test_all_reasons_are_given_the_failed_rank_first() -> None:
    ranks = [facts(), facts(1, exit_code=1, signal=None)]
    found = diagnose_state({"first_failed": 1, "ranks": ranks, "disk_full": True})
    assert [code for code, _ in found] == ["rank_crashed", "disk_full"]
    assert diagnose_state({"ended": None, "stopping": "deadline"}) == [
        ("deadline", "The run was stopped at its deadline of 60 s.")
    ]
    assert diagnose_state({"ended": "exited"}) == diagnose_state({"ended": "canceled"}) == []
    ((code, summary),) = diagnose_state({"ended": "never_started", "start_problem": "no more processes"})
    assert (code, "no more processes" in summary) == ("not_started", True)


def test_evidence_is_the_last_readable_lines(tmp_path: Path) -> None:
    event = b'@mlbench {"v":1,"event":"metric","rank":0,"time":1,"name":"a","value":1}'
    log = b"".join(b"line %d\n" % number for number in range(20)) + event + b"\n\n\xff\x1b[31mred\n" + b"z" * 1000
    (tmp_path / "log").write_bytes(log)
    lines = read_last_lines(tmp_path / "log")[-10:]
    assert len(lines) == 10
    assert lines[0] == "line 12"
    assert lines[-2] == "�red"
    assert lines[-1] == "z" * 300


def test_workers_share_gpus_only_where_there_are_too_few() -> None:
    assert [gpus_of_worker(worker, 2, ["0", "1", "2", "3"]) for worker in (0, 1)] == [["0", "1"], ["2", "3"]]
    assert [gpus_of_worker(worker, 1, ["5"]) for worker in (0, 1)] == [["5"], ["5"]]
    assert gpus_of_worker(0, 2, ["5"]) == ["5"]


def test_ports_are_free_and_not_those_of_outgoing_connections() -> None:
    ports = {free_port() for _ in range(50)}
    assert len(ports) > 40
    assert all(1024 < port < 32768 for port in ports)


@pytest.fixture
def small_memory() -> Iterator[Path]:
    """A control group of 32 MiB; its file of members."""
    for root, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        group = Path(root) / f"mlbench-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / limit).write_text(str(32 << 20))
            yield group / "cgroup.procs"
            return
        except OSError:
            continue
        finally:
            group.rmdir()
    pytest.skip("no control group can be made here: it needs root and the memory controller")


def test_a_rank_that_the_kernel_kills_for_memory_is_told_as_such(lab: Lab, small_memory: Path) -> None:
    script = f"import os; open({str(small_memory)!r}, 'w').write(str(os.getpid())); bytearray(256 << 20)"
    run = lab.start(python(script))
    end = lab.end(run)
    assert end.workers[0].exit_code == 137
    [finding] = end.findings
    assert finding.code == "out_of_memory", finding
    assert re.search(r"largest process used \d.* MiB, the limit is \d", finding.summary), finding.summary
