"""The name of the distribution, and the command that installs one of its extras."""

import os
import sys

# The name on the package index. The command, the packages and the state folder are named "mlbench".
DISTRIBUTION = "mlbench-cli"


def install_hint(extra: str, *, upgrade: bool = False) -> str:
    """The command line that installs `extra` (a key of optional-dependencies in pyproject.toml) for this program.

    Tools installed by uv or pipx are recognized by a file in their environment; pip does not work there.
    """
    requirement = f"'{DISTRIBUTION}[{extra}]'"
    if os.path.exists(os.path.join(sys.prefix, "uv-receipt.toml")):
        return f"uv tool install {'--upgrade ' if upgrade else ''}{requirement}"
    if os.path.exists(os.path.join(sys.prefix, "pipx_metadata.json")):
        return f"pipx install --force {requirement}"
    return f"pip install {'--upgrade ' if upgrade else ''}{requirement}"
