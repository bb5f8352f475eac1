"""MPI without a launcher: MPICH's process-manager protocol (PMI-1), answered from torch's store.

An MPI process asks its process manager for three things: its rank, a key-value store shared with the others, and a
barrier. `mpiexec` answers through a tree of proxies, which it starts on every host, usually by ssh. Ranks that are
already running and share a torch store for their rendezvous need no launcher: each gives MPICH one end of a socket
pair, and a thread at the other end answers from that store.

Wire protocol (MPICH, src/pmi, version 1.1): one request per line, "cmd=NAME key=value ...", one answer line each.
"""

import contextlib
import ctypes
import itertools
import os
import re
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from task_images.contract import EXIT_RETRYABLE

# Set by launchers of MPI ranks: mpiexec, srun, mpirun.
LAUNCHED = ("PMI_FD", "PMI_PORT", "PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")

FAREWELL = "cmd=finalize_ack rc=0"
MAPPING_LENGTH = 1000
THREAD_MULTIPLE = 3


def is_launched() -> bool:
    """Whether a launcher started this process as an MPI rank."""
    return any(name in os.environ for name in LAUNCHED)


class Manager:
    """The process manager of one rank. `store` is shared by all ranks of the job and initially empty.

    The thread lives as long as the process. If the rank cannot reach the store, MPI cannot start, and the process ends
    with exit code 75.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._barriers = 0
        self._answers: dict[str, Callable[[Mapping[str, str]], str]] = {
            "init": self._init,
            "get_maxes": lambda _: "cmd=maxes rc=0 kvsname_max=256 keylen_max=64 vallen_max=4096",
            "get_appnum": lambda _: "cmd=appnum rc=0 appnum=0",
            "get_universe_size": lambda _: f"cmd=universe_size rc=0 size={size}",
            "get_my_kvsname": lambda _: f"cmd=my_kvsname rc=0 kvsname={self._job()}",
            "put": self._put,
            "get": self._get,
            "barrier_in": self._barrier,
            "finalize": lambda _: FAREWELL,
        }
        self._socket, self._library_end = socket.socketpair()

    def start_mpi(self) -> None:
        """Initialize the MPI library of this process as rank `rank` of `size`. Collective.

        mpi4py.MPI must have been imported with `mpi4py.rc.initialize = False`. The library is called through ctypes,
        which releases the GIL, because the answering thread must run.
        """
        if self._rank == 0:
            # MPICH names its shared memory after the job; a random name avoids leftovers of a killed run.
            self._store.set("job", f"mlbench_{os.urandom(8).hex()}")
        self._store.set(f"domain/{self._rank}", memory_domain())
        threading.Thread(target=self._serve, name="pmi", daemon=True).start()
        variables = {
            "PMI_FD": str(self._library_end.fileno()),
            "PMI_RANK": str(self._rank),
            "PMI_SIZE": str(self._size),
        }
        os.environ.update(variables)
        # MPICH has two network modules. With libfabric over TCP, the last bytes of a collective leave a rank only in
        # its next MPI call: a rank that computes, validates or waits for a file blocks the others (deadlock if it waits
        # for one of them). UCX gives them to the kernel at once, and takes half the time or less for small messages,
        # but more for large ones over loopback. MPI_ANY_SOURCE hangs over UCX, and is not used.
        # Machines whose fast network only libfabric supports (EFA) set this variable themselves.
        os.environ.setdefault("MPIR_CVAR_CH4_NETMOD", "ucx")
        # Containers, and Yama, forbid to read another process's memory; MPICH would abort the rank when it is denied.
        os.environ.setdefault("MPIR_CVAR_CH4_CMA_ENABLE", "0")
        try:
            library().MPI_Init_thread(None, None, THREAD_MULTIPLE, ctypes.byref(ctypes.c_int()))
        finally:
            # Children of this process are not MPI ranks.
            for name in variables:
                del os.environ[name]
        self._meet()
        forget_shared_memory()

    def end_mpi(self) -> None:
        """Finalize the library. Collective: waits for all ranks."""
        library().MPI_Finalize()
        # MPICH says goodbye to its manager at process exit, when this thread no longer runs.
        self._socket.sendall(FAREWELL.encode() + b"\n")

    def _serve(self) -> None:
        try:
            with self._socket.makefile("r") as requests:
                for line in requests:
                    words = dict(word.partition("=")[::2] for word in line.split())
                    self._socket.sendall(self._answer(words).encode() + b"\n")
        except Exception:
            # MPI would wait forever for an answer and cannot be interrupted: end the process and print why.
            why = traceback.format_exc(limit=1).strip().splitlines()[-1]
            sys.stderr.write(f"rank {self._rank}: MPI lost the other ranks while starting: {why[:300]}\n")
            sys.stderr.flush()
            os._exit(EXIT_RETRYABLE)

    def _answer(self, words: Mapping[str, str]) -> str:
        command = words.get("cmd", "")
        answer = self._answers.get(command)
        return answer(words) if answer else f"cmd={command}_result rc=-1 msg=unknown"

    def _init(self, words: Mapping[str, str]) -> str:
        return "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0"

    def _job(self) -> str:
        return bytes(self._store.get("job")).decode()

    def _put(self, words: Mapping[str, str]) -> str:
        self._store.set(f"kvs/{words['key']}", words["value"])
        return "cmd=put_result rc=0"

    def _get(self, words: Mapping[str, str]) -> str:
        key = words["key"]
        value = self._mapping() if key == "PMI_process_mapping" else self._lookup(f"kvs/{key}")
        return f"cmd=get_result rc=0 value={value}" if value else "cmd=get_result rc=-1 msg=key_not_found"

    def _lookup(self, key: str) -> str | None:
        return bytes(self._store.get(key)).decode() if self._store.check([key]) else None

    def _barrier(self, words: Mapping[str, str]) -> str:
        self._meet()
        return "cmd=barrier_out rc=0"

    def _meet(self) -> None:
        self._barriers += 1
        key = f"barrier/{self._barriers}"
        if self._store.add(key, 1) == self._size:
            self._store.set(f"{key}/open", "1")
        self._store.wait([f"{key}/open"])

    def _mapping(self) -> str | None:
        """Which ranks share memory, computed by rank 0 for all; None if it does not fit into an answer."""
        if self._rank == 0:
            domains = [bytes(self._store.get(f"domain/{rank}")).decode() for rank in range(self._size)]
            self._store.set("mapping", process_mapping(domains))
        mapping = bytes(self._store.get("mapping")).decode()
        return mapping if len(mapping) <= MAPPING_LENGTH else None


def memory_domain() -> str:
    """An identifier that is equal for processes that can share memory: same kernel, /dev/shm and PID namespace."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    with contextlib.suppress(OSError):
        parts.append(str(os.stat("/dev/shm").st_dev))
    return "/".join(parts)


