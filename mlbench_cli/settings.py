"""Where things are kept. `MLBENCH_HOME` moves all of it to one folder (tests and CI use that)."""

import os
from pathlib import Path

from mlbench_cli.errors import UsageError


def data_dir() -> Path:
    """The folder of the store and of the runs' archives, made if need be."""
    home = os.environ.get("MLBENCH_HOME")
    path = Path(home).expanduser().absolute() if home else _user_dir("user_data_dir")
    if not _is_text(str(path)):
        raise UsageError(
            f"The name of the data directory {path} is not UTF-8.", hint="Set MLBENCH_HOME to another one."
        )
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise UsageError(
            f"The data directory {path} cannot be made: {error.strerror}.",
            hint="Set MLBENCH_HOME to a folder that you may write to.",
        ) from None
    return path


def config_dir() -> Path:
    """The folder of what a person may edit: remembered answers, price table."""
    home = os.environ.get("MLBENCH_HOME")
    return Path(home).expanduser().absolute() if home else _user_dir("user_config_dir")


def runs_dir() -> Path:
    """The folder of all runs' folders."""
    return data_dir() / "runs"


def _is_text(name: str) -> bool:
    """Whether a name that came as bytes is text, as the store and JSON want it."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _user_dir(kind: str) -> Path:
    import appdirs

    return Path(getattr(appdirs, kind)("mlbench", "mlbench"))
