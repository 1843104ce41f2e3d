"""Clients of a running service."""

from rakv_cluster.client.answers import Answer
from rakv_cluster.client.async_http import AsyncClient, AsyncStream
from rakv_cluster.client.http import Client, Stream
from rakv_cluster.client.requests import Document, Message, Options
from rakv_cluster.client.retries import RetryPolicy

__all__ = [
    "Answer",
    "AsyncClient",
    "AsyncStream",
    "Client",
    "Document",
    "Message",
    "Options",
    "RetryPolicy",
    "Stream",
]
