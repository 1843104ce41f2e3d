"""A service's start, where a replica is lost on the way."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
import ray
from ray import cloudpickle, serve

from rakv_cluster.serving.app import APP_NAME, figures_of_one

# Workers cannot import a test module.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.cluster


class Dying:
    """A replica that dies when it is asked."""

    async def stats(self) -> None:
        os._exit(1)


@pytest.fixture
def dying() -> Iterator[None]:
    ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    serve.start(proxy_location="Disabled")
    worker = serve.deployment(Dying, name="Worker", ray_actor_options={"num_cpus": 0})
    serve.run(worker.bind(), name=APP_NAME, route_prefix=None)
    yield
    serve.shutdown()
    ray.shutdown()


@pytest.mark.usefixtures("dying")
def test_a_replica_that_dies_while_it_is_asked_has_no_figures() -> None:
    assert figures_of_one() == {}
