"""How MPI starts and ends without a launcher: what the library sees in the environment, and what is left behind."""

import errno
import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from task_images.comm import pmi
from task_images.comm.pmi import Manager, is_launched


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment that the library would see."""
    made = {"HOME": "/home/user"}
    monkeypatch.setattr(pmi, "os", SimpleNamespace(environ=made, urandom=os.urandom))
    return made


# Of MPICH's mpiexec and Slurm's srun; of PMIx; of Open MPI's mpirun.
@pytest.mark.parametrize("name", ["PMI_FD", "PMI_PORT", "PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK"])
def test_ranks_of_a_launcher_are_recognized_by_its_variables(environment: dict[str, str], name: str) -> None:
    assert not is_launched()
    environment[name] = "0"
    assert is_launched()


class Library:
    """The MPI library: it notes the environment when it starts."""

    def __init__(self, environment: dict[str, str], fails: bool = False) -> None:
        self.calls: list[Any] = []
        self._environment, self._fails = environment, fails

    def MPI_Init_thread(self, arguments: Any, count: Any, level: int, found: Any) -> None:
        self.calls.append((arguments, count, level, dict(self._environment)))
        if self._fails:
            raise OSError("no network")

    def MPI_Finalize(self) -> None:
        self.calls.append("finalize")


def start(monkeypatch: pytest.MonkeyPatch, library: Library, may_read: bool = True) -> tuple[Manager, Any]:
    """A manager of the only rank, after it has started the library."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    manager = Manager(store, 0, 1)
    monkeypatch.setattr(pmi, "library", lambda: library)
    monkeypatch.setattr(pmi, "may_read_others", lambda: may_read)
    monkeypatch.setattr(pmi, "forget_shared_memory", lambda: library.calls.append("forget"))
    monkeypatch.setattr(pmi, "memory_domain", lambda: "this machine")
    return manager, store


