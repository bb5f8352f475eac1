"""Requests to the handlers of the dashboard, without a server."""

import asyncio
import inspect
import json
from collections.abc import Iterable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route

from mlbench_cli.server.config import ROLE, Role


def ask(routes: Iterable[BaseRoute], path: str, *, method: str = "GET", role: Role = Role.READ) -> Any:
    """The response of the handler for `path`, which may have a query. Errors are raised."""
    path, _, query = path.partition("?")
    scope: dict[str, Any] = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": query.encode(),
        "headers": [],
        "server": ("127.0.0.1", 8080),
        "scheme": "http",
        ROLE: role,
    }
    for route in routes:
        match, more = route.matches(scope)
        if match is Match.FULL:
            assert isinstance(route, Route)
            answer: Any = route.endpoint(Request({**scope, **more}))
            return asyncio.run(_await(answer)) if inspect.isawaitable(answer) else answer
    raise AssertionError(f"{method} {path} has no route")


async def _await(answer: Any) -> Any:
    return await answer


def read_json(response: Response) -> Any:
    """The document of a response."""
    return json.loads(bytes(response.body))
