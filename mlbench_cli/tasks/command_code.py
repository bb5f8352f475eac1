"""The code of a command of the user: the files that it names, those that they import or name in turn, and a digest.

Only files of this machine count. The digest is part of the key of comparable runs: two versions of a script are not
repeats of each other.
"""

import ast
import gzip
import hashlib
import io
import json
import os
import re
import shlex
import shutil
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from msgspec import Struct

from mlbench_cli.errors import NotFoundError
from mlbench_cli.util.masking import is_secret_file

FOLDER = "code"  # of an archive
MAX_BYTES = 16 << 20  # of one file that is taken for code; larger ones are data
MAX_FILES = 2000
_SHELLS = ("sh", "bash", "dash", "zsh", "ksh")
_SHELL_LINE, _PYTHON_LINE = re.compile(rb"#!.*\b(?:ba|da|z|k)?sh\b"), re.compile(rb"#!.*\b(?:python[\d.]*|uv)\b")
_OPERATORS = re.compile(r"[;&|()<>`]")
_PYTHONS = re.compile(r"python([23](\.\d+)?)?")
_CHANGE_FOLDER = ("-C", "--chdir", "--cwd", "--directory")  # of env, make, conda, uv, poetry
_TEXT = re.compile(r"-[A-Za-z]*c")  # -c, and "bash -lc"
# Without a file of these kinds, or an executable one, a command has no known code: "my-train --config a.yaml".
_PROGRAMS = (
    *(
        ".bash",
        ".c",
        ".cc",
        ".cpp",
        ".cu",
        ".f90",
        ".go",
        ".ipynb",
        ".jar",
        ".java",
        ".jl",
        ".js",
        ".ksh",
        ".lua",
        ".m",
    ),
    *(".mjs", ".php", ".pl", ".py", ".pyz", ".r", ".rb", ".rs", ".scala", ".sh", ".so", ".ts", ".zsh"),
)
# What a shell or a program writes is not its code, and differs after every run: "> log", "| tee log", "--out a.json".
_WORD = r"(?:\"[^\"]*\"|'[^']*'|[^\s()<>|;&\"']+)"
_REDIRECTED = re.compile(rf"[|(]&?\s*tee(?:[ \t]+{_WORD})*|[\d&]?>{{1,2}}[|&]?[ \t]*{_WORD}")
_OUTPUT = re.compile(
    r"-o|--?(\w+[-_])*(out|output|outfile|logs?|logfile|save|write|dump|results?|report|export|metrics|history|checkpoint"
    r"|ckpt)([-_]\w+)*"
)
_VARIABLE = re.compile(r"^(?:.*[)}]|\$\w+)/")  # "$(dirname "$0")/train.py", "$HERE/train.py"


class CommandCode(Struct, frozen=True):
    """`files`: name in the archive -> path. `digest`: hex SHA-256 of all names and contents."""

    digest: str
    files: dict[str, Path]


def collect_code(argv: Sequence[str], include: Iterable[str] = ()) -> CommandCode | None:
    """The code of a command that runs in the current folder; None if it names none, or only settings.

    Raises NotFoundError for a file of `include` that does not exist.
    """
    folder = Path.cwd()
    found: dict[Path, None] = {}
    own = [os.path.abspath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    roots = [folder, folder / "src", *(Path(entry) for entry in own if Path(entry).is_relative_to(folder))]
    included = list(_included_files(include, folder))
    named = [Path(os.path.abspath(path)) for path in (*_named_files(argv, folder), *included)]
    for path in named:
        # Python looks beside the file that a link means, people beside the link.
        _add(path, (path.resolve().parent, path.parent, *roots), found)
    for name in sorted(_imports_of_text(argv)):
        for path in _module_files(name, folder):
            _add(path, (path.parent, *roots), found)
    if not included and not any(_is_program(path) for path in found):
        return None
    files = _name_files(found, (folder, *(each for path in named for each in (path.parent, path.resolve().parent))))
    sums = "".join(f"{_digest(path)}  {name}\n" for name, path in sorted(files.items()))
    return CommandCode(hashlib.sha256(sums.encode("utf-8", "surrogateescape")).hexdigest(), files)


def copy_code(code: CommandCode, folder: Path) -> None:
    """Put the files into the folder of a run, for its archive. Raises OSError."""
    for name, path in code.files.items():
        target = folder / FOLDER / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)


