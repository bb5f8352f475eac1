"""The official Kubernetes client, loaded only by commands that talk to a cluster, because it takes 0.3 s; and timeouts
for its calls that have none."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from typing import Any, NamedTuple, TypeVar

from mlbench_cli.config.extras import load_library

Result = TypeVar("Result")


class Libraries(NamedTuple):
    """The official client, and what it sends requests and opens websockets with."""

    kubernetes: Any
    urllib3: Any
    websocket: Any


@cache
def official() -> Libraries:
    """The libraries of the official client. Raises UsageError if they are not installed."""
    return Libraries(*(load_library(name, "k8s") for name in Libraries._fields))


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
