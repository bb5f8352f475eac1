"""Where mlbench keeps its files. `MLBENCH_HOME` moves all of them to one folder."""

import os
from pathlib import Path

import appdirs

from mlbench_cli.errors import UsageError
from mlbench_cli.util.durations import parse_duration

STORE_PATIENCE_SECONDS = 30.0
MAX_STORE_PATIENCE_SECONDS = 3600
UNREACHABLE_VARIABLE = "MLBENCH_UNREACHABLE_TIMEOUT"  # inherited by the processes that start queued runs
UNREACHABLE_SECONDS = 900.0  # longer than an upgrade of a zonal GKE control plane takes


def data_dir() -> Path:
    """The folder of the store and the runs' archives; created if missing."""
    home = os.environ.get("MLBENCH_HOME")
    path = _named_dir(home) if home else _user_dir("user_data_dir")
    if not _is_text(str(path)):
        raise UsageError(f"The name of the data folder {path} is not UTF-8.", hint="Set MLBENCH_HOME to another one.")
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise UsageError(
            f"The data folder {path} cannot be created: {error.strerror}.",
            hint="Set MLBENCH_HOME to a folder that you may write to.",
        ) from None
    return path


def config_dir() -> Path:
    """The folder of user-editable files: remembered answers, price table."""
    home = os.environ.get("MLBENCH_HOME")
    return _named_dir(home) if home else _user_dir("user_config_dir")


def store_patience() -> float:
    """Seconds to wait for a store locked by another process: MLBENCH_STORE_PATIENCE, else 30."""
    text = os.environ.get("MLBENCH_STORE_PATIENCE")
    if not text:
        return STORE_PATIENCE_SECONDS
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= MAX_STORE_PATIENCE_SECONDS:
        raise UsageError(
            f'MLBENCH_STORE_PATIENCE is "{text[:40]}", not a number of seconds from 0 to {MAX_STORE_PATIENCE_SECONDS}.',
            hint="Set it to another one, or unset it.",
        )
    return seconds


def unreachable_timeout() -> float:
    """Seconds without an answer from the cluster after which a command that follows a run gives up.

    MLBENCH_UNREACHABLE_TIMEOUT, else 15 minutes.
    """
    text = os.environ.get(UNREACHABLE_VARIABLE)
    return parse_duration(text, UNREACHABLE_VARIABLE) if text else UNREACHABLE_SECONDS


def set_unreachable_timeout(text: str | None) -> None:
    """Set the value of --unreachable-timeout for this process and its children; None changes nothing."""
    if text is not None:
        parse_duration(text, "--unreachable-timeout")
        os.environ[UNREACHABLE_VARIABLE] = text


def _is_text(name: str) -> bool:
    """Whether a name that the system gave as bytes is valid UTF-8, as the store and JSON need."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _named_dir(home: str) -> Path:
    path = os.path.expanduser(home)
    if path.startswith("~"):
        raise UsageError(f"MLBENCH_HOME is {home[:200]}, and there is no such home folder.", hint="Name a whole path.")
    return Path(path).absolute()


def _user_dir(kind: str) -> Path:
    if os.path.expanduser("~") == "~" and not os.environ.get("XDG_DATA_HOME"):  # nor an entry in passwd
        raise UsageError(
            "This user has no home folder: HOME is not set, and there is no entry for the user in passwd.",
            hint="Set MLBENCH_HOME to a folder that you may write to.",
        )
    return Path(getattr(appdirs, kind)("mlbench", "mlbench"))
