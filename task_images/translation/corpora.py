"""Parallel text from the archives of the WMT conferences: concatenated training parts, test sets extracted from
SGML."""

import re
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, NamedTuple

from task_images.cache import Say
from task_images.contract import EnvironmentUnfitError

LANGUAGES = ("en", "de")
_SEGMENT = re.compile(rb"<seg[^>]*>(.*?)</seg>")


class Part(NamedTuple):
    """A file of an archive in both languages, by base name; .sgm files contain text in segments."""

    archive: str
    names: tuple[str, str]  # English, German


def join_parts(folder: Path, parts: Sequence[Part], out: Path, name: str, say: Say) -> None:
    """Write out/NAME.en and out/NAME.de: the concatenated parts. Both appear only when complete.

    Raises EnvironmentUnfitError for an archive that is damaged, lacks a file, or whose sides differ in length.
    """
    out.mkdir(parents=True, exist_ok=True)
    targets = [out / f"{name}.{language}" for language in LANGUAGES]
    if all(target.is_file() for target in targets):
        return
    copies = [target.with_name(f".{target.name}.part") for target in targets]
    with ExitStack() as stack:
        files = [stack.enter_context(open(copy, "wb")) for copy in copies]
        for part in parts:
            counts = _add(folder / part.archive, part.names, files)
            if len(set(counts)) > 1 or not counts[0]:
                raise EnvironmentUnfitError(
                    f"{part.archive}: {part.names[0]} has {counts[0]} lines and {part.names[1]} has {counts[1]}",
                    f"Delete {folder / part.archive} and prepare the data again.",
                )
            say(f"{name}: {counts[0]} pairs of {part.names[0]}")
    for copy, target in zip(copies, targets, strict=True):
        copy.replace(target)


def _add(archive: Path, names: tuple[str, str], files: Sequence[IO[bytes]]) -> list[int]:
    """Append the two files of an archive; returns the number of lines of each."""
    counts: dict[str, int] = {}
    try:
        with tarfile.open(archive, "r:*") as packed:
            for member in packed:
                base = Path(member.name).name
                if base in names and base not in counts and member.isfile():
                    source = packed.extractfile(member)
                    assert source is not None
                    counts[base] = _copy(source, base, files[names.index(base)])
    except (tarfile.TarError, EOFError, OSError) as error:
        raise EnvironmentUnfitError(
            f"{archive} cannot be read: {error}", "Delete the file and prepare the data again."
        ) from None
    missing = [name for name in names if name not in counts]
    if missing:
        raise EnvironmentUnfitError(f"{archive} has no {missing[0]}", "Delete the file and prepare the data again.")
    return [counts[name] for name in names]


def _copy(source: IO[bytes], name: str, target: IO[bytes]) -> int:
    count = 0
    for line in _segments(source) if name.endswith(".sgm") else source:
        target.write(line.rstrip(b"\r\n") + b"\n")
        count += 1
    return count


def _segments(source: IO[bytes]) -> Iterator[bytes]:
    for line in source:
        if match := _SEGMENT.search(line):
            yield match[1].strip()