def process_mapping(domains: list[str]) -> str:
    """MPICH's notation for the node of every rank, given one domain per rank: "(vector,(node,1,ranks),...)", with one
    entry for consecutive ranks of a node. Nodes are numbered in order of appearance."""
    numbers: dict[str, int] = {}
    runs = [
        f"({numbers.setdefault(domain, len(numbers))},1,{sum(1 for _ in ranks)})"
        for domain, ranks in itertools.groupby(domains)
    ]
    return f"(vector,{','.join(runs)})"


def forget_shared_memory() -> None:
    """Unlink MPICH's shared memory, so that it disappears with the last rank, even if ranks are killed. Call it after
    all ranks have opened it."""
    for path in _find_mapped_library(r"/dev/shm/mpich_shm_\w+"):
        path.unlink(missing_ok=True)


def library() -> ctypes.CDLL:
    """The MPI library that mpi4py loaded into this process. Raises OSError if there is none."""
    for path in _find_mapped_library(r"/.*/libmpi(?:_abi)?\.so[.0-9]*"):
        return ctypes.CDLL(str(path))
    raise OSError("mpi4py has not loaded a libmpi")


def _find_mapped_library(pattern: str) -> set[Path]:
    """The files mapped into this process whose path matches `pattern`."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {Path(found[1]) for line in lines if (found := re.search(rf" ({pattern})$", line))}