def test_the_library_finds_its_manager_in_the_environment_and_children_do_not(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    library = Library(environment)
    manager, store = start(monkeypatch, library)
    manager.start_mpi()
    (_, _, level, seen), *after = library.calls
    assert level == 3  # MPI_THREAD_MULTIPLE
    assert seen == {
        "HOME": "/home/user",
        "PMI_FD": str(manager._library_end.fileno()),
        "PMI_RANK": "0",
        "PMI_SIZE": "1",
        "MPIR_CVAR_CH4_NETMOD": "ucx",
    }
    assert after == ["forget"]
    assert environment == {"HOME": "/home/user", "MPIR_CVAR_CH4_NETMOD": "ucx"}
    assert bytes(store.get("job")).startswith(b"mlbench_")
    assert len(store.get("job")) == len("mlbench_") + 16
    assert store.get("domain/0") == b"this machine"
    assert store.get("barrier/1/open") == b"1"


def test_what_a_machine_says_of_its_network_holds_and_forbidden_reads_are_left_out(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    environment["MPIR_CVAR_CH4_NETMOD"] = "ofi"
    manager, _ = start(monkeypatch, Library(environment), may_read=False)
    manager.start_mpi()
    assert environment == {"HOME": "/home/user", "MPIR_CVAR_CH4_NETMOD": "ofi", "MPIR_CVAR_CH4_CMA_ENABLE": "0"}


def test_a_start_that_fails_leaves_no_variables_either(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    manager, _ = start(monkeypatch, Library(environment, fails=True))
    with pytest.raises(OSError, match="no network"):
        manager.start_mpi()
    assert not [name for name in environment if name.startswith("PMI_")]


def test_the_farewell_is_there_when_the_library_asks_for_it_at_the_end(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    library = Library(environment)
    manager, _ = start(monkeypatch, library)
    manager.end_mpi()
    assert library.calls == ["finalize"]
    manager._library_end.settimeout(20)
    assert manager._library_end.recv(100) == b"cmd=finalize_ack rc=0\n"


@pytest.mark.parametrize(
    ("request_line", "answer"),
    [
        ("cmd=init pmi_version=1 pmi_subversion=1", "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0"),
        ("cmd=get_maxes", "cmd=maxes rc=0 kvsname_max=256 keylen_max=64 vallen_max=4096"),
        ("cmd=get_appnum", "cmd=appnum rc=0 appnum=0"),
        ("cmd=get_universe_size", "cmd=universe_size rc=0 size=3"),
        ("cmd=get kvsname=x key=nothing", "cmd=get_result rc=-1 msg=key_not_found"),
        ("mcmd=spawn", "cmd=_result rc=-1 msg=unknown"),
    ],
)
def test_requests_are_answered_by_mpichs_protocol(request_line: str, answer: str) -> None:
    """Version 1.1 of PMI, as in MPICH's src/pmi."""
    manager = Manager(dist.HashStore(), 0, 3)  # type: ignore[attr-defined]
    words = dict(word.partition("=")[::2] for word in request_line.split())
    assert manager._answer(words) == answer


@pytest.mark.parametrize(("blocks", "fits"), [(2, True), (300, False)])
def test_a_map_of_the_ranks_that_is_too_long_for_an_answer_is_not_given(blocks: int, fits: bool) -> None:
    """MPICH then takes every rank for a machine."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    manager = Manager(store, 0, 3 * blocks)
    for block in range(blocks):
        for rank, domain in zip(range(3 * block, 3 * block + 3), (f"a{block}", f"b{block}", f"b{block}"), strict=True):
            store.set(f"domain/{rank}", domain)
    found = manager._answer({"cmd": "get", "key": "PMI_process_mapping"})
    if fits:
        assert found == "cmd=get_result rc=0 value=(vector,(0,1,1),(1,1,2),(2,1,1),(3,1,2))"
    else:
        assert found == "cmd=get_result rc=-1 msg=key_not_found"
        assert len(store.get("mapping")) > 1000


def test_a_rank_that_loses_the_store_ends_so_that_it_is_started_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The library would wait for its answer for ever."""
    codes: list[int] = []
    empty: dict[str, bytes] = {}
    manager = Manager(SimpleNamespace(get=lambda key: empty[key]), 2, 3)
    monkeypatch.setattr(pmi, "os", SimpleNamespace(_exit=codes.append))
    manager._library_end.sendall(b"cmd=get_my_kvsname\n")
    manager._library_end.shutdown(socket.SHUT_WR)
    manager._serve()
    assert codes == [75]
    assert capsys.readouterr().err == ("rank 2: MPI lost the other ranks while starting: KeyError: 'job'\n")


# --- the library's files --------------------------------------------------------------------------------------------

MAPS = """\
7f01-7f02 r--p 00000000 08:01 11 /usr/lib/libmpi_cxx.so.40
7f02-7f03 r-xp 00000000 08:01 12 /opt/venv/lib/libmpi.so.12.3.4
7f03-7f04 rw-s 00000000 00:1a 13 /dev/shm/mpich_shm_mlbench_0a1
7f04-7f05 rw-s 00000000 00:1a 14 /dev/shm/other_shm
7f05-7f06 r--p 00000000 08:01 15 /opt/venv/lib/libmpi.so.12.3.4
"""


def read_maps(monkeypatch: pytest.MonkeyPatch, text: str) -> Any:
    """Let this process have these files mapped; returns the class of their paths."""

    class Maps(type(Path())):  # type: ignore[misc]
        def read_text(self, *_: object, **__: object) -> str:
            assert str(self) == "/proc/self/maps"
            return text

    monkeypatch.setattr(pmi, "Path", Maps)
    return Maps


@pytest.mark.parametrize("path", ["/opt/venv/lib/libmpi.so.12.3.4", "/usr/lib/libmpi_abi.so.0", "/usr/lib/libmpi.so"])
def test_the_library_is_the_one_that_this_process_has_loaded(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    read_maps(monkeypatch, MAPS.replace("/opt/venv/lib/libmpi.so.12.3.4", path))
    monkeypatch.setattr("ctypes.CDLL", lambda name: f"loaded {name}")
    loaded: Any = pmi.library()
    assert loaded == f"loaded {path}"


def test_without_a_library_none_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    read_maps(monkeypatch, "7f01-7f02 r--p 0 08:01 11 /usr/lib/libmpi_cxx.so.40\n")
    with pytest.raises(OSError, match="has not loaded a libmpi"):
        pmi.library()


def test_the_shared_memory_of_mpich_is_unlinked_and_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    gone: list[tuple[str, bool]] = []
    paths = read_maps(monkeypatch, MAPS)
    monkeypatch.setattr(paths, "unlink", lambda path, missing_ok: gone.append((str(path), missing_ok)))
    pmi.forget_shared_memory()
    assert gone == [("/dev/shm/mpich_shm_mlbench_0a1", True)]


@pytest.mark.parametrize(("error", "may"), [(errno.EFAULT, True), (errno.EPERM, False), (errno.ENOSYS, False)])
def test_a_process_may_read_others_if_only_the_address_is_wrong(
    monkeypatch: pytest.MonkeyPatch, error: int, may: bool
) -> None:
    asked: list[int] = []
    libc = SimpleNamespace(process_vm_readv=lambda process, *_: asked.append(process))
    monkeypatch.setattr("ctypes.CDLL", lambda name, use_errno: libc)
    monkeypatch.setattr("ctypes.get_errno", lambda: error)
    assert pmi.may_read_others() is may
    assert asked == [os.getppid()]


def test_systems_without_that_call_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda name, use_errno: SimpleNamespace())
    assert not pmi.may_read_others()
