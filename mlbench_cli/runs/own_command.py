"""The user's own command: split it into words, find its interpreter, and reject what cannot work without a shell."""

import glob
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from mlbench_cli.errors import UsageError
from mlbench_cli.util.files import read_regular
from mlbench_cli.util.text import shorten

TIMEOUT = 4 * 3600.0  # seconds; a hang must not last a day
MAX_SCRIPT = 1 << 16  # bytes; longer files are no scripts
_TEE, _CHECKED = re.compile(r"(?<!\|)\|&?\s*tee\b"), re.compile(r"pipefail|PIPESTATUS")
_TORCHRUN = re.compile(r"\btorchrun\b|\btorch\.distributed\.(run|launch)\b")
_NODES = re.compile(r"--nnodes[\s=]+(?!1(?![\d:]))")
_SHELL_LINE = re.compile(r"#!.*sh\b")
_OPERATORS = "&|;<>()\n"
_BACKGROUND = re.compile(r"(?<!&)&\s*$")
_VARIABLE = re.compile(r"\$[\w{(@*#?$!-]|`", re.ASCII)
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
# Words that only a shell knows, if a command begins with them.
_BUILTINS = (
    *("!", ".", ":", "alias", "case", "cd", "eval", "exec", "export", "for", "function", "if", "let", "module", "set"),
    *("shopt", "source", "trap", "ulimit", "umask", "unset", "until", "while", "{"),
)
_SHELLS = ("sh", "bash", "dash", "zsh", "ksh", "fish")
_PYTHONS = re.compile(r"python([23](\.\d+)?)?")
# A quoted part (group 1), or the end of a line that goes on in the next one.
_CONTINUED = re.compile(r"""('[^']*'|"(?:[^"\\]|\\.)*"|\\[^\r\n])|\\\r?\n""", re.DOTALL)


def split_command(command: str) -> tuple[str, ...]:
    """The words of a command, as a shell would split them. Raises UsageError for what only a shell could do."""
    command = _CONTINUED.sub(lambda part: part[1] or "", command.strip())
    try:
        words = tuple(shlex.split(command))
    except ValueError as error:
        raise UsageError(f"--command {shorten(repr(command))} cannot be split into words: {error}.") from None
    is_shell = any(os.path.basename(word) in _SHELLS for word in words)  # also in "timeout 60 sh -c ..."
    if (found := _find_shell_syntax(command, is_shell)) is not None:
        # Not sh: dash knows no "source", and no functions of the environment, such as "module".
        shell = "bash -o pipefail" if "|" in command else "bash"
        hint = f"--command {shlex.quote(f'{shell} -c {shlex.quote(command)}')}"
        if _BACKGROUND.search(command):  # a run ends with its command, and ends what that has started
            hint = "Leave out the &, and add --detach: the run continues in the background."
        raise UsageError(f"--command is not run by a shell, so {found} has no effect.", hint=hint)
    return words


def hides_failures(argv: Sequence[str]) -> bool:
    """Whether a command, or a shell script that it names, has a pipe into tee, whose exit code is 0 whatever failed."""
    return any(_TEE.search(text) and not _CHECKED.search(" ".join(argv) + text) for text in _texts(argv))


def ends_early(argv: Sequence[str]) -> bool:
    """Whether a command, or a shell script that it names, ends with a program in the background: it waits for none."""
    return any(_BACKGROUND.search(text) for text in _texts(argv))


def trains_separately(argv: Sequence[str]) -> bool:
    """Whether a command, or a shell script that it names, starts torchrun for one node: each worker trains alone."""
    return any(_TORCHRUN.search(text) and not _NODES.search(text) for text in _texts(argv))


def _texts(argv: Sequence[str]) -> Iterator[str]:
    """A command, and the shell scripts that it names."""
    yield " ".join(argv)
    for word in argv:
        with suppress(OSError, ValueError):
            text = read_regular(Path(word), MAX_SCRIPT).decode("utf-8", "replace")
            if word.endswith("sh") or _SHELL_LINE.match(text):
                yield text


def _matches_files(pattern: str) -> bool:
    """Whether a shell would replace the word by names of files here. "?" and "[1,2]" often mean themselves."""
    return not os.path.lexists(pattern) and bool(glob.glob(pattern))


def _find_shell_syntax(command: str, is_shell: bool) -> str | None:
    """The part of a command that only a shell understands, quoted; None if there is none."""
    if _ASSIGNMENT.match(command.lstrip()):
        return f'the assignment "{shorten(command.split()[0])}"'
    if command.split(maxsplit=1)[:1] and (first := command.split()[0]) in _BUILTINS:
        return f'the shell\'s own "{first}"'
    quote, position, starts_word = "", 0, True
    word = 0  # where the current word begins
    while position < len(command):
        char = command[position]
        if quote == "'":
            quote = "" if char == "'" else quote
        elif char == "\\":
            position += 1
        elif char == '"':
            quote = "" if quote else '"'
        elif _VARIABLE.match(command, position) and not (quote and is_shell):
            return f'"{command[position : position + 20].split()[0].rstrip(chr(34))}"'
        elif quote:
            pass
        elif char == "$" and command[position + 1 : position + 2] in ("'", '"'):
            return f'"{command[position:].split()[0]}"'
        elif char == "'":
            quote = "'"
        elif char in _OPERATORS:
            run = command[position : position + 2]
            return f'"{run if run in ("&&", "||", ">>", "<<") else char.replace(chr(10), "a line break")}"'
        elif char == "*" or (char in "~#" and starts_word):
            return f'"{command[position:].split()[0]}"'
        elif char in "?[" and (pattern := command[word:].split()[0]) and _matches_files(pattern):
            return f'the pattern "{pattern}"'
        starts_word = char.isspace()
        word = position + 1 if starts_word else word
        position += 1
    return None


