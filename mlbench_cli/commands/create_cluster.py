"""`mlbench create-cluster PROVIDER N RELEASE`: plan, ask, make. Each provider's options come from its own dataclass."""

import getpass
import inspect
import re
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import Field, fields, replace
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperGroup
from typer.main import get_command

from mlbench_cli import console
from mlbench_cli.commands._clusters import StepTeller, document_of, show_plan
from mlbench_cli.commands._common import Format, Output, Yes
from mlbench_cli.errors import UsageError, did_you_mean
from mlbench_cli.model import Cluster
from mlbench_cli.runs.request import parse_duration
from mlbench_cli.spec import check_name
from mlbench_cli.store import Store
from providers import registry
from providers.base import Plan, Provider, Resource

if TYPE_CHECKING:
    from providers.helm.install import Installation

HELP_NAMES = {"help_option_names": ["-h", "--help"]}
# How long a paid cluster lives that no person has confirmed: long enough for a benchmark, short enough for a bill.
UNATTENDED_TTL = "8h"
KEEP = "none"


class ProviderGroup(TyperGroup):
    """One sub-command for each provider that makes clusters, built when it is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(registry.CREATABLE)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        name = registry.ALIASES.get(cmd_name, cmd_name)
        if name not in registry.CREATABLE:
            return None
        app = typer.Typer(rich_markup_mode=None, add_completion=False)
        app.command(name=cmd_name, help=_help(name), context_settings=HELP_NAMES)(_function(name))
        return get_command(app)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            known = [*registry.CREATABLE, *registry.ALIASES]
            raise UsageError(
                f'There is no provider "{args[0]}" that makes clusters.{did_you_mean(args[0], known)}',
                hint="mlbench create-cluster --help; a cluster you already have: mlbench attach-cluster NAME",
            )
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Providers"):
            formatter.write_dl(list(registry.CREATABLE.items()))


create_cluster = typer.Typer(
    cls=ProviderGroup, rich_markup_mode=None, context_settings=HELP_NAMES, no_args_is_help=True, add_completion=False
)


@create_cluster.callback()
def _group() -> None:
    """Make a cluster: mlbench create-cluster PROVIDER NUM_WORKERS RELEASE."""


def create(
    provider: Provider,
    nodes: int,
    release: str,
    options: dict[str, Any],
    chart_location: str | None,
    custom_values: Sequence[str],
    chart_timeout: str | None,
    ttl: str | None,
    dry_run: bool,
    yes: bool,
    output: Format,
) -> None:
    name = check_name(f"{release}-{nodes}", "cluster name")
    store = Store()
    _refuse_taken(store, name, provider)
    cluster = provider.describe(name, nodes, provider.options(**options))
    with _prepared(chart_location, custom_values or (), chart_timeout) as installation:
        plan = provider.plan(cluster)
        cluster = _completed(cluster, plan, ttl, _charts(store, name, installation))
        if dry_run:
            _print_plan(cluster, plan, provider, installation, output)
            return
        show_plan(cluster, plan)
        _show_chart(installation)
        if plan.total != 0:
            console.confirm(f"Make the cluster {name}?", yes=yes)
        ready = _make(cluster, provider, installation, store)
    store.choose_cluster(name)
    _report(ready, output)


def _make(cluster: Cluster, provider: Provider, installation: "Installation | None", store: Store) -> Cluster:
    from providers.lifecycle import up

    resources: list[Resource] = list(provider.resources(cluster))
    if installation is None:
        with StepTeller() as tell:
            return up(cluster, resources, store, report=tell)
    from providers.helm.install import Release

    with closing(Release(cluster, installation, lambda: provider.connect(cluster), resources)) as release:
        with StepTeller() as tell:
            ready = up(cluster, [*resources, release], store, report=tell)
        if release.notes:
            console.note(f"The chart says:\n{console.clean(release.notes, keep=chr(10))}\n")
    return ready


def _prepared(
    location: str | None, custom_values: Sequence[str], timeout: str | None
) -> "AbstractContextManager[Installation | None]":
    """The chart with its values, fetched and checked before anything is made; None where none is asked for."""
    if location is None and not custom_values and timeout is None:
        return nullcontext()
    from providers.helm.install import WAIT_SECONDS, prepared

    seconds = WAIT_SECONDS if timeout is None else parse_duration(timeout, "--chart-timeout")
    return prepared(location, custom_values, seconds)


def _charts(store: Store, name: str, installation: "Installation | None") -> list[dict[str, Any]]:
    """What is installed on the cluster, as far as this data directory knows it, and what is going to be."""
    known: list[dict[str, Any]] = []
    for cluster in store.clusters():
        if cluster.name == name:
            known = list(cluster.details.get("charts", []))
    if installation is None:
        return known
    record = installation.record()
    return [*(entry for entry in known if entry["release"] != record["release"]), record]


def _refuse_taken(store: Store, name: str, provider: Provider) -> None:
    for known in store.clusters():
        if known.name == name and known.provider != provider.name:
            raise UsageError(
                f'There is already a cluster "{name}", of {known.provider}.',
                hint="Choose another RELEASE; see: mlbench list-clusters",
            )


def _completed(cluster: Cluster, plan: Plan, ttl: str | None, charts: list[dict[str, Any]]) -> Cluster:
    """The record with its owner, its end, its charts and the prices of today."""
    details: dict[str, Any] = {**cluster.details, "owner": _owner(), "plan": plan.to_dict()}
    if charts:
        details["charts"] = charts
    if ttl is None and plan.total != 0 and not console.interactive():
        ttl = UNATTENDED_TTL
    if ttl is not None and ttl != KEEP:
        details["expires"] = int(time.time() + parse_duration(ttl, "--ttl"))
        details["ttl"] = ttl
    return replace(cluster, details=details)


def _owner() -> str:
    try:
        name = getpass.getuser()
    except (KeyError, OSError):
        return "unknown"
    return re.sub(r"[^a-z0-9_-]", "-", name.lower())[:63]


def _print_plan(
    cluster: Cluster, plan: Plan, provider: Provider, installation: "Installation | None", output: Format
) -> None:
    resources = [{"kind": item.kind, "name": item.name} for item in provider.resources(cluster)]
    chart: dict[str, Any] | None = None
    if installation is not None:
        chart = {**installation.record(), "values": installation.merged(), "warnings": installation.warnings}
        resources.append({"kind": "Helm release", "name": chart["release"]})
    if output == Format.json:
        document = {"cluster": document_of(cluster), "plan": plan.to_dict(), "resources": resources}
        console.out_json({**document, "chart": chart} if chart else document)
        return
    show_plan(cluster, plan)
    _show_chart(installation)
    if ttl := cluster.details.get("ttl"):
        console.note(f"It may be removed by `mlbench gc --expired` after {ttl}.")
    console.out_table(["RESOURCE", "NAME"], [[item["kind"], item["name"]] for item in resources])
    if chart is not None:
        import yaml

        console.out("\nvalues:")
        console.out(yaml.safe_dump(chart["values"], sort_keys=False, allow_unicode=True, indent=2).rstrip())


def _show_chart(installation: "Installation | None") -> None:
    """Chart, version and digest, on stderr."""
    if installation is None:
        return
    chart = installation.chart
    console.note(f"Chart {chart.name} {chart.version} of {chart.source}")
    console.note(f"  {chart.digest}, into the namespace {installation.namespace}, by helm {installation.helm.version}")
    for warning in installation.warnings:
        console.warn(warning)


def _report(cluster: Cluster, output: Format) -> None:
    if output == Format.json:
        console.out_json({"cluster": document_of(cluster)})
        return
    times = cluster.details["provisioning"]
    console.out_table(
        ["RESOURCE", "NAME", "BEGAN S", "READY S"],
        [[item["kind"], item["name"], round(item["began"], 1), round(item["ready"], 1)] for item in times],
    )
    console.note(f"The cluster {cluster.name} is ready; commands now use it. Remove it with:")
    console.note(f"  mlbench delete-cluster {cluster.provider} {cluster.name}")


# --- the options are the provider's fields --------------------------------------------------------------------------


def _function(name: str) -> Any:
    """The function of `create-cluster NAME`, with the provider's options in its signature."""
    provider = registry.load(name)
    items = fields(provider.options)

    def command(**given: Any) -> None:
        options = {item.name: given.pop(item.name) for item in items}
        options = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
        create(provider, options=options, **given)

    hints = get_type_hints(provider.options)
    parameters = [*_COMMON[:2], *(_parameter(item, hints[item.name]) for item in items), *_COMMON[2:]]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


