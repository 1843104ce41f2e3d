"""The Serve application, and a service on this machine: started, watched, stopped."""

from __future__ import annotations

import ipaddress
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rakv_cluster.config import Settings
from rakv_cluster.errors import ConfigError, RakvError

# Read by Ray when it is imported: no usage report leaves this machine.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# By processes that it starts: looking at everything ten times a second, Serve's controller takes a
# seventh of a core, with what it makes others do, from a model that decodes on the same ones. What
# it finds out is up to a second old either way.
os.environ.setdefault("RAY_SERVE_CONTROL_LOOP_INTERVAL_S", "0.5")
# The controller kills a proxy that is not ready after three times this, and with it the start of a
# service: a busy machine needs more than Ray's 15 s. All that Serve waits for one are 60 s.
os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "20")

import ray
from ray import serve
from ray.serve.config import (
    DEFAULT_REQUEST_ROUTER_PATH,
    AutoscalingConfig,
    AutoscalingPolicy,
    HTTPOptions,
    RequestRouterConfig,
)

from rakv_cluster.cluster.service import start_cluster_store, stop_cluster_store
from rakv_cluster.serving.handles import translated
from rakv_cluster.serving.ingress import Ingress
from rakv_cluster.serving.stores import cluster_store_settings, damage_notices, disk_problem
from rakv_cluster.serving.tls import tls_files
from rakv_cluster.serving.worker import Worker
from rakv_cluster.telemetry import Figures

APP_NAME = "rakv"
_INGRESS_REQUESTS = 1024
_SPARE_REQUESTS = 16
_FIGURES_TIMEOUT_S = 10.0
_HAPROXY = "RAY_SERVE_ENABLE_HA_PROXY"
_SCALING = "rakv_cluster.routing.autoscaling:BacklogPolicy"
_SCALING_PERIOD_S = 1.0
_SCALING_WINDOW_S = 3.0
_ROUTERS = {
    "expected_time": "rakv_cluster.routing.request_router:ExpectedTimeRouter",
    "power_of_two": DEFAULT_REQUEST_ROUTER_PATH,
}


@dataclass(frozen=True, slots=True)
class Running:
    """A started service: where it answers, and the address that Ray's own processes bound.

    ``notices`` is what a person should know about how it started.
    """

    url: str
    node_address: str
    notices: tuple[str, ...]

    @property
    def on_loopback(self) -> bool:
        """Whether nothing of it can be reached from another machine."""
        return ipaddress.ip_address(self.node_address).is_loopback


def refuse_haproxy() -> None:
    """Raise :class:`ConfigError` where Serve would go around the request router."""
    if os.environ.get(_HAPROXY, "0") == "1":
        raise ConfigError(
            f"{_HAPROXY}=1: in HAProxy mode Serve goes around request routers and binds every "
            "address; unset it"
        )


def build(settings: Settings) -> serve.Application:
    """The application: Ingress in front of ``settings.replicas`` Workers."""
    open_requests = settings.max_running + settings.max_waiting
    worker = serve.deployment(
        Worker,
        name="Worker",
        **_scaling(settings),
        # The engine owns the only long queue and answers 429 itself: Serve lets a little more in.
        max_ongoing_requests=open_requests + _SPARE_REQUESTS,
        max_queued_requests=open_requests,
        ray_actor_options={"num_cpus": 0, "num_gpus": 1 if settings.device == "cuda" else 0},
        health_check_period_s=5,
        health_check_timeout_s=30,
        graceful_shutdown_timeout_s=15,
        request_router_config=RequestRouterConfig(
            request_router_class=_ROUTERS[settings.router],
            request_routing_stats_period_s=1.0,
            request_routing_stats_timeout_s=5.0,
        ),
    )
    ingress = serve.deployment(
        Ingress,
        name="Ingress",
        num_replicas=1,
        max_ongoing_requests=_INGRESS_REQUESTS,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=5,
    )
    return ingress.bind(settings, worker.bind(settings))


def _scaling(settings: Settings) -> dict[str, Any]:
    """A fixed number of replicas, or bounds and the policy that moves between them."""
    if settings.max_replicas <= settings.replicas:
        return {"num_replicas": settings.replicas}
    policy = AutoscalingPolicy(
        policy_function=_SCALING,
        policy_kwargs={"target_backlog_ms": settings.target_backlog_ms},
    )
    config = AutoscalingConfig(
        min_replicas=settings.replicas,
        max_replicas=settings.max_replicas,
        policy=policy,
        metrics_interval_s=_SCALING_PERIOD_S,
        look_back_period_s=_SCALING_WINDOW_S,
        upscale_delay_s=settings.scale_up_delay_s,
        downscale_delay_s=settings.scale_down_delay_s,
    )
    return {"autoscaling_config": config}


@contextmanager
def running(settings: Settings, *, on_ray: Callable[[], None] = lambda: None) -> Iterator[Running]:
    """A one-node service in a Ray of its own, up while the context lasts.

    ``on_ray`` is called once Ray runs, before the long rest of the start: the time to install
    signal handlers, since Ray installs its own. A store folder that cannot be used costs the disk
    tier only. Raises :class:`ConfigError` if it cannot start. Stops exactly what it started.
    """
    refuse_haproxy()
    notices: tuple[str, ...] = ()
    if settings.store == "tiered" and (problem := disk_problem(settings.store_path)):
        notices = (f"serving without the disk tier, its folder cannot be used: {problem}",)
        settings = settings.model_copy(update={"store": "memory"})
    ray.init(
        address="local",
        include_dashboard=False,
        log_to_driver=False,
        logging_level="WARNING",
    )
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    try:
        on_ray()
        with _shards(settings), _application(settings):
            yield Running(
                f"{'https' if settings.has_tls else 'http'}://{_bracketed(settings.host)}:{settings.port}",
                ray.util.get_node_ip_address(),
                (*notices, *damage_notices(figures_of_one(), settings.store_path)),
            )
    finally:
        ray.shutdown()


@contextmanager
def _shards(settings: Settings) -> Iterator[None]:
    """The nodes' disk shards, outliving the replicas, which flush into them as they stop."""
    if settings.store != "tiered":
        yield
        return
    store = cluster_store_settings(settings)
    start_cluster_store(store)
    try:
        yield
    finally:
        stop_cluster_store(store)


@contextmanager
def _application(settings: Settings) -> Iterator[None]:
    serve.start(
        proxy_location="HeadOnly",
        http_options=_http_options(settings),
        logging_config={"enable_access_log": False},
    )
    try:
        try:
            serve.run(build(settings), name=APP_NAME, route_prefix="/")
        except RuntimeError as error:
            raise ConfigError(f"the service did not start: {error}") from error
        yield
    finally:
        serve.shutdown()


def _http_options(settings: Settings) -> HTTPOptions:
    """Raises :class:`ConfigError` for TLS files that do not belong together."""
    if not settings.has_tls:
        return HTTPOptions(host=settings.host, port=settings.port)
    tls_files(settings)
    return HTTPOptions(
        host=settings.host,
        port=settings.port,
        ssl_certfile=str(settings.tls_cert_file),
        ssl_keyfile=str(settings.tls_key_file),
    )


def figures_of_one() -> Figures:
    """One replica's figures; none if it does not answer soon, or dies over it."""
    worker = serve.get_deployment_handle("Worker", APP_NAME).options(method_name="stats")
    try:
        with translated():
            figures: dict[str, Figures] = worker.remote().result(timeout_s=_FIGURES_TIMEOUT_S)
    except (TimeoutError, RakvError):
        return {}
    return next(iter(figures.values()))


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
