"""How a run's objects are created: in which order, by whom they are owned, and what is adopted, replaced or refused."""

import pytest

from mlbench_cli.engines.kubernetes.submit import check_version
from mlbench_cli.kube.api import AccessDenied, ApiError, ServerUnreachable
from tests.unit.engines.kubernetes.memory_api import MemoryApi

# --- a whole submission ----------------------------------------------------------------------------------------------


# --- what is there already -------------------------------------------------------------------------------------------


# --- objects that belong to the Job ----------------------------------------------------------------------------------


# --- the server's version --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "version",
    [
        {"major": "1", "minor": "33"},
        {"major": "1", "minor": "33+"},
        {"major": "2", "minor": "0"},
        {"major": "1"},
        {"major": "", "minor": ""},
        {"major": "1", "minor": "x"},
    ],
)
def test_a_new_or_unknown_version_is_taken(version: dict[str, str]) -> None:
    check_version(MemoryApi({"/version": version}).api)


@pytest.mark.parametrize(
    ("error", "is_raised"),
    [
        (AccessDenied("no", status=401), True),
        (ServerUnreachable("no", status=0), True),
        (AccessDenied("no", status=403), False),
        (ApiError("no", status=500), False),
    ],
)
def test_a_server_that_does_not_say_its_version_is_taken(error: ApiError, is_raised: bool) -> None:
    api = MemoryApi()
    api.answers["GET /version"] = [error]
    if not is_raised:
        check_version(api.api)
        return
    with pytest.raises(ApiError):
        check_version(api.api)
