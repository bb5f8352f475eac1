"""How the backend mpi starts and ends, with a library that only counts. Real ranks are in the contract tests."""

import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from task_images.comm import mpi
from task_images.harness.errors import EnvironmentUnfitError


class Library:
    """What mpi4py's module MPI says of a library that is one of `size` ranks."""

    THREAD_MULTIPLE, ERRORS_RETURN = 3, "return"

    def __init__(self, version: str = "MPICH Version: 4.3\nwith more\0", rank: int = 1, size: int = 2) -> None:
        self.version, self.rank, self.size = version, rank, size
        self.calls: list[object] = []
        self.is_initialized, self.threads = False, 3
        self.COMM_WORLD = SimpleNamespace(
            Get_rank=lambda: self.rank,
            Get_size=lambda: self.size,
            Barrier=lambda: self.calls.append("barrier"),
            Set_errhandler=self.calls.append,
            Dup=lambda: "copy",
            Get_group=lambda: SimpleNamespace(Incl=lambda ranks: ("group", tuple(ranks))),
            Create_group=lambda members, tag: (members, tag),
        )

    def Get_library_version(self) -> str:
        return self.version

    def Is_initialized(self) -> bool:
        return self.is_initialized

    def Init_thread(self, level: int) -> None:
        self.calls.append(("init", level))

    def Query_thread(self) -> int:
        return self.threads


class Calls(list[object]):
    """What was called besides the library."""

    is_launched = False


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The module as just imported: this process neither loads a library nor registers anything for its end."""
    made = Calls()

    class Manager:
        def __init__(self, store: object, rank: int, size: int) -> None:
            made.append((store, rank, size))

        def start_mpi(self) -> None:
            made.append("start")

        def end_mpi(self) -> None:
            made.append("end")

    monkeypatch.setattr(mpi, "Manager", Manager)
    monkeypatch.setattr(mpi, "is_launched", lambda: made.is_launched)
    monkeypatch.setattr(mpi, "forget_shared_memory", lambda: made.append("forget"))
    monkeypatch.setattr(mpi, "library", lambda: SimpleNamespace(MPI_Finalize=lambda: made.append("finalize")))
    monkeypatch.setattr(mpi, "atexit", SimpleNamespace(register=lambda function: made.append(function.__name__)))
    monkeypatch.setattr(mpi, "_facts", {})
    monkeypatch.setattr(mpi, "_manager", None)
    monkeypatch.setattr(mpi, "_left_in_peace", True)
    return made


def test_ranks_without_a_launcher_start_by_mlbenchs_process_manager(calls: Calls) -> None:
    library = Library()
    mpi._start(library, "store", 1, 2)
    assert calls == [("store", 1, 2), "start", "_finalize"]
    assert library.calls == ["return"]  # errors are raised instead of ending the process
    assert mpi.facts() == {"library": "MPICH Version: 4.3", "launcher": "none", "detours": sorted(mpi._detours)}


def test_ranks_of_a_launcher_keep_its_numbers(calls: Calls) -> None:
    calls.is_launched = True
    library = Library()
    mpi._start(library, "store", 1, 2)
    # Every rank has opened its shared memory before the names are removed.
    assert library.calls == [("init", 3), "barrier", "return"]
    assert calls == ["forget", "_finalize"]
    assert mpi.facts()["launcher"] == "external"


def test_open_mpi_without_mpirun_is_rejected_with_what_to_install(calls: Calls) -> None:
    """It would abort the process instead of raising an error."""
    with pytest.raises(EnvironmentUnfitError, match=r"Open MPI v5\.0\.7, package needs mpirun to start") as error:
        mpi._start(Library("Open MPI v5.0.7, package\0"), "store", 1, 2)
    assert error.value.hint == "pip install mpi4py mpich, or start the task with mpirun."
    assert calls == []


def test_open_mpi_with_mpirun_is_accepted(calls: Calls) -> None:
    calls.is_launched = True
    mpi._start(Library("Open MPI v5.0.7"), "store", 1, 2)
    assert mpi.facts()["library"] == "Open MPI v5.0.7"


def test_a_library_that_already_runs_is_not_started_again(calls: Calls) -> None:
    library = Library()
    library.is_initialized = True
    mpi._start(library, "store", 1, 2)
    assert (calls, library.calls) == ([], ["return"])


@pytest.mark.parametrize(("rank", "size"), [(0, 2), (1, 3)])
def test_other_numbers_than_those_of_the_run_are_rejected(calls: Calls, rank: int, size: int) -> None:
    with pytest.raises(EnvironmentUnfitError, match=f"MPI says rank {rank} of {size}, the run says rank 1 of 2"):
        mpi._start(Library(rank=rank, size=size), "store", 1, 2)


def test_a_library_without_threads_is_rejected(calls: Calls) -> None:
    library = Library()
    library.threads = 2
    with pytest.raises(EnvironmentUnfitError, match="without support for threads"):
        mpi._start(library, "store", 1, 2)


def test_the_library_ends_only_after_the_group_was_left(calls: Calls) -> None:
    """A rank that fails must not wait in MPI_Finalize for ranks that wait for it."""
    mpi._start(Library(), "store", 1, 2)
    calls.clear()
    mpi._finalize()
    assert calls == []
    mpi._part()
    mpi._finalize()
    assert calls == ["end"]


def test_ranks_of_a_launcher_end_by_the_library(calls: Calls) -> None:
    calls.is_launched = True
    mpi._start(Library(), "store", 1, 2)
    calls.clear()
    mpi._part()
    mpi._finalize()
    assert calls == ["finalize"]


# --- finding the library --------------------------------------------------------------------------------------------


def fail(monkeypatch: pytest.MonkeyPatch, failures: int, **environ: str) -> list[str]:
    """mpi4py.MPI cannot be imported the first `failures` times; returns MPI4PY_LIBMPI at each try."""
    tried: list[str] = []
    package = SimpleNamespace(rc=SimpleNamespace(initialize=True, finalize=True))

    def load(name: str) -> Any:
        if name == "mpi4py":
            return package
        assert (package.rc.initialize, package.rc.finalize) == (False, False)
        tried.append(environ.get("MPI4PY_LIBMPI", ""))
        if len(tried) <= failures:
            raise RuntimeError("cannot load\n   MPI library" + " x" * 200)
        return "MPI"

    monkeypatch.setattr(mpi, "find_spec", lambda name: object())
    monkeypatch.setattr(mpi, "import_module", load)
    monkeypatch.setattr(mpi, "os", SimpleNamespace(environ=environ))
    monkeypatch.setattr(mpi, "_library_of_the_wheel", lambda: "/usr/local/lib/libmpi.so.12")
    return tried


def test_the_library_is_loaded_but_not_initialized(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = fail(monkeypatch, 0)
    assert mpi._mpi() == "MPI"
    assert tried == [""]


def test_the_wheels_library_is_loaded_if_mpi4py_finds_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's pip installs it where mpi4py does not look."""
    tried = fail(monkeypatch, 1)
    assert mpi._mpi() == "MPI"
    assert tried == ["", "/usr/local/lib/libmpi.so.12"]


