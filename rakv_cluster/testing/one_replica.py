"""What explains routes where there is nothing to choose."""

from __future__ import annotations

import numpy as np

from rakv_cluster.engine.request import EngineRequest
from rakv_cluster.routing.policy import Decision, RoutePolicy, RouteRequest, RouteSettings
from rakv_cluster.testing.clock import ManualClock


class OneReplica:
    """A service with one replica, named ``only``, of which nothing has been measured."""

    async def explain(self, request: EngineRequest) -> Decision:
        policy = RoutePolicy(RouteSettings(), ManualClock(), np.random.default_rng(0))
        policy.view.set_replicas({"only": "n0"}, policy.now_s)
        chunks = request.prompt.chunks
        asked = RouteRequest(
            request_id=request.request_id,
            keys=tuple(chunk.prefix_key for chunk in chunks),
            chunk_ends=np.asarray([chunk.end for chunk in chunks], dtype=np.int64),
            prompt_tokens=len(request.prompt.token_ids),
            output_tokens=float(request.max_tokens),
        )
        return policy.decide(asked)
