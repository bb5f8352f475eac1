"""What a test needs beyond Python: without it a person's run skips the test, and CI's run fails."""

import importlib
import os
import shutil
from typing import Any, NoReturn

import pytest


def missing(reason: str) -> NoReturn:
    """Skip this test or module; where CI is set, fail: `make test` installs what can be installed."""
    if os.environ.get("CI"):
        pytest.fail(f"{reason}, and CI must have it", pytrace=False)
    pytest.skip(reason, allow_module_level=True)


def needs(name: str, hint: str = "") -> Any:
    """The path of a program, or else a package of this name, imported."""
    if path := shutil.which(name):
        return path
    try:
        return importlib.import_module(name)
    except ImportError as error:
        missing(f"needs {name}{hint and ': '}{hint} ({error})")
