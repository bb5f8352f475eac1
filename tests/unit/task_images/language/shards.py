"""Shards of tokens as llm.c's fineweb.py writes them."""

from pathlib import Path
from typing import Any

import numpy as np


def write_shard(path: Path, tokens: "np.ndarray[Any, Any]") -> None:
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(tokens)
    path.write_bytes(header.tobytes() + tokens.astype("<u2").tobytes())