def _scripts(argv: tuple[str, ...]) -> list[str]:
    """The words of a command that look like scripts, whether they exist or not."""
    return [word for word in argv[1:] if word.endswith((".py", ".sh")) and not word.startswith("-")]


def relative_scripts(argv: tuple[str, ...]) -> list[str]:
    """The scripts of this machine that a command names without saying in which folder they are."""
    return [word for word in _scripts(argv) if not os.path.isabs(word) and os.path.isfile(word)]


def check_scripts_of_pods(argv: tuple[str, ...]) -> None:
    """Reject scripts that pods would not have: they get files below this folder. Raises UsageError."""
    for word in _scripts(argv):
        path = Path(word)
        is_below = not path.is_absolute() and ".." not in path.parts
        if is_below == path.is_file():
            continue
        if is_below:
            raise UsageError(
                f"There is no file {word} in this folder, whose files the workers get.",
                hint="Change to its folder, or name an image that has it: --image NAME:TAG",
            )
        raise UsageError(
            f"Workers get files below this folder, and {word} is not.",
            hint=f"cd {shlex.quote(str(path.resolve().parent))}, and name it {path.name} in --command",
        )


def find_interpreter(argv: tuple[str, ...]) -> str | None:
    """The Python that a command starts, or a program that only mlbench's own environment has; None for others."""
    if not argv:
        return None
    found = shutil.which(argv[0])
    if found is None:
        return shutil.which(argv[0], path=_own_folder())
    return found if _PYTHONS.fullmatch(os.path.basename(argv[0])) else None


def _own_folder() -> str:
    """The folder of mlbench's own Python, which the agent adds to the end of the PATH."""
    return os.path.dirname(sys.executable)


def check_scripts(argv: tuple[str, ...]) -> None:
    """Reject programs and scripts on this machine that no operating system could start. Raises UsageError that names
    the file."""
    searched = os.pathsep.join((os.environ.get("PATH", os.defpath), _own_folder()))
    if argv and argv[0] and "{" not in argv[0] and shutil.which(argv[0], path=searched) is None:
        if os.path.isfile(argv[0]) and not os.access(argv[0], os.X_OK):
            raise UsageError(f"{argv[0]} is not executable.", hint=f"chmod +x {shlex.quote(argv[0])}")
        where = "" if "/" in argv[0] else " on the PATH"
        hint = "Correct the name, or activate the environment that has it."
        if os.path.isfile(argv[0]):
            hint = f"For the file of this folder: --command {shlex.quote(shlex.join((f'./{argv[0]}', *argv[1:])))}"
        raise UsageError(f'There is no program "{shorten(argv[0])}"{where}.', hint=hint)
    for number, word in enumerate(argv):
        path = Path(shutil.which(word) or word) if number == 0 else Path(word)
        try:
            with open(path, "rb") as file:
                line = file.readline(512)
                is_text = b"\0" not in line and b"\0" not in file.read(4096)
        except (OSError, ValueError):
            continue
        if number == 0 and is_text and not line.startswith(b"#!"):
            is_marked = line.startswith(b"\xef\xbb\xbf#!")
            runs_it = "python" if path.suffix == ".py" else "sh"
            raise UsageError(
                f"{word} begins with a byte order mark, not with #!, so no system can start it."
                if is_marked
                else f"{word} has no first line that names its program, such as #!/usr/bin/env {runs_it}.",
                hint=f"sed -i '1s/^\\xEF\\xBB\\xBF//' {shlex.quote(str(path))}"
                if is_marked
                else f"--command {shlex.quote(f'{runs_it} {word}')}",
            )
        is_script = line.startswith(b"#!") and number == 0
        is_for_shell = number == 1 and os.path.basename(argv[0]) in _SHELLS
        if line.endswith(b"\r\n") and (is_script or is_for_shell):
            raise UsageError(
                f"{word} has Windows line ends (CRLF), so its first line names no program.",
                hint=f"sed -i 's/\\r$//' {shlex.quote(str(path))}",
            )
        program = line[2:].decode("utf-8", "replace").split()[:1] if is_script else []
        if program and program[0].startswith("/") and not os.path.exists(program[0]):
            raise UsageError(
                f'The first line of {word} names the program "{shorten(program[0])}", which does not exist.',
                hint=f"--command 'sh {word}', or correct the line",
            )
