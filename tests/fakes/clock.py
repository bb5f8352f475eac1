"""Time that passes only when a test says so, in place of the module `time`."""


class Clock:
    """`now` is what all its clocks show, in seconds; a sleep moves it."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def monotonic(self) -> float:
        return self.now

    perf_counter = time = monotonic

    def sleep(self, seconds: float) -> None:
        self.now += seconds
