"""The official Kubernetes client, loaded only by commands that talk to a cluster, because it takes 0.3 s; and timeouts
for its calls that have none."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from mlbench_cli.config.extras import install_hint
from mlbench_cli.errors import UsageError

Result = TypeVar("Result")


def import_official_client() -> Any:
    """The module `kubernetes.client`. Raises UsageError if it is not installed."""
    try:
        import kubernetes.client
    except ImportError as error:
        raise UsageError(
            f"Kubernetes clusters need packages that are not installed: {error}.", hint=install_hint("k8s")
        ) from None
    return kubernetes.client


def call_with_deadline(
    function: Callable[[], Result], seconds: float, discard: Callable[[Result], object] = lambda late: None
) -> Result:
    """Call `function` in a thread; return its result or raise its error.

    Raises TimeoutError after `seconds`. The thread then continues in the background, and its result is passed to
    `discard`.
    """
    future: Future[Result] = Future()

    def work() -> None:
        try:
            result = function()
        except BaseException as error:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
            return
        if future.set_running_or_notify_cancel():
            future.set_result(result)
        else:
            discard(result)

    threading.Thread(target=work, name="call with deadline", daemon=True).start()
    try:
        return future.result(seconds)
    except TimeoutError:
        if not future.cancel():  # it ended just now, or with its own TimeoutError
            return future.result()
        raise TimeoutError(f"nothing arrived within {seconds:g} s") from None
    except KeyboardInterrupt:
        future.cancel()
        raise
