"""Limits for unauthenticated connections: few and short, so that they cannot crowd out the owner's.

Imported only by the server, because uvicorn is an extra.
"""

import asyncio
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from mlbench_cli.server.config import ADMIT

TOKEN_SECONDS = 2.0  # before a new connection must authenticate
LOOKS = 4  # at a connection in that time
MAX_STRANGERS = 200  # unauthenticated connections; one more drops the oldest


class GuardedProtocol(H11Protocol):
    """HTTP/1.1 on one connection, which is dropped unless a request is authenticated in time."""

    _strangers: dict["GuardedProtocol", asyncio.TimerHandle] = {}  # noqa: RUF012 - of all connections, the oldest first

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.app = self._with_admission(self.app)

    def connection_made(self, transport: Any) -> None:
        """Start the timer of a new connection."""
        super().connection_made(transport)
        while len(self._strangers) >= MAX_STRANGERS:
            next(iter(self._strangers))._drop()
        self._look(LOOKS)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop tracking a closed connection."""
        self._admit()
        super().connection_lost(exc)

    def _with_admission(self, app: Any) -> ASGIApp:
        async def admitting(scope: Scope, receive: Receive, send: Send) -> None:
            await app({**scope, ADMIT: self._admit}, receive, send)

        return admitting

    def _look(self, left: int) -> None:
        """Drop it after as many looks. A server that is late reads what has arrived between two of them."""
        if left:
            self._strangers[self] = self.loop.call_later(TOKEN_SECONDS / LOOKS, self._look, left - 1)
        else:
            self._drop()

    def _admit(self) -> None:
        if (timer := self._strangers.pop(self, None)) is not None:
            timer.cancel()

    def _drop(self) -> None:
        self._admit()
        self.transport.abort()
