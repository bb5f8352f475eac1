"""`mlbench create-cluster PROVIDER N RELEASE`: plan, ask, create. Options come from the provider."""

import inspect
import time
from collections.abc import Collection, Sequence
from dataclasses import Field, fields
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import typer
import yaml
from typer.core import TyperGroup

from mlbench_cli import console
from mlbench_cli.clusters import changes as cluster_changes
from mlbench_cli.clusters import manage as clusters
from mlbench_cli.clusters.creation import KEEP, parse_chart_timeout, parse_ttl
from mlbench_cli.clusters.manage import UNATTENDED_TTL, CreationRequest, PlannedCluster, plan_cluster
from mlbench_cli.commands._clusters import (
    cluster_document,
    create_with_progress,
    show_plan,
)
from mlbench_cli.commands._common import Format, Output, Yes
from mlbench_cli.commands._images import require_registry
from mlbench_cli.commands._values import PanelCommand, build_command
from mlbench_cli.config.file import find_default
from mlbench_cli.errors import CredentialError, MlbenchError, UsageError, did_you_mean
from mlbench_cli.kube.gpudirect import RELEASES, explain_unknown_branch
from mlbench_cli.model.cluster_details import ClusterDetails
from mlbench_cli.model.run import Cluster
from mlbench_cli.storage.store import Store
from providers import registry
from providers.base import AUTO, Provider, delete_command
from providers.gpu_probe import find_driver_branch, find_driver_problem
from providers.helm.install import Installation


