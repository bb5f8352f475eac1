"""Requests of the providers to the Kubernetes API of a cluster that was created a moment ago."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from mlbench_cli.errors import MlbenchError
from mlbench_cli.kube.access import Access
from mlbench_cli.kube.api import Api
from providers.base import TransientError

Connect = Callable[[], Access]


@contextmanager
def open_young_cluster(connect: Connect) -> Iterator[Api]:
    """A client. Raises TransientError for what passes by itself soon after a cluster's start.

    The endpoint's DNS name, the caller's rights (401, 403) and the API server itself take a while to be known
    everywhere. Raises NotFoundError, as `connect` does, if there is no cluster.
    """
    access = connect()
    try:
        with access.client() as api:
            yield api
    except MlbenchError as error:
        status = error.details.get("status")
        if status is not None and (status in (0, 401, 403, 429) or status >= 500):
            raise TransientError(error.message, hint=error.hint) from None
        raise


def apply_object(api: Api, path: str, document: Mapping[str, object]) -> None:
    """Create the object at `path`, or set its fields to those of the document: server-side apply, as mlbench."""
    api.request(
        "PATCH",
        path,
        params={"fieldManager": "mlbench", "force": True},
        body=document,
        content_type="application/apply-patch+yaml",
    )
