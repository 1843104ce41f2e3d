"""The application as Serve's own tools start it: ``serve run``, ``serve deploy``, KubeRay.

``import_path: rakv_cluster.serving.deploy:application``, with settings as ``args``, as in the
commented deploy/serve.yaml.
"""

from __future__ import annotations

from typing import Any

from ray import serve

from rakv_cluster.cluster.service import start_cluster_store
from rakv_cluster.config import load_settings
from rakv_cluster.errors import ConfigError
from rakv_cluster.serving.app import build, refuse_haproxy
from rakv_cluster.serving.auth import configured_keys
from rakv_cluster.serving.stores import cluster_store_settings


def application(args: dict[str, Any]) -> serve.Application:
    """Ingress and Workers for a Ray cluster that is there already; ``args`` are settings.

    They win over ``RAKV_*`` of the environment in which Serve builds the application. ``host`` has
    no default here: Serve binds its proxy where ``http_options`` says, and only what ``args`` says
    of it tells whether callers need keys. Starts a shard on every node, which outlives the
    application, as a store should. Raises :class:`ConfigError`.
    """
    refuse_haproxy()
    if "host" not in args:
        raise ConfigError(
            "setting 'host' is missing in args: repeat http_options' host, which decides whether "
            "API keys are required",
            field="host",
        )
    settings = load_settings(args)
    configured_keys(settings)
    if settings.store == "tiered":
        start_cluster_store(cluster_store_settings(settings))
    return build(settings)
