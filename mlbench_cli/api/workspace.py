"""What the objects of the API share: the store of a data folder, engines, and who hears notices."""

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from mlbench_cli.store import Store

if TYPE_CHECKING:
    from mlbench_cli.runs.views import EngineCache

Notice = Callable[[str], None]


class Workspace:
    """A data folder that is open. `home` is the folder; default: as the commands'.

    `notice` gets the sentences that the commands print on stderr.
    """

    def __init__(self, home: Path | None = None, *, notice: Notice | None = None) -> None:
        if home is not None:
            home.mkdir(parents=True, exist_ok=True)
        self.store = Store(home)
        self.notice = notice

    def notify(self, text: str) -> None:
        """Hand a sentence to `notice`."""
        if self.notice is not None:
            self.notice(text)

    def close(self) -> None:
        """Close the store. Nothing of the workspace is used after that."""
        self.store.close()

    @cached_property
    def engine_of(self) -> "EngineCache":
        """A function from a run to the engine that executes it; one engine per cluster."""
        from mlbench_cli.runs.views import EngineCache

        return EngineCache(self.store, self.notice)
