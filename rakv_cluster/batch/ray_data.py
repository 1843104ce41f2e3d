"""Questions of a Ray Data set, asked of a running service.

    answers = ray.data.read_parquet("questions").map_batches(
        AskService,
        fn_constructor_kwargs={"url": "http://127.0.0.1:8000", "options": {"max_tokens": 64}},
        batch_size=32,
        concurrency=2,
    )

Needs the ``[data]`` extra. Sort the set by document first: rows that share one are then asked one
after another, which is what the cache is for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np

from rakv_cluster.batch.journal import RowResult
from rakv_cluster.batch.runner import row_result
from rakv_cluster.client import Answer, AsyncClient, Document, Options, RetryPolicy
from rakv_cluster.client.transport import DEFAULT_URL

Columns = dict[str, np.ndarray[Any, Any]]

PATIENT = RetryPolicy(attempts=20, max_s=60.0)


class AskService:
    """For ``map_batches``: asks column ``question`` about the text in column ``document``, where
    there is one, and adds ``text``, ``error``, ``prompt_tokens``, ``cached_tokens`` and
    ``output_tokens``.

    A row that the service refuses gets its ``error``; no service or no access fails the batch,
    which Ray tries again as it is told to. Every process has a client of its own; ``window``
    requests of it run at once.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        api_key: str = "",
        options: Options | None = None,
        window: int = 8,
        retries: RetryPolicy = PATIENT,
    ) -> None:
        self._url = url
        self._api_key = api_key
        self._options: Options = options or {}
        self._window = window
        self._retries = retries

    def __call__(self, batch: Mapping[str, np.ndarray[Any, Any]]) -> Columns:
        """The batch's columns and the answers'."""
        questions = [str(question) for question in batch["question"]]
        texts = [str(text or "") for text in batch.get("document", [""] * len(questions))]
        answers = asyncio.run(self._ask_all(questions, texts))
        return {
            **batch,
            "text": np.array([row.text for row in answers], dtype=object),
            "error": np.array([row.error for row in answers], dtype=object),
            "prompt_tokens": np.array([row.prompt_tokens for row in answers]),
            "cached_tokens": np.array([row.cached_tokens for row in answers]),
            "output_tokens": np.array([row.output_tokens for row in answers]),
        }

    async def _ask_all(self, questions: list[str], texts: list[str]) -> list[RowResult]:
        window = asyncio.Semaphore(self._window)
        async with AsyncClient(self._url, api_key=self._api_key, retries=self._retries) as client:

            async def ask(index: int) -> Answer:
                documents = [Document(texts[index])] if texts[index] else []
                return await client.chat(questions[index], documents=documents, **self._options)

            async def bounded(index: int) -> RowResult:
                async with window:
                    return await row_result(index, ask)

            return await asyncio.gather(*map(bounded, range(len(questions))))
