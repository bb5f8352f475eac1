"""Methods by name: those of mlbench, of installed packages, and of files. No torch: the command line imports this."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from task_images.contract import Contract, TaskUsageError
from task_images.methods import FILES
from task_images.methods.base import Method, MethodError

GROUP = "mlbench.methods"
_NAME = re.compile(r"[a-z][a-z0-9-]{0,40}")
_others: dict[str, type[Method]] = {}  # of packages and files


def list_names() -> list[str]:
    """The names of all methods that are known so far."""
    return [*FILES, *_others]


def find_class(name: str) -> type[Method]:
    """The class of a method. Raises MethodError if there is none of this name."""
    if name in FILES:
        return _find_in(importlib.import_module(f"task_images.methods.{FILES[name]}").__dict__, name)
    if name not in _others:
        load_installed(name)
    if name not in _others:
        raise MethodError(f'there is no method "{name}"')
    return _others[name]


def make_method(document: Mapping[str, str], seed: int = 0) -> Method:
    """The method of a document with its name and options, and the file of `--method-path`. Raises MethodError."""
    options = dict(document)
    name, file = options.pop("name", ""), options.pop("file", None)
    if file is not None and name not in _others:
        load_file(file)
    method = find_class(name)(**options)
    method.seed = seed
    return method


def describe(method: Method, file: str | None = None) -> dict[str, str]:
    """The document of a method: its name and all options, with the file it is from."""
    return {"name": method.name, **method.given, **({} if file is None else {"file": file})}


def read_method(contract: Contract) -> Method:
    """The run's method. Raises TaskUsageError if it is invalid."""
    try:
        method = make_method(contract.method, contract.seed)
        method.check(contract.world_size)
    except (MethodError, TypeError) as error:
        raise TaskUsageError(f"MLBENCH_METHOD: {error}", getattr(error, "instead", None)) from None
    return method


def load_file(path: str) -> type[Method]:
    """The method in a file: its one subclass of Method. Raises MethodError."""
    place = Path(path)
    spec = importlib.util.spec_from_file_location(f"mlbench_method_{place.stem}", place)
    if spec is None or spec.loader is None or not place.is_file():
        raise MethodError(f"{path} is not a Python file with a method", "--method-path FILE.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for the names of their annotations
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the file may raise anything
        raise MethodError(f"{path} cannot be loaded: {type(error).__name__}: {error}") from error
    found = [
        item
        for item in vars(module).values()
        if isinstance(item, type) and issubclass(item, Method) and item.__module__ == module.__name__
    ]
    if len(found) != 1:
        raise MethodError(f"{path} has {len(found)} subclasses of Method instead of one")
    return _add(found[0])


def load_installed(name: str = "") -> None:
    """Find the methods of installed packages: the one named `name`, or all. Raises MethodError."""
    # Imported lazily: it takes longer than everything else here.
    for entry in importlib.import_module("importlib.metadata").entry_points(group=GROUP):
        if name in ("", entry.name):
            try:
                _add(entry.load())
            except Exception as error:  # the package may raise anything
                raise MethodError(f"the installed method {entry.name} cannot be loaded: {error}") from error


def _add(found: type[Method]) -> type[Method]:
    if not _NAME.fullmatch(found.name) or set(found.options) & {"name", "file"}:
        raise MethodError(f"the method {found.name!r} or one of its options has a name that cannot be used")
    if found.name in FILES:
        raise MethodError(f'there is a method "{found.name}" already; give yours another name')
    _others[found.name] = found
    return found


def _find_in(module: Mapping[str, object], name: str) -> type[Method]:
    return next(
        item for item in module.values() if isinstance(item, type) and issubclass(item, Method) and item.name == name
    )
