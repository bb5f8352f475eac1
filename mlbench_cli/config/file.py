"""Defaults from environment variables and the config file.

Precedence: flag, spec file (-f), environment, config file, built-in value. The config file is TOML with the keys of
SETTINGS at its top level, each with a text as its value:

    cluster = "gke-4"
    data-dir = "~/data"
    timeout = "2h"
"""

import json
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mlbench_cli.config import settings
from mlbench_cli.errors import NotFoundError, UsageError, did_you_mean
from mlbench_cli.util.durations import parse_duration
from mlbench_cli.util.files import write_atomically
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


def find_setting(key: str) -> Setting:
    """The setting with this name ("_" is the same as "-"). Raises NotFoundError with the nearest key."""
    name = key.replace("_", "-")
    if name not in SETTINGS:
        raise NotFoundError(
            f'There is no setting "{shorten_line(key)}".{did_you_mean(name, list(SETTINGS))}', hint="mlbench config"
        )
    return SETTINGS[name]


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


# --- changes --------------------------------------------------------------------------------------------------------


def set_value(key: str, value: str) -> Default:
    """Write a setting to the config file; comments and other settings are kept."""
    setting = find_setting(key)
    if setting.kind == "folder" and value and not value.startswith("~"):
        value = os.path.abspath(value)
    _check(setting, value, setting.key, absolute=True)
    return _rewrite(setting, value)[setting.key]


def unset_value(key: str) -> bool:
    """Remove a setting from the config file; False if it is not set there."""
    setting = find_setting(key)
    if setting.key not in read_config():
        return False
    _rewrite(setting, None)
    return True


def _rewrite(setting: Setting, value: str | None) -> dict[str, Default]:
    """Replace, add or (None) remove the line of one setting; returns the new settings."""
    key, path = setting.key, config_file()
    text = _read(path) or ""
    before = parse_config(text, path)
    lines = text.splitlines()
    number = _line_of(text, key) if key in before else None
    entry = [] if value is None else [f"{key} = {json.dumps(value, ensure_ascii=False)}"]
    if number is None:
        lines += entry
    else:
        lines[number - 1 : number] = entry
    changed = "".join(line + "\n" for line in lines)
    wanted = {name: default.value for name, default in before.items() if name != key}
    if value is not None:
        wanted[key] = _check(setting, value, key)
    after: dict[str, Default] | None
    try:
        after = parse_config(changed, path)
    except UsageError:  # a value that continues on further lines
        after = None
    if after is None or {name: default.value for name, default in after.items()} != wanted:
        raise UsageError(f"{path}: the line of {key} cannot be replaced safely.", hint=_edit_hint(path))
    _write(path, changed)
    return after


def _write(path: Path, text: str) -> None:
    try:
        target = path.resolve()  # keep symbolic links, e.g. into a repository of dot files
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomically(target, text.encode())
    except OSError as error:
        raise UsageError(
            f"The config file {path} cannot be written: {error.strerror}.", hint="Fix its permissions."
        ) from None


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
        raise UsageError(f'{origin}: "{shown}" is not a {setting.kind}.', hint=f"mlbench config unset {setting.key}")
    if setting.kind == "duration":
        if parse_duration(value, f"{origin}:") <= 0:
            raise UsageError(f'{origin}: "{shown}" must be above 0.', hint="Write 90s, 15m, 2h or 1h30m.")
    elif setting.kind == "name" and not _LABEL.fullmatch(value):
        raise UsageError(
            f'{origin}: "{shown}" is not a name for a {setting.key} (a-z, 0-9 and "-").', hint="mlbench config"
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
