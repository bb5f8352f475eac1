"""The end of a process that was told to stop: at a set time, whatever it does then."""

import os
import threading

_timers: list[threading.Timer] = []


def end_after(seconds: float, code: int) -> None:
    """End the process with this exit code, unless it ends or is called off before."""
    timer = threading.Timer(seconds, os._exit, (code,))
    timer.daemon = True
    _timers.append(timer)
    timer.start()


def take_longer(seconds: float) -> None:
    """Where the end of the process is set: set it again, for what the user was told to expect."""
    if _timers:
        _timers[-1].cancel()
        end_after(seconds, *_timers[-1].args)


def call_off() -> None:
    """Let the process go on."""
    for timer in _timers:
        timer.cancel()
    _timers.clear()
