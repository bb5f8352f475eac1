"""The lock of one machine of a run, as its supervisor takes it: the one that runs of `local` take there, too.

A run that needs several machines takes their locks one after the other, in an order that all runs share (that of
`identity`), so that two runs never wait for each other. Standard library only: it runs on the machines of a run.
"""

from __future__ import annotations

import contextlib
import os

from mlbench_cli.engines.local import lock_file, machine

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

# What a plan says of the lock: take it; start beside others; the batch system gives whole nodes; nobody promises that.
TAKE, SHARE, WHOLE_NODES, NO_PROMISE = "take", "share", "whole nodes", "no promise"
_FACTS = {
    SHARE: ("shared", "--share-machine"),
    WHOLE_NODES: ("held", "the batch system gives whole nodes"),
    NO_PROMISE: ("unavailable", "attached with --share-nodes"),
}


class HostLock:
    """`identity` is the same for all supervisors that lock the same file of the same kernel; None: nothing to lock."""

    def __init__(self, mode: str, run: str, seconds: float) -> None:
        self.identity: str | None = None
        self._run, self._seconds = run, seconds
        self._path = lock_file.lock_path() if mode == TAKE else None
        self._descriptor = -1
        self._lock: str
        self._reason: str | None
        self._lock, self._reason = _FACTS.get(mode, ("unavailable", f"{lock_file.VARIABLE}={lock_file.NO_LOCK}"))
        if self._path is None:
            return
        try:
            descriptor = lock_file.open_lock(self._path)
        except OSError as error:
            self._reason = f"{self._path}: {error.strerror or error}"
            return
        found = os.fstat(descriptor)
        os.close(descriptor)
        self.identity = f"{machine.boot_id()}:{found.st_dev}:{found.st_ino}"
        self._reason = "not taken yet"

    @property
    def facts(self) -> tuple[str, str | None]:
        """What `load.LoadMeter` notes: held, shared or unavailable, and the reason if it is not held."""
        return self._lock, self._reason

    def acquire(self) -> bool:
        """Whether this process has the lock now; it keeps it until it ends."""
        if self.identity is None or self._descriptor >= 0:
            return True
        assert self._path is not None
        try:
            descriptor = lock_file.open_lock(self._path)
        except OSError as error:
            self._reason = f"{self._path}: {error.strerror or error}"
            return True
        if not lock_file.try_lock(descriptor, self._path, shared=False):
            os.close(descriptor)
            return False
        lock_file.write_holder(descriptor, self._run, self._seconds)
        self._descriptor = descriptor
        self.mark_held()
        return True

    def mark_held(self) -> None:
        """This supervisor has the lock, or another one of the same run on the same machine."""
        if self.identity is not None:
            self._lock, self._reason = "held", None

    def describe_holder(self) -> str:
        """Who has the lock, as a sentence without its stop."""
        holder = None
        with contextlib.suppress(OSError):
            descriptor = lock_file.open_lock(str(self._path))
            holder = lock_file.read_holder(descriptor)
            os.close(descriptor)
        return holder.phrase if holder else "another run has it"


def order_nodes(identities: Mapping[int, str | None]) -> list[int]:
    """The nodes that take a lock, one for each machine, in the order in which every run takes them."""
    first: dict[str, int] = {}
    for node, identity in sorted(identities.items()):
        if identity is not None:
            first.setdefault(identity, node)
    return [first[identity] for identity in sorted(first)]
