"""Checks packages that only the translation tasks need at the start, not after hours of training."""

import importlib.util

from task_images.harness.errors import EnvironmentUnfitError, install_hint


def need(*packages: str) -> None:
    """Raises EnvironmentUnfitError naming the first of `packages` that is not installed."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise EnvironmentUnfitError(f"the package {package} is not installed", install_hint("language"))
