"""A place for encoded text: made once per machine, kept beside the data where that is writable."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from task_images.harness.distributed import World
from task_images.harness.errors import EnvironmentUnfitError


class Cache:
    """Folders below the first of `roots` that can be written. The first rank of a worker builds, the others wait.

    Without `world` the cache is this process's own.
    """

    def __init__(self, roots: Sequence[Path], world: World | None = None) -> None:
        self._roots = roots
        self._world = world

    def folder(self, name: str, inputs: Sequence[Path], facts: object, build: Callable[[Path], None]) -> Path:
        """The folder that `build` filled from `inputs`; built anew when they or `facts` have changed.

        Every rank of `world` must call it. A folder appears only when it is complete.
        """
        place = f"{name}-{_digest(inputs, facts)}"
        found = self._find(place)
        if found is None and (self._world is None or self._world.contract.local_rank == 0):
            self._build(place, build)
        if self._world:
            self._world.barrier()
        found = self._find(place)
        if found is None:
            raise EnvironmentUnfitError(
                f"there is no {place} below {' or '.join(map(str, self._roots))}",
                "The log of this worker's first rank says why.",
            )
        return found

    def _find(self, place: str) -> Path | None:
        return next((root / place for root in self._roots if (root / place).is_dir()), None)

    def _build(self, place: str, build: Callable[[Path], None]) -> None:
        root = self._writable()
        under_way = Path(tempfile.mkdtemp(prefix=f"{place}-", dir=root))
        try:
            build(under_way)
            under_way.chmod(0o755)
            under_way.rename(root / place)
        except OSError:
            # Another machine that shares this folder was faster; if it was anything else, the folder is missing.
            if not (root / place).is_dir():
                raise
        finally:
            shutil.rmtree(under_way, ignore_errors=True)

    def _writable(self) -> Path:
        for root in self._roots:
            try:
                root.mkdir(parents=True, exist_ok=True)
            except OSError:
                continue
            if os.access(root, os.W_OK):
                return root
        raise EnvironmentUnfitError(f"none of {', '.join(map(str, self._roots))} can be written")


def _digest(inputs: Sequence[Path], facts: object) -> str:
    states = []
    for path in inputs:
        try:
            state = path.stat()
        except OSError as error:
            raise EnvironmentUnfitError(f"{path} cannot be read: {error.strerror}") from None
        states.append((path.name, state.st_size, state.st_mtime_ns))
    return hashlib.sha256(repr((states, facts)).encode()).hexdigest()[:16]
