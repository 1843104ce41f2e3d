"""The OpenAPI description and the application agree.

schemathesis draws requests: what the description allows and what it forbids, and sends them to
the real application, all routes and all middleware, in this process. Replicas alone are scripted.
"""

from __future__ import annotations

import numpy as np
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis import Case
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from rakv_cluster.cluster.admin import StoreAdmin
from rakv_cluster.config import Settings
from rakv_cluster.serving.admin_api import add_cache_routes
from rakv_cluster.serving.cache_api import CacheApi
from rakv_cluster.serving.document_api import add_document_routes
from rakv_cluster.serving.http_app import create_app
from rakv_cluster.serving.route_api import add_route_explanation
from rakv_cluster.telemetry import ServiceMetrics
from rakv_cluster.testing.clock import ManualClock
from rakv_cluster.testing.one_replica import OneReplica
from rakv_cluster.testing.scripted import ScriptedBackend, scripted_service
from rakv_cluster.testing.simulated_shards import SimulatedShards

CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
    unsupported_method,
)


def application() -> object:
    served, metrics = Settings(), ServiceMetrics()
    service = scripted_service(ScriptedBackend(), served, ManualClock())
    shards = SimulatedShards(["n0"], ManualClock(), np.random.default_rng(0))
    admin = StoreAdmin(shards, lambda: ["n0"], ManualClock())
    app = create_app(service, metrics)
    add_route_explanation(app, service, OneReplica())
    cache = CacheApi(service, metrics, admin)
    add_cache_routes(app, cache, served)
    add_document_routes(app, service, cache)
    return app


schema = schemathesis.openapi.from_asgi("/openapi.json", application())
schema.config.generation.update(modes=[GenerationMode.POSITIVE, GenerationMode.NEGATIVE])


@schema.parametrize()
@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
def test_the_application_keeps_to_its_description(case: Case) -> None:
    response = case.call()

    case.validate_response(response, checks=list(CHECKS))
    assert "Traceback" not in response.text
