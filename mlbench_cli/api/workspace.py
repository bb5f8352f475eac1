"""What the objects of the API share: the store of a data folder, engines, and the callback for notices."""

from collections.abc import Callable
from functools import cached_property
from pathlib import Path

from mlbench_cli.runs.connect import EnginesByCluster
from mlbench_cli.storage.store import Store

Notice = Callable[[str], None]
API_COMMAND = ("mlbench.api",)  # command line in the provenance of runs that a program starts


class Workspace:
    """A data folder that is open. `home` is the folder; default: as the commands'.

    `notice` gets the sentences that the commands print on stderr. `patience`: seconds to wait for a store that another
    process has locked, before StoreLockedError; default: 30, or what MLBENCH_STORE_PATIENCE says.
    """

    def __init__(
        self, home: Path | str | None = None, *, notice: Notice | None = None, patience: float | None = None
    ) -> None:
        folder = None if home is None else Path(home)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        self.store = Store(folder, notice=notice, patience=patience)
        self.notice = notice

    def notify(self, text: str) -> None:
        """Hand a sentence to `notice`."""
        if self.notice is not None:
            self.notice(text)

    def require_readable(self) -> None:
        """Raise StoreError if a newer mlbench has written the store since it was opened."""
        self.store.require_readable()

    def close(self) -> None:
        """Close the store. Nothing of the workspace is used after that."""
        self.store.close()

    @cached_property
    def engine_of(self) -> EnginesByCluster:
        """A function from a run to the engine that executes it; one engine per cluster."""
        return EnginesByCluster(self.store, self.notice)
