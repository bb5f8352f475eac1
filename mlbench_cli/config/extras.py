"""Libraries that are loaded when they are needed, because they are large or come with an extra of the distribution."""

import json
import os
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from mlbench_cli.errors import UsageError

# The name on the package index. The command, the packages and the state folder are named "mlbench".
DISTRIBUTION = "mlbench-cli"


def load_library(name: str, extra: str, details: Mapping[str, Any] | None = None) -> Any:
    """A module of a library that is too large to be imported by every command, or comes with `extra`.

    Raises UsageError (with `details`) that names the module and the command that installs it. All other modules are
    imported at the top of a file.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        problem = f"This needs the Python module {error.name}, which is not installed."
    except ImportError as error:
        problem = f"The Python module {name} cannot be imported: {error}."
    raise UsageError(problem, hint=install_hint(extra), details=details)


def install_hint(extra: str, *, upgrade: bool = False) -> str:
    """The command line that installs `extra` (a key of optional-dependencies in pyproject.toml) for this program.

    Tools installed by uv or pipx are recognized by a file in their environment; pip does not work there. The extra
    comes from where the program came from: a folder, a file or a repository may be the only place that has it.
    """
    requirement = f"'{find_requirement(Path(__file__).parents[2], extra)}'"
    if os.path.exists(os.path.join(sys.prefix, "uv-receipt.toml")):
        return f"uv tool install {'--upgrade ' if upgrade else ''}{requirement}"
    if os.path.exists(os.path.join(sys.prefix, "pipx_metadata.json")):
        return f"pipx install --force {requirement}"
    return f"pip install {'--upgrade ' if upgrade else ''}{requirement}"


def find_requirement(site: Path, extra: str) -> str:
    """What pip installed into `site` as this program, with an extra. direct_url.json (PEP 610) names a folder, a file
    or a repository; a program without that file came from an index."""
    for record in site.glob("mlbench_cli-*.dist-info/direct_url.json"):
        source = json.loads(record.read_text("utf-8"))
        url = str(source.get("url", ""))
        if "dir_info" not in source:
            scheme = f"{source['vcs_info']['vcs']}+" if "vcs_info" in source else ""
            return f"{DISTRIBUTION}[{extra}] @ {scheme}{url}"
        folder = url.removeprefix("file://")
        known = "%" not in folder and os.path.exists(os.path.join(folder, "pyproject.toml"))
        return f"{folder if known else 'CHECKOUT'}[{extra}]"
    is_checkout = (site / "pyproject.toml").exists()  # installed with -e
    return f"{site if is_checkout else DISTRIBUTION}[{extra}]"
