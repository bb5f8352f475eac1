"""The dashboard as an ASGI application."""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from mlbench_cli.errors import MlbenchError
from mlbench_cli.server import pages, rest
from mlbench_cli.server.config import ServerConfig
from mlbench_cli.server.live import Feeds
from mlbench_cli.server.security import MAX_BODY_BYTES, BodyTooLong, Guard
from mlbench_cli.server.statuses import status_of


def make_app(config: ServerConfig) -> ASGIApp:
    """The dashboard behind its guard. Its only state is the feeds of followed runs."""
    feeds = Feeds(config)
    routes = [*rest.make_routes(config, feeds), *pages.make_routes(config)]
    return Starlette(
        routes=routes,
        middleware=[Middleware(Guard, config)],
        exception_handlers={
            MlbenchError: _explain,
            BodyTooLong: _refuse_body,
            HTTPException: _explain_status,
            Exception: _explain_crash,
        },
    )


async def _explain(request: Request, error: Exception) -> Response:
    assert isinstance(error, MlbenchError)
    return _answer(request, status_of(error), error.message, error.hint)


async def _refuse_body(request: Request, error: Exception) -> Response:
    return _answer(request, 413, f"The request is larger than {MAX_BODY_BYTES} bytes.")


async def _explain_status(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    texts = {404: "There is no such page.", 405: f"{request.method} is not supported here."}
    return _answer(request, error.status_code, texts.get(error.status_code, str(error.detail)))


async def _explain_crash(request: Request, error: Exception) -> Response:
    kind = (
        f"Operating system error: {error}" if isinstance(error, OSError) else f"Internal error: {type(error).__name__}"
    )
    return _answer(request, 500, f"{kind}.")


def _answer(request: Request, status: int, message: str, hint: str | None = None) -> Response:
    """A page for a browser, JSON for programs."""
    if request.url.path.startswith("/api/") or "text/html" not in request.headers.get("accept", ""):
        return JSONResponse({"message": message, "hint": hint}, status)
    return pages.render_problem(request, status, message, hint)