def test_a_library_that_cannot_be_loaded_is_named_with_the_reason_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    fail(monkeypatch, 2)
    with pytest.raises(
        EnvironmentUnfitError, match=r"cannot load /usr/local/lib/libmpi\.so\.12: cannot load MPI"
    ) as error:
        mpi._mpi()
    assert error.value.hint == mpi.INSTALL
    assert len(str(error.value)) < 270


def test_a_library_that_the_user_names_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = fail(monkeypatch, 1, MPI4PY_LIBMPI="/opt/libmpi.so")
    with pytest.raises(EnvironmentUnfitError, match="mpi4py finds no MPI library: cannot load MPI library"):
        mpi._mpi()
    assert tried == ["/opt/libmpi.so"]


def test_without_any_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    fail(monkeypatch, 1)
    monkeypatch.setattr(mpi, "_library_of_the_wheel", lambda: None)
    with pytest.raises(EnvironmentUnfitError, match="mpi4py finds no MPI library") as error:
        mpi._mpi()
    assert error.value.hint == "pip install mpi4py mpich"


def test_without_mpi4py_nothing_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentUnfitError, match="mpi4py is missing"):
        mpi.register()


def test_the_wheel_is_searched_for_its_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def files(*names: str) -> Any:
        made = [SimpleNamespace(name=name, locate=lambda name=name: tmp_path / "bin" / ".." / name) for name in names]
        return lambda package: SimpleNamespace(files=made or None)

    monkeypatch.setattr(mpi, "distribution", files("libmpi.so", "libmpi.so.12"))
    assert mpi._library_of_the_wheel() == str(tmp_path / "libmpi.so.12")
    for other in (files("libmpi.so"), files()):
        monkeypatch.setattr(mpi, "distribution", other)
        assert mpi._library_of_the_wheel() is None

    def missing(package: str) -> Any:
        raise PackageNotFoundError(package)

    monkeypatch.setattr(mpi, "distribution", missing)
    assert mpi._library_of_the_wheel() is None


def test_the_backend_is_registered_once_under_a_name_that_torch_does_not_reserve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registered: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(mpi, "_mpi", lambda: None)
    monkeypatch.setattr(dist.Backend, "_plugins", {})

    def register_backend(name: str, make: object, extended_api: bool, devices: list[str]) -> None:
        assert (make, extended_api) == (mpi._open_group, True)
        registered.append((name, devices))
        dist.Backend._plugins[name.upper()] = make  # type: ignore[assignment]

    monkeypatch.setattr(dist.Backend, "register_backend", register_backend)
    assert [mpi.register(), mpi.register()] == ["mlbench_mpi"] * 2
    assert registered == [("mlbench_mpi", ["cpu", "cuda"])]


def test_groups_of_some_ranks_have_communicators_of_these_ranks_and_a_tag(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the first group starts the library and, once left, lets it end."""
    library = Library()
    monkeypatch.setattr(mpi, "_mpi", lambda: library)
    monkeypatch.setitem(
        sys.modules,
        "task_images.comm.mpi_group",
        SimpleNamespace(MpiGroup=lambda *arguments: arguments),
    )

    def open_group(name: str, ranks: list[int]) -> Any:
        options = SimpleNamespace(global_ranks_in_group=ranks, group_id=name, store="store", group_rank=1, group_size=2)
        return mpi._open_group(options, None)

    assert open_group("0", []) == (library, "copy", mpi._detours, mpi._part)
    assert calls == [("store", 1, 2), "start", "_finalize"]
    assert open_group("ab", [0, 2]) == (library, (("group", (0, 2)), 97 + 98), mpi._detours)
    _, (_, tag), _ = open_group("z" * 300, [1])
    assert tag == 300 * 122 - 32768  # MPI guarantees tags only up to 32767
    assert len(calls) == 3
