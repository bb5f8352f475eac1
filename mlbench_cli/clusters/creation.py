"""A cluster to be created, as a spec file or the command line of a run describes it."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, get_args, get_origin, get_type_hints

from mlbench_cli.clusters.manage import CreationRequest, Ttl
from mlbench_cli.errors import UsageError, did_you_mean
from mlbench_cli.util.durations import parse_duration
from mlbench_cli.util.text import shorten
from providers import registry
from providers.base import Provider

KEEP = "none"  # of --ttl
PROVIDER, KEEP_CLUSTER = "provider", "keep_cluster"
_OTHER: dict[str, Any] = {"ttl": str, "chart_location": str, "custom_value": tuple[str, ...], "chart_timeout": str}
_WORDS = {str: "a text", int: "a whole number", bool: "true or false", tuple: "a list of texts"}


def parse_ttl(ttl: str | None) -> Ttl | None:
    """The end that --ttl asks for; None for a cluster without one. Raises UsageError."""
    return None if ttl in (None, KEEP) else Ttl(str(ttl), parse_duration(str(ttl), "--ttl"))


def parse_chart_timeout(text: str | None) -> float | None:
    """Seconds of --chart-timeout. Raises UsageError."""
    return None if text is None else parse_duration(text, "--chart-timeout")


def find_creator(name: str) -> Provider:
    """The provider of that name, for a cluster to be created. Raises UsageError with the nearest one."""
    creators = registry.creators()
    known = [*creators, *registry.ALIASES]
    if (provider := creators.get(registry.ALIASES.get(name, name))) is None:
        raise UsageError(
            f'--create "{shorten(name)}" is not one of {", ".join(creators)}.{did_you_mean(name, known)}',
            hint="For a cluster that exists: --cluster NAME",
        )
    return provider


def read_creation(create: Mapping[str, Any], nodes: int, release: str) -> CreationRequest:
    """What `create` asks for: a provider and options of `create-cluster`. Raises UsageError that names the option."""
    provider = find_creator(str(create[PROVIDER]))
    assert provider.options is not None
    hints = get_type_hints(provider.options)
    kinds = {**{item.name: hints[item.name] for item in fields(provider.options)}, **_OTHER, KEEP_CLUSTER: bool}
    given = {}
    for name, value in create.items():
        if name != PROVIDER and value is not None:
            given[name] = _read_value(name, value, kinds, provider.name)
    others = {name: given.pop(name, None) for name in (*_OTHER, KEEP_CLUSTER)}
    return CreationRequest(
        *(provider, nodes, release, given, others["chart_location"], others["custom_value"] or ()),
        *(parse_chart_timeout(others["chart_timeout"]), parse_ttl(others["ttl"])),
    )


def _read_value(name: str, value: Any, kinds: Mapping[str, Any], provider: str) -> Any:
    flag = "--" + name.replace("_", "-")
    if name not in kinds:
        near = did_you_mean(name, list(kinds)).replace("_", "-")
        raise UsageError(
            f"{shorten(flag)} is not an option of create-cluster {provider}.{near}",
            hint=f"mlbench create-cluster {provider} --help",
        )
    kind: type = next((choice for choice in (str, int, bool) if choice in (kinds[name], *get_args(kinds[name]))), str)
    if get_origin(kinds[name]) is tuple:
        kind, value = tuple, tuple(value) if isinstance(value, list | tuple) else (value,)
        fits = all(isinstance(item, str) for item in value)
    elif kind is str:
        fits, value = isinstance(value, str | int | float) and not isinstance(value, bool), str(value)
    else:
        fits = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    if not fits:
        raise UsageError(f"{flag} of the cluster is {shorten(repr(value))}, not {_WORDS[kind]}.")
    return value
