"""Refusals of clouds whose words tell the cause, whatever their class or code."""

import re
from collections.abc import Iterable

from mlbench_cli.errors import MlbenchError

# Words, the error that a refusal with them becomes, and what to do next. Special words stand before general ones.
Cause = tuple[re.Pattern[str], type[MlbenchError], str]


def error_from_causes(causes: Iterable[Cause], message: str, said: str, **names: str) -> MlbenchError | None:
    """The error `message` of the first cause whose words are in `said`; None for other words. With `names`, they are
    put into its hint."""
    for words, kind, hint in causes:
        if words.search(said):
            return kind(message, hint=hint.format(**names) if names else hint)
    return None
