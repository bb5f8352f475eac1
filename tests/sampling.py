"""Which cases of a long list run in every `make test`, and which in the nightly run only (`make test-nightly`)."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest

# Kills or refusals at each request of a command: at every 23rd in `make test`, at all of them nightly.
STRIDES = pytest.mark.parametrize(
    "stride",
    [pytest.param(23, id="sample"), pytest.param(1, id="all", marks=pytest.mark.nightly)],
)


def sampled(cases: Iterable[Any], keep: Collection[Any]) -> list[Any]:
    """The cases as parameters of a test; those that are not in `keep` are for the nightly run."""
    cases = list(cases)
    missing = [case for case in keep if case not in cases]
    assert not missing, f"no such cases: {missing}"
    return [_nightly(case) if case not in keep else case for case in cases]


def _nightly(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.nightly)
