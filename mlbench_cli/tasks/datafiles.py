"""The files that a task reads from the data folder, as its `TASK` lists them, and which are missing.

files:                              # a task without it needs no files
  when: {data: imagenet}            # parameter values for which the files are read; a list for several
  folders: [., imagenet]            # searched, relative to the data folder
  wanted: [[train, train.tar], [val]]   # one file or folder of each list; * matches anything
  download: 170 MB                  # size that the task itself downloads if they are missing; default: nothing
  imports: [train.txt]              # further files that --import accepts and the preparation converts
  default_folder: true              # without --data-dir, search mlbench's cache
  instead: --set data=fake          # how to run the task without them
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mlbench_cli.errors import UsageError, did_you_mean

_KEYS = ("when", "folders", "wanted", "imports", "download", "default_folder", "instead")


class DataFiles(NamedTuple):
    """The data files of a task. `download` is the size that it downloads itself, None for no download."""

    when: Mapping[str, Any]
    folders: tuple[str, ...]
    wanted: tuple[tuple[str, ...], ...]
    instead: str
    download: str | None = None
    default_folder: bool = False
    imports: tuple[str, ...] = ()

    def are_read(self, parameters: Mapping[str, Any]) -> bool:
        """Whether a run with these parameters reads the files."""
        return all(
            parameters.get(name) in (value if isinstance(value, list) else [value]) for name, value in self.when.items()
        )

    def list_missing(self, data_dir: str | None) -> list[str]:
        """What is missing, one text per file with its alternatives: "train (or train.tar)"."""
        places = self._places(data_dir)
        return [
            names[0] + (f" (or {' or '.join(names[1:])})" if len(names) > 1 else "")
            for names in self.wanted
            if not any(any(place.glob(name)) for place in places for name in names)
        ]

    def _places(self, data_dir: str | None) -> list[Path]:
        if data_dir is not None:
            return [Path(data_dir, folder) for folder in self.folders]
        if not self.default_folder:
            return []
        cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "mlbench", "datasets")
        return [cache / folder for folder in self.folders]


def parse_data_files(where: str, entry: Any) -> DataFiles:
    """The value of the key `files`. Raises UsageError that names `where` and the key."""
    if not isinstance(entry, dict):
        raise UsageError(f'{where}: "files" is not a mapping.')
    for key in entry:
        if key not in _KEYS:
            raise UsageError(f'{where}: unknown key {key!r} in "files".{did_you_mean(str(key), list(_KEYS))}')
    when = entry.get("when", {})
    if not isinstance(when, dict) or not all(isinstance(name, str) for name in when):
        raise UsageError(f'{where}: "files.when" is not a mapping of parameters to values.')
    wanted = entry.get("wanted")
    if not isinstance(wanted, list) or not wanted or not all(_are_texts(names) for names in wanted):
        raise UsageError(f'{where}: "files.wanted" is not a list of lists of file names.')
    folders = entry.get("folders", ["."])
    if not _are_texts(folders):
        raise UsageError(f'{where}: "files.folders" is not a list of folders.')
    imports = entry.get("imports", [])
    if imports and not _are_texts(imports):
        raise UsageError(f'{where}: "files.imports" is not a list of file names.')
    instead, download = entry.get("instead"), entry.get("download")
    if not isinstance(instead, str) or not isinstance(download, str | None):
        raise UsageError(f'{where}: "files.instead" and "files.download" are texts; "instead" is required.')
    return DataFiles(
        when=when,
        folders=tuple(folders),
        wanted=tuple(tuple(names) for names in wanted),
        instead=instead,
        download=download,
        default_folder=entry.get("default_folder") is True,
        imports=tuple(imports),
    )


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, str) and item for item in value)
