"""An ASGI application behind a real socket, in a thread of this process."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

_TIMEOUT_S = 60.0


@contextmanager
def http_server(build: Callable[[], Awaitable[FastAPI]]) -> Iterator[str]:
    """Serve what ``build`` makes, on a free loopback port, while the context lasts; its URL.

    ``build`` runs in the server's event loop. Raises ``TimeoutError`` if it does not start.
    """
    started = threading.Event()
    servers: list[uvicorn.Server] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        async def main() -> None:
            config = uvicorn.Config(await build(), log_level="error", lifespan="off")
            servers.append(uvicorn.Server(config))
            started.set()
            await servers[0].serve(sockets=[listener])

        thread = threading.Thread(target=lambda: asyncio.run(main()), name="http-server")
        thread.start()
        try:
            if not started.wait(_TIMEOUT_S):
                raise TimeoutError("the server did not start")
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            for server in servers:
                server.should_exit = True
            thread.join(_TIMEOUT_S)
