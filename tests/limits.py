"""A plugin of pytest: at the end it names the tests that took more than a fifth of their own limit.

A machine that others use takes several times as long as a quiet one, and a test that is stopped for it says nothing
about the code. Nothing fails here, since no clock may decide: whoever reads the list on a quiet machine raises a limit.
"""

from collections.abc import Iterable

import pytest

MARGIN = 5


def limit_of(item: pytest.Item) -> float:
    """Seconds after which pytest-timeout stops a test; 0 for none."""
    marker = item.get_closest_marker("timeout")
    given = marker.args[0] if marker and marker.args else marker.kwargs.get("timeout") if marker else None
    return float(item.config.getini("timeout") if given is None else given)


def list_narrow_limits(reports: Iterable[pytest.TestReport]) -> list[str]:
    """One line for each call that took more than a fifth of its limit, the narrowest first."""
    found = []
    for report in reports:
        limit = dict(report.user_properties).get("limit")
        if report.when == "call" and isinstance(limit, float) and 0 < limit < MARGIN * report.duration:
            found.append((limit / report.duration, f"{report.nodeid}: {report.duration:.0f} s of {limit:.0f} s"))
    return [line for _, line in sorted(found)]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Send the limit along with the result: with workers another process prints the summary."""
    item.user_properties.append(("limit", limit_of(item)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the list."""
    if lines := list_narrow_limits(terminalreporter.stats.get("passed", [])):
        terminalreporter.section(f"limits below {MARGIN} times the duration (raise them if this machine was quiet)")
        for line in lines:
            terminalreporter.line(line)
