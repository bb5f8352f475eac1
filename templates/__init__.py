"""Turns the Jinja2 files of this folder into text and documents. Values enter through `tojson`: none can break out."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
# What YAML does not allow raw, or reads as a line break.
_UNSAFE = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")


class TemplateError(ValueError):
    """A template is missing or malformed, or lacks a value. The message names the template and what is wrong."""


def render(name: str, values: Mapping[str, Any]) -> str:
    """The text of template `name` (a path below this folder) with `values`; the same input gives the same bytes.

    Raises TemplateError.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from jinja2 import TemplateError as JinjaError

    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
    )
    environment.filters["tojson"] = to_json
    try:
        return environment.get_template(name).render(values)
    except (JinjaError, OSError, UnicodeDecodeError) as error:
        raise TemplateError(f"{name}: {error}") from None


def documents(name: str, values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The YAML documents that template `name` gives. Raises TemplateError."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as quick, where PyYAML was built with libyaml
    text = render(name, values)  # outside the block below: its TemplateError is a ValueError too
    try:
        loaded = [one for one in yaml.load_all(text, loader) if one is not None]
    except (yaml.YAMLError, ValueError) as error:
        raise TemplateError(f"{name}: not valid YAML: {' '.join(str(error).split())[:300]}") from None
    if not all(isinstance(document, dict) for document in loaded):
        raise TemplateError(f"{name}: a document is not a mapping")
    return loaded


def dump(items: Iterable[Mapping[str, Any]]) -> str:
    """Documents as YAML, in the order of their keys; byte-stable."""
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Dumper.add_representer(str, text)
    return yaml.dump_all(items, Dumper=Dumper, sort_keys=False, explicit_start=True, width=120, allow_unicode=True)


def to_json(value: Any) -> str:
    """JSON that is also YAML: every character that YAML would refuse or fold is escaped."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
