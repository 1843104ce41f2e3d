"""The replicas behind a Serve handle, and Ray's exceptions in the terms of our tree."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager

from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
)
from ray.serve.handle import DeploymentHandle

from rakv_cluster.engine.request import EngineEvent, EngineRequest
from rakv_cluster.errors import Overloaded, RakvError, Unavailable
from rakv_cluster.model.card import ModelCard
from rakv_cluster.serving.backend import ReplicaLost


class HandleBackend:
    """A :class:`~rakv_cluster.serving.backend.Backend` over the Worker deployment."""

    def __init__(self, worker: DeploymentHandle) -> None:
        self._describe = worker.options(method_name="describe")
        self._stats = worker.options(method_name="stats")
        self._generate = worker.options(method_name="generate", stream=True)

    async def describe(self) -> ModelCard:
        with _translated():
            card: ModelCard = await self._describe.remote()
            return card

    async def stats(self) -> dict[str, float]:
        with _translated():
            figures: dict[str, float] = await self._stats.remote()
            return figures

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        with _translated():
            events = self._generate.remote(request)
            try:
                async for event in events:
                    yield event
            finally:
                # No effect on a call that has ended.
                events.cancel()


@contextmanager
def _translated() -> Iterator[None]:
    """Raise what Ray raises as one of ours; an exception of ours comes out of its wrapping."""
    try:
        yield
    except RayTaskError as error:
        if isinstance(error.cause, RakvError):
            raise error.cause from None
        raise RakvError("the replica failed on this request; its log says more") from error
    except BackPressureError as error:
        raise Overloaded("too many requests wait for a replica", retry_after_s=1.0) from error
    except DeploymentUnavailableError as error:
        raise Unavailable("no replica can be started", retry_after_s=5.0) from error
    except (RayActorError, ActorUnavailableError, ReplicaUnavailableError) as error:
        raise ReplicaLost("the replica is gone", retry_after_s=1.0) from error
