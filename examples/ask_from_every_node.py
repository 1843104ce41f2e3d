"""Questions about documents, asked by Ray Data from several nodes of a Ray cluster at once.

    ray start --head --port 6379                # on one node; on the others:
    ray start --address HEAD:6379
    RAY_ADDRESS=HEAD:6379 python examples/ask_from_every_node.py questions.jsonl answers

``questions.jsonl`` has a ``document`` and a ``question`` per line. ``answers`` becomes a folder of
JSON files with these, the answers, the tokens that were reused, and the node that asked. ``--url``
must lead to the service from every node. Needs the ``[data]`` extra.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import numpy as np
import ray
import ray.data

from rakv_cluster.batch.ray_data import AskService, Columns


class AskFromHere(AskService):
    """Also says on which node it ran."""

    def __call__(self, batch: Mapping[str, np.ndarray[Any, Any]]) -> Columns:
        answers = super().__call__(batch)
        here = ray.get_runtime_context().get_node_id()
        return answers | {"node": np.full(len(answers["text"]), here, dtype=object)}


def main() -> None:
    """Read, ask, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("questions")
    parser.add_argument("answers")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--nodes", type=int, default=2, help="that ask at once")
    given = parser.parse_args()

    ray.init()
    # Or the node that is ready first takes all the work.
    ray.data.DataContext.get_current().wait_for_min_actors_s = 60
    questions = ray.data.read_json(given.questions, lines=True)
    # Rows that share a document follow each other: that is what the cache is for. Blocks are what
    # is spread over the nodes: several for each.
    blocks = questions.sort("document").repartition(4 * given.nodes)
    blocks.map_batches(
        AskFromHere,
        fn_constructor_kwargs={
            "url": given.url,
            "options": {"max_tokens": 64, "temperature": 0},
        },
        batch_size=8,
        concurrency=given.nodes,
        num_cpus=0.5,
        scheduling_strategy="SPREAD",
    ).write_json(given.answers)


if __name__ == "__main__":
    main()
