"""The name of the distribution, and the command that installs one of its extras."""

import json
import os
import sys
from pathlib import Path

# The name on the package index. The command, the packages and the state folder are named "mlbench".
DISTRIBUTION = "mlbench-cli"


def install_hint(extra: str, *, upgrade: bool = False) -> str:
    """The command line that installs `extra` (a key of optional-dependencies in pyproject.toml) for this program.

    Tools installed by uv or pipx are recognized by a file in their environment; pip does not work there. If pip
    installed the program from a checkout, the extra comes from there, too: the package may be on no index.
    """
    checkout = find_checkout(Path(__file__).parents[2])
    requirement = f"'{checkout or DISTRIBUTION}[{extra}]'"
    if os.path.exists(os.path.join(sys.prefix, "uv-receipt.toml")):
        return f"uv tool install {'--upgrade ' if upgrade else ''}{requirement}"
    if os.path.exists(os.path.join(sys.prefix, "pipx_metadata.json")):
        return f"pipx install --force {requirement}"
    return f"pip install {'--upgrade ' if upgrade else ''}{requirement}"


def find_checkout(site: Path) -> str | None:
    """The folder from which pip installed this program into `site` (direct_url.json of PEP 610); None if it came from
    elsewhere, or the folder is gone."""
    for record in site.glob("mlbench_cli-*.dist-info/direct_url.json"):
        source = json.loads(record.read_text("utf-8"))
        folder = str(source.get("url", "")).removeprefix("file://")
        if "dir_info" in source and "%" not in folder and os.path.exists(os.path.join(folder, "pyproject.toml")):
            return folder
    return None
