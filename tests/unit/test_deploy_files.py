"""What deploy/ says is what Ray, Serve, Kubernetes and systemd take, closed by default.

Ray's cluster files are checked by Ray's own schema, Serve's by its own model, and core Kubernetes
objects (also the pods inside the RayService) by Kubernetes' published schema. Nothing here knows
KubeRay's schema: of the RayService itself only the fields that we rely on are checked. The image is
not built here (there is no container engine): its file is read.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import ray.autoscaler
import yaml
from pydantic import BaseModel
from ray.serve.config import AutoscalingConfig
from ray.serve.schema import (
    DeploymentSchema,
    HTTPOptionsSchema,
    ServeApplicationSchema,
    ServeDeploySchema,
)

import rakv_cluster
from rakv_cluster.config import is_loopback, load_settings

DEPLOY = Path(rakv_cluster.__file__).parent.parent / "deploy"
CLUSTERS = ("ray-cluster.local.yaml", "ray-cluster.aws.yaml")
SERVE_FILES = ("serve.yaml", "serve.gpu.yaml")
KUBERNETES = "1.32"


def load(name: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((DEPLOY / name).read_text())
    return content


def kuberay() -> dict[str, dict[str, Any]]:
    documents = yaml.safe_load_all((DEPLOY / "kuberay" / "rayservice.yaml").read_text())
    return {document["kind"]: document for document in documents}


def serve_configs() -> Iterator[tuple[str, dict[str, Any]]]:
    for name in SERVE_FILES:
        yield name, load(name)
    yield "rayservice.yaml", yaml.safe_load(kuberay()["RayService"]["spec"]["serveConfigV2"])


def pod_specs() -> list[dict[str, Any]]:
    cluster = kuberay()["RayService"]["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [group["template"] for group in groups]


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_cluster_file_follows_rays_schema(name: str) -> None:
    schema = json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text())

    # As `ray up` does: after its own defaults have filled in what a file leaves out.
    cluster = load(name)
    cluster.pop("min_workers", None)  # of the local provider; Ray turns it into a node type
    jsonschema.validate(cluster, schema)

    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**cluster, "head_start_commands": []}, schema)


@pytest.mark.parametrize("name", CLUSTERS)
def test_every_ray_command_of_a_cluster_has_the_token(name: str) -> None:
    cluster = load(name)
    commands = cluster["head_start_ray_commands"] + cluster["worker_start_ray_commands"]
    environment = (DEPLOY / "ray.env").read_text()

    assert all(command.startswith(". ~/rakv/ray.env && ") for command in commands)
    assert "export RAY_AUTH_MODE=token" in environment
    assert cluster["file_mounts"]["~/rakv/ray-token"] == "~/.rakv-ray-token"
    assert 'RAY_AUTH_TOKEN_PATH="$HOME/rakv/ray-token"' in environment


def test_serve_is_set_on_a_cluster_as_rakv_serve_sets_it() -> None:
    source = (DEPLOY.parent / "rakv_cluster" / "serving" / "app.py").read_text()
    environment = (DEPLOY / "ray.env").read_text()

    ours = dict(re.findall(r'setdefault\("(RAY_SERVE_\w+)", "([^"]*)"\)', source))
    exported = dict(re.findall(r"^export (RAY_SERVE_\w+)=(\S+)$", environment, re.MULTILINE))
    assert ours == exported != {}


@pytest.mark.parametrize("name", CLUSTERS)
def test_no_dashboard_of_a_cluster_can_be_reached_from_outside(name: str) -> None:
    text = (DEPLOY / name).read_text()
    assert re.findall(r"--dashboard-host[= ](\S+)", text) == ["127.0.0.1"]


@pytest.mark.parametrize(("name", "config"), list(serve_configs()))
def test_a_serve_file_is_what_serve_and_our_settings_accept(
    name: str, config: dict[str, Any]
) -> None:
    parsed = ServeDeploySchema.model_validate(config)
    (application,) = parsed.applications

    settings = load_settings(application.args, environ={})

    assert application.import_path == "rakv_cluster.serving.deploy:application"
    assert settings.host == parsed.http_options.host, "args.host decides whether keys are needed"
    assert is_loopback(settings.host) or settings.has_api_keys
    assert {one.name for one in application.deployments} == {"Ingress", "Worker"}


def unknown(config: dict[str, Any], model: type[BaseModel]) -> set[str]:
    return set(config) - set(model.model_fields)


@pytest.mark.parametrize(("name", "config"), list(serve_configs()))
def test_a_serve_file_has_no_key_that_serve_would_ignore(name: str, config: dict[str, Any]) -> None:
    (application,) = config["applications"]

    assert unknown(config, ServeDeploySchema) == set()
    assert unknown(config["http_options"], HTTPOptionsSchema) == set()
    assert unknown(application, ServeApplicationSchema) == set()
    for deployment in application["deployments"]:
        assert unknown(deployment, DeploymentSchema) == set()
        assert unknown(deployment.get("autoscaling_config", {}), AutoscalingConfig) == set()


@pytest.mark.parametrize("kind", ["NetworkPolicy", "PodDisruptionBudget"])
def test_a_core_object_follows_kubernetes_schema(kind: str) -> None:
    declared = kuberay()[kind]
    kubernetes_validate.validate(declared, KUBERNETES, strict=True)

    declared["spec"]["podSelecter"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(declared, KUBERNETES, strict=True)


@pytest.mark.parametrize("index", [0, 1], ids=["head", "worker"])
def test_a_pod_follows_kubernetes_schema(index: int) -> None:
    template = pod_specs()[index]
    metadata = {"name": "pod"} | template["metadata"]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}

    kubernetes_validate.validate(pod, KUBERNETES, strict=True)

    pod["spec"]["containers"][0]["imagePullPolice"] = "Always"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


@pytest.mark.parametrize("index", [0, 1], ids=["head", "worker"])
def test_a_pod_has_no_privilege_and_no_unbounded_resource(index: int) -> None:
    spec = pod_specs()[index]["spec"]

    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["automountServiceAccountToken"] is False
    for container in spec["containers"] + spec["initContainers"]:
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["resources"]["limits"] == container["resources"]["requests"]
    assert all("hostPath" not in volume for volume in spec["volumes"])


def test_the_kubernetes_cluster_asks_for_a_token_and_the_ray_that_we_pin() -> None:
    cluster = kuberay()["RayService"]["spec"]["rayClusterConfig"]

    assert cluster["authOptions"] == {"mode": "token"}
    assert cluster["rayVersion"] == ray.__version__


def test_the_image_runs_as_nobody_special_and_has_no_model() -> None:
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    instructions = [line.split()[0] for line in lines if re.match(r"[A-Z]+ ", line)]
    users = [line.split()[1] for line in lines if line.startswith("USER ")]
    text = "\n".join(line for line in lines if not line.strip().startswith("#"))

    assert users == ["10001:10001"]
    assert instructions.index("USER") > max(i for i, x in enumerate(instructions) if x == "RUN")
    assert "model fetch" not in text
    assert "RAY_AUTH_MODE=token" in text
    assert "0.0.0.0" not in text


def test_what_the_image_copies_is_in_the_build_context() -> None:
    root = DEPLOY.parent
    allowed = [
        line[1:] for line in (root / ".dockerignore").read_text().splitlines() if line[:1] == "!"
    ]
    copies = re.findall(r"^COPY (?!--)(.+)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    sources = [source for copy in copies for source in copy.split()[:-1]]

    assert sources
    assert set(sources) <= set(allowed)
    assert all((root / source).exists() for source in sources)


def test_the_unit_is_one_that_systemd_accepts(tmp_path: Path) -> None:
    unit = (DEPLOY / "systemd" / "rakv.service").read_text()
    for line in ("IPAddressDeny=any", "NoNewPrivileges=yes", "RAY_AUTH_MODE=token"):
        assert line in unit
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed; only the lines above were checked")
    copy = tmp_path / "rakv.service"
    # It also looks for the program, which is not installed here.
    copy.write_text(re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", unit, flags=re.MULTILINE))

    done = subprocess.run(
        [analyze, "verify", "--man=no", str(copy)], capture_output=True, text=True, check=False
    )

    assert (done.returncode, "rakv.service:" in done.stderr) == (0, False), done.stderr
