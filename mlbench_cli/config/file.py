"""Defaults from environment variables and the config file.

Precedence: flag, spec file (-f), environment, config file, built-in value. The config file is TOML with the keys of
SETTINGS at its top level, each with a text as its value:

    cluster = "gke-4"
    data-dir = "~/data"
    timeout = "2h"
"""

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mlbench_cli.config import settings
from mlbench_cli.errors import UsageError, did_you_mean
from mlbench_cli.util.durations import parse_duration
from mlbench_cli.util.text import shorten_line

MAX_VALUE = 500  # characters
_LABEL = re.compile(r"[a-z0-9](?:[-a-z0-9.]{0,61}[a-z0-9])?")
_PREFIX = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]*")


class Setting(NamedTuple):
    """One key of the config file; `built_in` is its default value.

    `kind` is name, folder, prefix, duration or command.
    """

    key: str
    kind: str
    help: str
    built_in: str

    @property
    def variable(self) -> str:
        """The environment variable of the setting, for example MLBENCH_CLUSTER."""
        return "MLBENCH_" + self.key.upper().replace("-", "_")


SETTINGS = {
    setting.key: setting
    for setting in (
        Setting("cluster", "name", "cluster to run on", "the cluster chosen with set-cluster, else local"),
        Setting("data-dir", "folder", "folder with the data sets, for runs on this machine", "none"),
        Setting("registry", "prefix", "default prefix of the task images, for clusters without their own", "none"),
        Setting("namespace", "name", "default Kubernetes namespace, for clusters without their own", "default"),
        Setting("timeout", "duration", "time limit of a run", "24h"),
    )
}


class Default(NamedTuple):
    """The value of a setting. `source` is environment or config; `origin` names the variable, or file and line."""

    value: str
    source: str
    origin: str


def config_file() -> Path:
    """The user's config file; it need not exist."""
    return settings.config_dir() / "config.toml"


def find_default(key: str) -> Default | None:
    """The checked value of a setting from the environment or the config file. Raises UsageError naming its origin."""
    return from_environment(key) or read_config().get(key)


def from_environment(key: str) -> Default | None:
    """The value of the setting's variable; an empty variable counts as unset."""
    setting = SETTINGS[key]
    value = os.environ.get(setting.variable, "")
    if not value:
        return None
    return Default(_check(setting, value, setting.variable), "environment", setting.variable)


def read_config() -> dict[str, Default]:
    """The settings in the config file, by key; none if there is no file.

    Raises UsageError with file and line for unknown keys, wrong types and invalid TOML.
    """
    path = config_file()
    text = _read(path)
    return {} if text is None else parse_config(text, path)


def parse_config(text: str, path: Path) -> dict[str, Default]:
    """Like `read_config`, for the text of a file."""
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not valid TOML: {shorten_line(error, 200)}.", hint=_edit_hint(path)) from None
    found: dict[str, Default] = {}
    for raw, value in data.items():
        key = raw.replace("_", "-")
        origin = _origin(text, raw, path)
        if key not in SETTINGS:
            near = did_you_mean(key, list(SETTINGS))
            raise UsageError(
                f'{origin}: unknown key "{shorten_line(raw)}".{near}', hint=f"Known keys: {', '.join(SETTINGS)}"
            )
        if key in found:
            raise UsageError(f'{origin}: "{key}" is given twice, with "-" and with "_".', hint=_edit_hint(path))
        setting = SETTINGS[key]
        found[key] = Default(_check(setting, _as_text(setting, value, origin), origin, absolute=True), "config", origin)
    return found


# --- checks ---------------------------------------------------------------------------------------------------------


def _as_text(setting: Setting, value: Any, origin: str) -> str:
    if isinstance(value, str):
        return value
    if setting.kind == "duration" and isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return str(value)
    kinds: Mapping[type, str] = {bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "a table"}
    raise UsageError(
        f'{origin}: "{setting.key}" is {kinds.get(type(value), "a date or time")}, not a text.',
        hint=f'Write {setting.key} = "…"',
    )


def _check(setting: Setting, value: str, origin: str, *, absolute: bool = False) -> str:
    """The value, with "~" expanded. Raises UsageError that names `origin`."""
    shown = shorten_line(value)
    if not value.strip() or not value.isprintable() or len(value) > MAX_VALUE:
        raise UsageError(f'{origin}: "{shown}" is not a {setting.kind}.', hint="mlbench help defaults")
    if setting.kind == "duration":
        if parse_duration(value, f"{origin}:") <= 0:
            raise UsageError(f'{origin}: "{shown}" must be above 0.', hint="Write 90s, 15m, 2h or 1h30m.")
    elif setting.kind == "name" and not _LABEL.fullmatch(value):
        raise UsageError(
            f'{origin}: "{shown}" is not a name for a {setting.key} (a-z, 0-9 and "-").', hint="mlbench help defaults"
        )
    elif setting.kind == "prefix" and not _PREFIX.fullmatch(value):
        raise UsageError(f'{origin}: "{shown}" is not an image prefix.', hint="Write it like ghcr.io/me")
    elif setting.kind == "folder":
        path = os.path.expanduser(value)
        if absolute and not os.path.isabs(path):
            raise UsageError(f'{origin}: "{shown}" is not an absolute path.', hint="Begin it with / or ~/")
        return path
    return value


def _read(path: Path) -> str | None:
    try:
        return path.read_text("utf-8")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(
            f"The config file {path} cannot be read: {error.strerror}.", hint="Fix its permissions, or move it away."
        ) from None
    except ValueError:
        raise UsageError(f"The config file {path} is not UTF-8.", hint=_edit_hint(path)) from None


def _line_of(text: str, key: str) -> int | None:
    """The number of the first line that assigns the key or starts a table with its name."""
    name = re.escape(key).replace("\\-", "[-_]")
    pattern = re.compile(rf"\s*\[*\s*[\"']?{name}[\"']?\s*(?:[=.\]]|$)")
    return next((number for number, line in enumerate(text.splitlines(), 1) if pattern.match(line)), None)


def _origin(text: str, key: str, path: Path) -> str:
    number = _line_of(text, key)
    return str(path) if number is None else f"{path}, line {number}"


def _edit_hint(path: Path) -> str:
    return f"Edit {path}"
