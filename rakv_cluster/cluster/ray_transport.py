"""Calls to shard actors over Ray."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from rakv_cluster.cluster.peers import Answer, Call, Failed, Failure


def shard_name(service: str, node: str) -> str:
    """The Ray name of the shard actor that serves ``service`` on ``node``."""
    return f"rakv-shard/{service}/{node}"


class RayTransport:
    """Finds shard actors by name, and again by name when one has died."""

    def __init__(self, service: str, namespace: str) -> None:
        self._service = service
        self._namespace = namespace
        self._lock = threading.Lock()
        self._handles: dict[str, Any] = {}

    def call(self, calls: Sequence[Call], timeout_s: float) -> list[Answer[object] | Failed]:
        """See :class:`~rakv_cluster.cluster.peers.Transport`. Blocks: not for an event loop."""
        sent = [self._submit(call) for call in calls]
        wait([future for future in sent if isinstance(future, Future)], timeout_s)
        return [self._outcome(call, future) for call, future in zip(calls, sent, strict=True)]

    def _submit(self, call: Call) -> Future[object] | Failed:
        try:
            handle = self._handle(call.node)
            # A future, since ray.get warns in the process of an asynchronous actor.
            future: Future[object] = getattr(handle, call.method).remote(*call.args).future()
        except (ValueError, RayError):  # no actor of that name (any more)
            self._forget(call.node)
            return Failed(Failure.GONE)
        except AttributeError:  # another program's actor under this name
            return Failed(Failure.RAISED)
        return future

    def _outcome(self, call: Call, sent: Future[object] | Failed) -> Answer[object] | Failed:
        if isinstance(sent, Failed):
            return sent
        try:
            return Answer(sent.result(timeout=0))
        except TimeoutError:
            return Failed(Failure.LATE)
        except RayActorError:
            self._forget(call.node)
            return Failed(Failure.GONE)
        except Exception:  # noqa: BLE001  # what the method raised, as its own class and RayTaskError
            return Failed(Failure.RAISED)

    def _handle(self, node: str) -> Any:
        with self._lock:
            handle = self._handles.get(node)
        if handle is None:
            handle = ray.get_actor(shard_name(self._service, node), self._namespace)
            with self._lock:
                self._handles[node] = handle
        return handle

    def _forget(self, node: str) -> None:
        with self._lock:
            self._handles.pop(node, None)
