"""Connections of the dashboard: those that show no token are few and short, so that they never cost the owner's theirs.

Imported by the server alone, since uvicorn is an extra.
"""

import asyncio
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from mlbench_cli.server.config import ADMIT

TOKEN_SECONDS = 2.0  # in which a new connection must have shown the token
MAX_STRANGERS = 200  # connections without a token; one more drops the oldest


class GuardedProtocol(H11Protocol):
    """HTTP/1.1 on one connection, which is dropped unless a request with the token is admitted in time."""

    _strangers: dict["GuardedProtocol", asyncio.TimerHandle] = {}  # noqa: RUF012 - of all connections, the oldest first

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.app = self._with_admission(self.app)

    def connection_made(self, transport: Any) -> None:
        """Give the new connection its time."""
        super().connection_made(transport)
        while len(self._strangers) >= MAX_STRANGERS:
            next(iter(self._strangers))._drop()
        self._strangers[self] = self.loop.call_later(TOKEN_SECONDS, self._drop)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._admit()
        super().connection_lost(exc)

    def _with_admission(self, app: Any) -> ASGIApp:
        async def admitting(scope: Scope, receive: Receive, send: Send) -> None:
            await app({**scope, ADMIT: self._admit}, receive, send)

        return admitting

    def _admit(self) -> None:
        if (timer := self._strangers.pop(self, None)) is not None:
            timer.cancel()

    def _drop(self) -> None:
        self._admit()
        self.transport.abort()
