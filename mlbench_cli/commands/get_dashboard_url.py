"""`mlbench get-dashboard-url`: the original's command, kept so that scripts hear what has become of it."""

from mlbench_cli.errors import NotFoundError
from mlbench_cli.store import Store


def get_dashboard_url() -> None:
    """Print the address of the dashboard. There is none yet: this fails and says what to use instead."""
    cluster = Store().current_cluster
    raise NotFoundError(
        f'The cluster "{cluster.name}" has no dashboard: this version serves none.',
        hint="mlbench status NAME --watch, mlbench logs NAME --follow, or mlbench charts FOLDER",
    )
