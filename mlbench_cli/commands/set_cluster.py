"""`mlbench set-cluster`: the cluster that commands use by default."""

from typing import Annotated

import typer

from mlbench_cli import console
from mlbench_cli.commands._common import Format, Output, complete_clusters, print_answer
from mlbench_cli.config.file import find_default
from mlbench_cli.errors import UsageError
from mlbench_cli.storage.store import Store
from providers.registry import ALIASES


def set_cluster(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[PROVIDER] NAME",
            help="cluster (list: mlbench list-clusters)",
            autocompletion=complete_clusters,
        ),
    ],
    output: Output = Format.text,
) -> None:
    """Set the default cluster of all commands; "local" is this machine."""
    # Scripts for the original name the provider, too: mlbench set-cluster gcloud NAME
    if len(words) > 2:
        raise UsageError(f"{len(words)} words given, but a cluster name is one word.", hint="mlbench set-cluster NAME")
    store = Store(notice=console.note)
    cluster = store.cluster(words[-1])
    provider = ALIASES.get(words[0], words[0])
    if len(words) == 2 and provider != cluster.provider:
        raise UsageError(
            f'The cluster "{cluster.name}" is a {cluster.provider} cluster, not {words[0]}.',
            hint=f"mlbench set-cluster {cluster.name}",
        )
    default = find_default("cluster")
    store.choose_cluster(cluster)
    document = {
        "cluster": cluster.name,
        "provider": cluster.provider,
        "current": default.value if default else cluster.name,
    }
    named = f"cluster {cluster.name} ({cluster.provider})"
    print_answer(output, document, f"The {named} is chosen." if default else f"Commands now use the {named}.")
    if default is not None and default.value != cluster.name:
        console.warn(f"Commands keep using {default.value}: {default.origin} takes precedence.")