def pack_code(code: CommandCode) -> bytes:
    """The files as a compressed tar that depends only on their names, contents and whether they are executable. Raises
    OSError."""
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, path in sorted(code.files.items()):
            data, member = path.read_bytes(), tarfile.TarInfo(name)
            member.size, member.mode = len(data), 0o755 if os.access(path, os.X_OK) else 0o644
            archive.addfile(member, io.BytesIO(data))
    return gzip.compress(sink.getvalue(), mtime=0)


def reads_parameters(code: CommandCode | None) -> bool:
    """Whether any of the files may read MLBENCH_PARAMETERS, by which --set reaches a command."""
    words = (b"MLBENCH_PARAMETERS", b"task_images", b"from mlbench import")
    return code is not None and any(word in path.read_bytes() for path in code.files.values() for word in words)


def _named_files(argv: Sequence[str], folder: Path) -> Iterator[Path]:
    words = list(argv)
    for number, word in enumerate(words):
        before = words[number - 1] if number else ""
        if before in ("-m", "--module"):
            yield from _module_files(word, folder)
        elif word.startswith("-m") and _follows_python(words[:number]):
            yield from _module_files(word[2:], folder)
        elif before in _CHANGE_FOLDER and os.path.isdir(folder / word):
            yield from _named_files(["", *words[number + 1 :]], folder / word)
        elif _TEXT.fullmatch(before) and any(os.path.basename(each) in _SHELLS for each in words[:number]):
            try:
                named = ["sh", *shlex.split(_OPERATORS.sub(" ", _REDIRECTED.sub(" ", word)))]
            except ValueError:
                continue
            for place in _folders_of(named, (folder,)):
                yield from _named_files(named, place)
        elif number and os.path.isfile(folder / word / "__main__.py"):  # False for what can be no path, such as a text
            yield from sorted(path for path in (folder / word).rglob("*.py") if _is_code(path))
        elif _is_code(path := folder / word.rpartition("=")[2]) and (number or _is_own_program(word, path, folder)):
            option = word.rpartition("=")[0] or before
            if path.suffix.lower() in _PROGRAMS or not (_OUTPUT.fullmatch(option) or is_secret_file(path.name)):
                yield path


def _follows_python(words: Sequence[str]) -> bool:
    return any(_PYTHONS.fullmatch(os.path.basename(word)) for word in words)


def _folders_of(words: Sequence[str], roots: tuple[Path, ...]) -> Iterable[Path]:
    """The folders in which a shell may look for the files of `words`: `roots`, and those that it may change to."""
    named = (folder for word in words[1:] for root in roots if word and os.path.isdir(folder := root / word))
    return dict.fromkeys((*roots, *named))


def _imports_of_text(argv: Sequence[str]) -> set[str]:
    """The modules that `python -c TEXT` imports."""
    if "-c" not in argv[:-1] or not _follows_python(argv[: list(argv).index("-c")]):
        return set()
    return _imported_names(argv[list(argv).index("-c") + 1])


def _included_files(include: Iterable[str], folder: Path) -> Iterator[Path]:
    for word in include:
        path = folder / os.path.expanduser(word)
        if path.is_dir():
            files = (each for each in path.rglob("*") if _is_code(each) and not is_secret_file(each.name))
            yield from sorted(each for each in files if ".git" not in each.parts)
        elif path.is_file():
            yield path
        else:
            raise NotFoundError(f"--include {word}: there is no such file.")


def _module_files(name: str, folder: Path) -> Iterator[Path]:
    """The files of a module or package below a folder."""
    base = folder.joinpath(*name.split(".")) if name else folder
    if base.is_dir() and name:
        yield from sorted(path for path in base.rglob("*.py") if _is_code(path))
    elif _is_code(base.with_suffix(".py")):
        yield base.with_suffix(".py")