class ProviderGroup(TyperGroup):
    """One sub-command for each provider that creates clusters, built when it is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The names of the providers that create clusters."""
        return list(registry.creators())

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Build the command of a provider from its options; None if it creates no clusters."""
        name = registry.ALIASES.get(cmd_name, cmd_name)
        provider = registry.creators().get(name)
        if provider is None:
            return None
        app = typer.Typer(rich_markup_mode=None, add_completion=False)
        app.command(name=cmd_name, cls=PanelCommand, help=_help(provider))(_function(provider))
        return build_command(app)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the provider's command. Raises UsageError with the nearest name if there is none."""
        if not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            known = [*registry.creators(), *registry.ALIASES]
            raise UsageError(
                f'There is no cluster provider "{args[0]}".{did_you_mean(args[0], known)}',
                hint="mlbench create-cluster --help; for an existing cluster: mlbench attach-cluster NAME",
            )
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the providers with their summaries."""
        with formatter.section("Providers"):
            formatter.write_dl([(name, provider.summary) for name, provider in registry.creators().items()])


create_cluster = typer.Typer(
    cls=ProviderGroup, rich_markup_mode=None, add_completion=False, subcommand_metavar="PROVIDER NUM_WORKERS RELEASE"
)


@create_cluster.callback()
def _group() -> None:
    """Create a cluster named RELEASE-NUM_WORKERS. Options of a provider: mlbench create-cluster PROVIDER --help."""


def create(
    provider: Provider,
    nodes: int,
    release: str,
    options: dict[str, Any],
    chart_location: str | None,
    custom_values: Sequence[str] | None,
    chart_timeout: str | None,
    ttl: str | None,
    dry_run: bool,
    yes: bool,
    output: Format,
) -> None:
    """Plan, print, ask and create, in this order; `--dry-run` ends after the plan.

    Raises UsageError before anything is asked of a cloud if options cannot work, and the life-cycle's errors after
    that.
    """
    request = CreationRequest(
        *(provider, nodes, release, options, chart_location, custom_values or ()),
        *(parse_chart_timeout(chart_timeout), parse_ttl(ttl)),
    )
    store = Store(notice=console.note)
    _check_registry(provider, options.get("registry"))
    try:
        _create(store, request, ttl, dry_run, yes, output)
    except (CredentialError, UsageError) as error:
        # "There are no credentials": the plan and price can still be shown.
        if not dry_run or error.details.get("configured", True) or (sketch := clusters.sketch_cluster(request)) is None:
            raise
        _print_plan(sketch, output)


def _create(
    store: Store,
    request: CreationRequest,
    ttl: str | None,
    dry_run: bool,
    yes: bool,
    output: Format,
) -> None:
    with plan_cluster(store, request) as planned:
        planned = _choose_end(store, planned, ttl)
        if dry_run:
            _print_plan(planned, output)
            return
        _show_plan(planned)
        if end := _describe_end(planned):
            console.note(f"{end} {cluster_changes.describe_end(planned.cluster)}")
        if planned.plan.total != 0:
            console.confirm(f"Create the cluster {request.name}?", yes=yes)
        cluster = create_with_progress(store, planned)
        if planned.chart_notes:
            console.note(f"Notes of the Helm chart:\n{console.clean(planned.chart_notes, keep=chr(10))}\n")
    _print_result(cluster, output)


def _choose_end(store: Store, planned: PlannedCluster, ttl: str | None) -> PlannedCluster:
    """The cluster with its expiry: as requested, else that of the existing cluster, else a default if nobody is
    watching.

    Raises UsageError for removing the expiry of an existing cluster.
    """
    known = store.find_cluster(planned.cluster.identity)
    recorded = None if known is None else ClusterDetails.of(known).expires
    if ttl is not None and ttl.strip() == KEEP and recorded is not None:
        raise UsageError(
            f'The cluster "{planned.cluster.name}" already expires; --ttl {KEEP} does not change that.',
            hint="--ttl 30d   moves its end",
        )
    if ttl is not None:
        return planned
    if known is not None and (recorded is None or recorded > time.time()):
        return planned.with_end_of(known)
    if planned.plan.total == 0 or console.interactive():
        return planned
    there = _find_in_cloud(store, planned.cluster)
    if there is not None and (ClusterDetails.of(there).expires or 0) > time.time():
        return planned.with_end_of(there)
    return planned.with_ttl(parse_ttl(UNATTENDED_TTL))


def _find_in_cloud(store: Store, cluster: Cluster) -> Cluster | None:
    """The cluster if another data folder has created it, whose end is not to be moved unasked."""
    try:
        return cluster_changes.find_again(store, cluster)
    except MlbenchError:
        return None


def _describe_end(planned: PlannedCluster) -> str | None:
    """When the cluster expires; None if it does not."""
    details = ClusterDetails.of(planned.cluster)
    if planned.keeps_end and details.expires is not None:
        return f"It still expires in {console.duration(details.expires - time.time())} (--ttl changes that)."
    return f"It expires after {details.ttl}." if details.ttl else None


def _check_registry(provider: Provider, given: str | None) -> None:
    """Check the task images before creating a cluster that could not run any."""
    if provider.name not in registry.PAID or given == AUTO:
        return
    place = given or (default.value if (default := find_default("registry")) else None)
    if place is None:  # runs use the public image of PyTorch
        return

    require_registry(place)


def _show_plan(planned: PlannedCluster) -> None:
    show_plan(planned.cluster, planned.plan)
    _show_chart(planned.installation)


def _print_plan(planned: PlannedCluster, output: Format) -> None:
    resources, installation = planned.resources, planned.installation
    chart: dict[str, object] | None = None
    if installation is not None:
        chart = {**installation.record(), "values": installation.merged_values(), "warnings": installation.warnings}
    if output == Format.json:
        plan = planned.plan.to_dict()
        document = {"cluster": cluster_document(planned.cluster), "plan": plan, "resources": resources}
        console.out_json({**document, "helm_chart": chart} if chart else document)
        return
    _show_plan(planned)
    if ttl := ClusterDetails.of(planned.cluster).ttl:
        console.note(f"It ends after {ttl}. {cluster_changes.describe_end(planned.cluster)}")
    console.out_table(["RESOURCE", "NAME"], [[item["kind"], item["name"]] for item in resources])
    if chart is not None:
        console.out("\nvalues:")
        console.out(yaml.safe_dump(chart["values"], sort_keys=False, allow_unicode=True, indent=2).rstrip(), raw=True)


def _show_chart(installation: Installation | None) -> None:
    """Print name, version and digest of the Helm chart on stderr."""
    if installation is None:
        return
    chart = installation.chart
    console.note(f"Helm chart {chart.name} {chart.version} of {chart.source}")
    console.note(f"  {chart.digest}, into the namespace {installation.namespace}, by helm {installation.helm.version}")
    for warning in installation.warnings:
        console.warn(warning)


def _print_result(cluster: Cluster, output: Format) -> None:
    if output == Format.json:
        console.out_json({"cluster": cluster_document(cluster)})
        return
    times = ClusterDetails.of(cluster).provisioning
    console.out_table(
        ["RESOURCE", "NAME", "BEGAN S", "READY S"],
        [
            [item["kind"], item["name"], round(item["began"] or 0.0, 1), round(item["ready"] or 0.0, 1)]
            for item in times
        ],
    )
    _show_probe(ClusterDetails.of(cluster))
    if problem := ClusterDetails.of(cluster).registry_problem:
        console.warn(f"The machines may not be able to pull images from the cluster's registry: {problem}")
    if ClusterDetails.of(cluster).registry_made:
        console.note(f"Its registry {ClusterDetails.of(cluster).registry} is empty. To fill it: mlbench images push")
    console.note(f"The cluster {cluster.name} is ready; commands now use it. To delete it:")
    console.note(f"  {delete_command(cluster)}")


def _show_probe(details: ClusterDetails) -> None:
    """Print on stderr what the GPU probe found, and what follows from it for the machines' network."""
    report = details.gpu_probe
    if not report:
        return

    torch = f"; torch {report['torch']} ran a kernel and an all-reduce" if report.get("torch") else ""
    console.note(f"GPUs of a worker: {report.get('gpus')} × {report.get('gpu')}, driver {report.get('driver')}{torch}")
    if problem := find_driver_problem(report):
        console.warn(problem)
    branch, kind = find_driver_branch(report), details.fabric.get("setup")
    if branch is not None and kind in RELEASES and (problem := explain_unknown_branch(kind, branch)):
        console.warn(problem)


