"""A deadline for calls into libraries that have none."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def call_with_deadline(
    function: Callable[[], Result], seconds: float, discard: Callable[[Result], object] = lambda late: None
) -> Result:
    """Call `function` in a thread of its own; return its result or raise its error.

    Raises TimeoutError after `seconds`. The thread then goes on in the background, and what it returns in the end is
    given to `discard`.
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
        if not future.cancel():  # it has ended, in this very moment or by a TimeoutError of its own
            return future.result()
        raise TimeoutError(f"nothing came within {seconds:g} s") from None
    except KeyboardInterrupt:
        future.cancel()
        raise