def _add(path: Path, roots: tuple[Path, ...], found: dict[Path, None]) -> None:
    """A file, and the modules that it imports from `roots` or from its own folder, or the files that it names."""
    path = Path(os.path.abspath(path))
    if path in found or len(found) >= MAX_FILES:
        return
    found[path] = None
    texts = _python_texts(path)
    for other in _files_of_shell_script(path, roots) if not texts else ():
        _add(other, (other.parent, *roots), found)
    for other in (root / name for text in texts for name in sorted(_named_scripts(text)) for root in roots):
        if _is_code(other):
            _add(other, (other.parent, *roots), found)
    for name in (name for text in texts for name in sorted(_imported_names(text))):
        parts = name.split(".")
        for length in range(len(parts), 0, -1):
            for folder in dict.fromkeys((*roots, path.parent)):
                for other in _module_files(".".join(parts[:length]), folder):
                    _add(other, roots, found)


def _python_texts(path: Path) -> list[str | bytes]:
    """The Python code in a file: a script, also one without ".py", or the cells of a notebook; empty for others."""
    try:
        with open(path, "rb") as file:
            first = file.readline(512)
            is_python = path.suffix in (".py", ".ipynb") or _PYTHON_LINE.match(first)
            data = first + file.read() if is_python else b""
        if path.suffix != ".ipynb":
            return [data] if is_python else []
        return ["".join(cell["source"]) for cell in json.loads(data)["cells"] if cell["cell_type"] == "code"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return []


def _files_of_shell_script(path: Path, roots: tuple[Path, ...]) -> Iterator[Path]:
    """The files that a shell script names, below `roots` or in a folder that it names."""
    try:
        with open(path, "rb") as file:
            first = file.readline(512)
            is_script = _SHELL_LINE.match(first) or path.suffix.lstrip(".") in _SHELLS
            text = (first + file.read()).decode("utf-8", "replace") if is_script else ""
    except OSError:
        return
    words = ["sh"]
    for line in _REDIRECTED.sub(" ", text.replace("\\\n", " ")).splitlines():
        line = _OPERATORS.sub(" ", line) if "$(" not in line else line
        try:
            words += shlex.split(line, comments=True)
        except ValueError:
            words += line.split()
    words = [word if word.startswith("-") else _VARIABLE.sub("", word) for word in words]
    for folder in _folders_of(words, roots):
        yield from _named_files(words, folder)


def _nodes(text: str | bytes) -> Iterator[ast.AST]:
    try:
        yield from ast.walk(ast.parse(text))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return


def _named_scripts(text: str | bytes) -> set[str]:
    """The programs that a Python file names, for example to start them."""
    texts = (node.value for node in _nodes(text) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return {text for text in texts if text.endswith((".py", ".sh")) and len(text) < 256 and "\0" not in text}


def _imported_names(text: str | bytes) -> set[str]:
    names = set()
    for node in _nodes(text):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = getattr(node.func, "attr", getattr(node.func, "id", None))
            if called in ("import_module", "__import__", "run_module") and isinstance(node.args[0].value, str):
                names.add(node.args[0].value.lstrip("."))
    return {name for name in names if all(part.isidentifier() for part in name.split("."))}


def _name_files(found: Iterable[Path], folders: Sequence[Path]) -> dict[str, Path]:
    """The files by their names below the first of `folders` that has them; others by their last part. Equal for every
    process."""
    files: dict[str, Path] = {}
    for path in sorted(found):
        name = path.relative_to(next((each for each in folders if path.is_relative_to(each)), path.parent)).as_posix()
        if name in files or any(part.startswith(".") for part in name.split("/")):
            name = f"{len(files)}-{path.name.lstrip('.')}"
        files[name] = path
    return files


def _is_own_program(word: str, path: Path, folder: Path) -> bool:
    """Whether the first word of a command is a program of the user, not one on the PATH or of an environment."""
    if "/" not in word or (path.parent.parent / "pyvenv.cfg").exists() or _PYTHONS.fullmatch(path.name):
        return False
    try:
        with open(path, "rb") as file:
            is_script = file.read(2) == b"#!"
    except OSError:
        return False
    return is_script or path.is_relative_to(folder)


def _is_program(path: Path) -> bool:
    return path.suffix.lower() in _PROGRAMS or os.access(path, os.X_OK)


def _is_code(path: Path) -> bool:
    try:
        return path.is_file() and path.stat().st_size <= MAX_BYTES
    except (OSError, ValueError):
        return False


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
