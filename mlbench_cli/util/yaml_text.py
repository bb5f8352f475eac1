"""Parse untrusted YAML quickly. Every problem is reported as a UsageError."""

import re
from functools import cache
from types import ModuleType
from typing import Any

from mlbench_cli.errors import UsageError

MAX_DEPTH = 500  # of nested lists and mappings: the C parser is recursive and would overflow the stack


def load_yaml() -> ModuleType:
    """PyYAML, which takes 8 ms: `mlbench status` does without."""
    import yaml

    return yaml


def read_yaml(
    text: str | bytes, subject: str | None = None, *, dates_as_text: bool = False, repeated_keys: bool = False
) -> Any:
    """The value of one YAML document. Uses libyaml if PyYAML was built with it, because it is ten times as fast.

    subject        what the text is, for the error: "values.yaml"
    dates_as_text  keep 2026-01-02 as a string, as Helm does, instead of parsing a date
    repeated_keys  the last of several values of a key counts, as for kubectl; else they are refused

    Raises UsageError.
    """
    yaml = load_yaml()
    base = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    class Loader(base):  # type: ignore[misc, valid-type]
        """Rejects keys that no message can quote: Python does not format integers of more than 4300 digits."""

        yaml_implicit_resolvers = {  # noqa: RUF012
            first: [
                (tag, _without_base_60(form) if tag.endswith((":int", ":float")) else form)
                for tag, form in resolvers
                if not (dates_as_text and tag.endswith(":timestamp"))
            ]
            for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            mapping: dict[Any, Any] = super().construct_mapping(node, deep)
            for key in mapping:
                str(key)
            return mapping

    try:
        _check_events(yaml.parse(text, base), repeated_keys)
        return yaml.load(text, Loader)
    # PyYAML's constructors do not catch Python's errors for, say, "!!float ''" or a date in the year 0.
    except (
        yaml.YAMLError,
        ValueError,
        LookupError,
        ArithmeticError,
        AttributeError,
        TypeError,
        RecursionError,
    ) as error:
        is_not = f"{subject} is not valid YAML" if subject else "Not valid YAML"
        raise UsageError(f"{is_not}: {' '.join(str(error).split())[:200]}") from None


@cache
def _without_base_60(form: re.Pattern[str]) -> re.Pattern[str]:
    """The form of numbers without 1:30, which is 90 for YAML 1.1 only, and a text for its successors and for Go."""
    return re.compile(f"(?!.*:)(?:{form.pattern})", re.VERBOSE)


def _check_events(events: Any, repeated_keys: bool) -> None:
    yaml = load_yaml()
    known: list[tuple[set[str] | None, int]] = []  # of each open mapping (of a list None): its keys; nodes so far
    for event in events:
        if isinstance(event, yaml.CollectionEndEvent):
            known.pop()
            continue
        if not isinstance(event, yaml.NodeEvent):
            continue
        if known:
            keys, nodes = known[-1]
            known[-1] = keys, nodes + 1
            if keys is not None and nodes % 2 == 0 and isinstance(event, yaml.ScalarEvent) and event.value != "<<":
                if event.value in keys and not repeated_keys:
                    line = event.start_mark.line + 1 if event.start_mark else "?"
                    raise ValueError(f'the key "{event.value[:60]}" is given twice, in line {line}')
                keys.add(event.value)
        if isinstance(event, yaml.CollectionStartEvent):
            known.append((set() if isinstance(event, yaml.MappingStartEvent) else None, 0))
            if len(known) > MAX_DEPTH:
                raise ValueError(f"more than {MAX_DEPTH} lists or mappings inside each other")