# --- the options are the provider's fields --------------------------------------------------------------------------


def _function(provider: Provider) -> Any:
    """The function of `create-cluster PROVIDER`, with the provider's options in its signature."""
    assert provider.options is not None
    items = fields(provider.options)

    def command(**given: Any) -> None:
        options = {item.name: given.pop(item.name) for item in items}
        options = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
        create(provider, options=options, **given)

    hints = get_type_hints(provider.options)
    parameters = [*_COMMON[:2], *(_parameter(item, hints[item.name]) for item in items), *_COMMON[2:]]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


def _parameter(item: Field[Any], kind: Any) -> inspect.Parameter:
    """Turn a field that `providers.base.option` made into a parameter that Typer turns into an option."""
    default, choices = item.default, get_args(kind)
    if get_origin(kind) is tuple:
        kind, default = list.__class_getitem__(choices[0]), list(item.default)  # type: ignore[arg-type]
    elif get_origin(kind) in (Union, UnionType):
        kind = next(choice for choice in choices if choice is not type(None)) | None
    option = typer.Option(*item.metadata["flags"], help=item.metadata["help"])
    return inspect.Parameter(
        item.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )


def cluster_options(provider: Provider, taken: Collection[str], prefix: str) -> list[Any]:
    """The options of `create-cluster PROVIDER` for a command that also makes a cluster. Their names begin with
    `prefix`, and the flags of those that are `taken` by that command with --cluster-.
    """
    app = typer.Typer(rich_markup_mode=None, add_completion=False)
    app.command()(_function(provider))
    found = []
    for item in build_command(app).params:
        if item.param_type_name == "option" and item.name not in ("dry_run", "yes", "output", "help"):
            long = [word for word in item.opts if word.startswith("--")]
            item.opts = [word for word in long if word not in taken] or [f"--cluster-{long[0].removeprefix('--')}"]
            if item.name == "ttl":
                item.help = "lifetime of the cluster; default for paid ones: all timeouts of the runs + 1 h"
            item.name, item.rich_help_panel = prefix + item.name, f"Cluster ({provider.name})"
            found.append(item)
    return found


def _help(provider: Provider) -> str:
    return f"{provider.summary}.\n\nThe cluster is named RELEASE-NUM_WORKERS. {provider.notes}".rstrip()


def _keyword(name: str, annotation: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


_COMMON = [
    _keyword("nodes", Annotated[int, typer.Argument(metavar="NUM_WORKERS", help="number of worker machines")]),
    _keyword(
        "release",
        Annotated[str, typer.Argument(metavar="RELEASE", help="name prefix; the cluster is named RELEASE-NUM_WORKERS")],
    ),
    _keyword(
        "chart_location",
        Annotated[
            str | None,
            typer.Option(
                "--chart-location",
                "-cl",
                help="Helm chart to install (needs helm on this machine): a folder, or https://REPOSITORY/CHART@VERSION",
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
                help="value for the Helm chart, e.g. a.b[0].c=v; numbers, true, false, null and JSON are parsed, the "
                "rest and quoted values are text; repeatable",
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
                help="how long to wait for the resources of the chart; default: 10m",
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
                help="lifetime, e.g. 90m, 8h, 2d, or none: then the cloud removes the workers, and mlbench gc "
                f"--expired the rest; default: none, but {UNATTENDED_TTL} for paid clusters if there is no terminal",
                metavar="DURATION",
            ),
        ],
        None,
    ),
    _keyword("dry_run", Annotated[bool, typer.Option("--dry-run", help="print the plan and exit")], False),
    _keyword("yes", Yes, False),
    _keyword("output", Output, Format.text),
]
