"""Find and mask secrets in command lines, so that results do not contain them.

Secrets are recognized by name (`--api-key`, `HF_TOKEN=`) and by the formats of well-known keys. `--max-tokens 100` and
`--tokenizer gpt2` are not secrets, and neither are references (`$KEY`, the path of a file).
"""

import re
import shlex
from collections.abc import Iterator, Sequence

from mlbench_cli.errors import UsageError

MASK = "***"

_VARIABLE = re.compile(r"TOKEN(?!I[SZ])|SECRET|PASSW|CREDENTIAL|PRIVATE|API_?KEY|ACCESS_?KEY", re.IGNORECASE)
_OPTION = re.compile(
    r"(^|[-_.])((api|access|auth|secret|private|account|wandb|hf|hub|github|gitlab|bearer|refresh)[-_]?(key|token)"
    r"|secret|passw(or)?d|passphrase|credentials?|bearer)$|^token$",
    re.IGNORECASE,
)
_VALUE = re.compile(
    r"\b(AKIA[0-9A-Z]{16}|gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{20,}|hf_\w{20,}|sk-[\w-]{20,}"
    r"|xox[abprs]-[\w-]{10,}|AIza[\w-]{30,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{5,})"
    r"|(?<=://)[^/\s:@]*:[^/\s@]+(?=@)"
)
_FILE = re.compile(
    r"\.env.*|.+\.env|\.netrc|(credentials|secrets?)(\.(json|ya?ml|toml|ini|cfg|txt))?|.+\.(pem|key)"
    r"|id_(rsa|dsa|ecdsa|ed25519)",
    re.IGNORECASE,
)
_ASSIGNMENT = re.compile(r"(-{0,2}[A-Za-z_][\w.-]*)=(.*)", re.DOTALL)


def is_secret_variable(name: str) -> bool:
    """Whether an environment variable with this name usually holds a secret."""
    return _VARIABLE.search(name) is not None


def is_secret_file(name: str) -> bool:
    """Whether a file with this name usually holds secrets, such as `.env`."""
    return _FILE.fullmatch(name) is not None


def mask_words(words: Sequence[str]) -> tuple[str, ...]:
    """A command line with secrets replaced by MASK, including those in nested commands (`sh -c '...'`)."""
    return tuple(masked for _, masked in _mask(words))


def find_secret(words: Sequence[str]) -> str | None:
    """The name of the option or variable that looks like a secret; None if there is none."""
    for word, masked in _mask(words):
        if word == masked:
            continue
        inner = _split(word)
        if len(inner) > 1:
            return find_secret(inner)
        name = _ASSIGNMENT.fullmatch(word)
        return name[1] if name else _before(words, word) or "a word"
    return None


def refuse_secrets(words: Sequence[str], option: str) -> None:
    """Raise UsageError if the value of `option` contains a secret: the value is executed, so it cannot be masked."""
    found = find_secret(words)
    if found is not None:
        raise UsageError(
            f"{option}: {found[:60]} looks like a secret, but the value of {option} is stored in the results.",
            hint="Pass it in an environment variable: ranks here inherit yours; on a cluster, put it into a Kubernetes "
            "Secret, and name that in --pod-patch.",
        )


def _before(words: Sequence[str], word: str) -> str | None:
    """The option that `word` is the value of."""
    index = list(words).index(word)
    return words[index - 1] if index and _is_secret_option(words[index - 1]) else None


def _mask(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each word with its masked form."""
    is_value = False  # of a secret option, as in `--token VALUE`
    for word in words:
        yield word, MASK if is_value and _is_literal(word) and not word.startswith("-") else _mask_word(word)
        is_value = word.startswith("-") and _is_secret_option(word)


def _mask_word(word: str) -> str:
    inner = _split(word)
    if len(inner) > 1:
        masked = mask_words(inner)
        return word if masked == tuple(inner) else shlex.join(masked)
    if (match := _ASSIGNMENT.fullmatch(word)) is not None and _is_literal(match[2]):
        secret = _is_secret_option(match[1]) or (match[1].isupper() and is_secret_variable(match[1]))
        # `--set token=VALUE` and `--env=TOKEN=VALUE`: the value is an assignment, too.
        return f"{match[1]}={MASK if secret else _mask_word(match[2])}"
    return _VALUE.sub(MASK, word)


def _is_secret_option(word: str) -> bool:
    return _OPTION.search(word.lstrip("-")) is not None


def _is_literal(value: str) -> bool:
    """Whether a value is the secret itself rather than a reference to a variable or file."""
    return bool(value) and not value.startswith(("$", "{", "/", "./", "~"))


def _split(word: str) -> list[str]:
    """The words of a nested command, as in `sh -c '...'`; otherwise the word itself."""
    if not any(character.isspace() for character in word):
        return [word]
    try:
        return shlex.split(word)
    except ValueError:
        return word.split()