def _parameter(item: "Field[Any]", kind: Any) -> inspect.Parameter:
    """A field made by `providers.base.option` as a parameter that Typer makes an option of."""
    default, choices = item.default, get_args(kind)
    if get_origin(kind) is tuple:
        kind, default = list.__class_getitem__(choices[0]), list(item.default)  # type: ignore[arg-type]
    elif get_origin(kind) in (Union, UnionType):
        kind = next(choice for choice in choices if choice is not type(None)) | None
    option = typer.Option(*item.metadata["flags"], help=item.metadata["help"])
    return inspect.Parameter(
        item.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )


def _help(name: str) -> str:
    return f"{registry.CREATABLE[name]}.\n\nThe cluster is named RELEASE-NUM_WORKERS."


def _keyword(name: str, annotation: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


_COMMON = [
    _keyword("nodes", Annotated[int, typer.Argument(metavar="NUM_WORKERS", help="machines of the cluster")]),
    _keyword("release", Annotated[str, typer.Argument(metavar="RELEASE", help="first part of the cluster's name")]),
    _keyword(
        "chart_location",
        Annotated[
            str | None,
            typer.Option(
                "--chart-location",
                "-cl",
                help="Helm chart to install, by the helm of this machine: a folder, or https://REPOSITORY/CHART@VERSION",
                metavar="DIR|REPO@VERSION",
            ),
        ],
        None,
    ),
    _keyword(
        "custom_values",
        Annotated[
            list[str] | None,
            typer.Option(
                "--custom-value",
                "-v",
                help="value for the chart, e.g. a.b[0].c=v; numbers, true, false, null and JSON are parsed, the rest "
                "and quoted values are text; repeatable",
                metavar="PATH=VALUE",
            ),
        ],
        None,
    ),
    _keyword(
        "chart_timeout",
        Annotated[
            str | None,
            typer.Option(
                "--chart-timeout",
                help="maximum time for the chart's resources to become ready; default: 10m",
                metavar="DURATION",
            ),
        ],
        None,
    ),
    _keyword(
        "ttl",
        Annotated[
            str | None,
            typer.Option(
                "--ttl",
                help="age at which `mlbench gc --expired` may remove it, e.g. 90m, 8h, 2d, or none; default: none, "
                f"but {UNATTENDED_TTL} for paid clusters if there is no terminal",
                metavar="DURATION",
            ),
        ],
        None,
    ),
    _keyword("dry_run", Annotated[bool, typer.Option("--dry-run", help="print the plan and exit")], False),
    _keyword("yes", Yes, False),
    _keyword("output", Output, Format.text),
]
