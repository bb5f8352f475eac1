"""Parse message sizes: "8B:64MiB:x2", "1KiB:16KiB:+1KiB", "4KiB,1MiB", or a mix of these."""

import re

MAX_SIZES = 10_000
_UNITS = {
    "": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30,
    "KB": 10**3, "MB": 10**6, "GB": 10**9,
}  # fmt: skip
_SIZE = re.compile(r"(\d{1,15})([A-Za-z]{0,3})")
_EXAMPLE = "write 8B:64MiB:x2, 1KiB:16KiB:+1KiB, or 4KiB,1MiB"


def parse_sizes(text: str) -> list[int]:
    """Distinct sizes in bytes, ascending. K, M and G are powers of 1024, like KiB; KB, MB and GB are powers of 1000.

    BEGIN:END:xF multiplies by F and BEGIN:END:+STEP adds STEP, up to END inclusive; the default step is x2. Raises
    ValueError with the reason.
    """
    words = [word.strip() for word in text.strip().removeprefix("[").removesuffix("]").split(",")]
    found: set[int] = set()
    for word in filter(None, words):
        found.update(_range(word) if ":" in word else [_size(word)])
        if len(found) > MAX_SIZES:
            raise ValueError(f"these are more than {MAX_SIZES} sizes")
    return sorted(found)


def _range(word: str) -> list[int]:
    parts = word.split(":")
    if len(parts) > 3:
        raise ValueError(f'"{word}" has more than three parts; {_EXAMPLE}')
    begin, end = _size(parts[0]), _size(parts[1])
    if end < begin:
        raise ValueError(f'"{word}" ends below its beginning')
    step = parts[2] if len(parts) == 3 else "x2"
    if step.startswith("+"):
        width = _size(step[1:])
        if (end - begin) // width >= MAX_SIZES:
            raise ValueError(f'"{word}" is more than {MAX_SIZES} sizes')
        return list(range(begin, end + 1, width))
    try:
        factor = float(step.removeprefix("x")) if step.startswith("x") else 0.0
    except ValueError:
        factor = 0.0
    if not 1.001 <= factor <= 2**40:
        raise ValueError(f'"{step}" in "{word}" is neither a factor such as x2 nor a step such as +4KiB')
    found, exact = [], float(begin)
    while (size := int(exact + 1e-6)) <= end:
        found.append(size)
        exact *= factor
    return found


def _size(word: str) -> int:
    match = _SIZE.fullmatch(word.strip())
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or not int(match[1]):
        raise ValueError(f'"{word.strip()[:40]}" is not a size; {_EXAMPLE}')
    return int(match[1]) * unit
