"""TLS on both surfaces of a real cluster, with a certificate of the test's own authority."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import pytest
import trustme
from typer.testing import CliRunner

from rakv_cluster.cli.local_service import free_port
from rakv_cluster.cli.main import app
from rakv_cluster.client import Client
from rakv_cluster.client.grpc import GrpcClient
from rakv_cluster.client.retries import NO_RETRIES
from rakv_cluster.config import load_settings
from rakv_cluster.errors import ConfigError, Unavailable
from rakv_cluster.testing.processes import served


@dataclass(frozen=True, slots=True)
class Files:
    """A certificate for loopback, its key, and the authority that vouches for it."""

    cert: Path
    key: Path
    authority: Path
    tls: ssl.SSLContext


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1", "localhost")
    issued.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    issued.private_key_pem.write_to_path(folder / "key.pem")
    authority.cert_pem.write_to_path(folder / "ca.pem")
    tls = ssl.create_default_context(cafile=folder / "ca.pem")
    return Files(folder / "cert.pem", folder / "key.pem", folder / "ca.pem", tls)


@dataclass(frozen=True, slots=True)
class Service:
    """Where it answers."""

    url: str
    target: str


@pytest.fixture(scope="module")
def service(
    files: Files, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    folder, port = tmp_path_factory.mktemp("service"), free_port()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAKV_GRPC_PORT", str(port))
        environment.setenv("RAKV_TLS_CERT_FILE", str(files.cert))
        environment.setenv("RAKV_TLS_KEY_FILE", str(files.key))
        flags = {"model": str(tiny_folder), "set": "store=memory"}
        with served(flags, folder / "serve.log", files.tls) as running:
            yield Service(running.base_url, f"127.0.0.1:{port}")


@pytest.mark.cluster
def test_both_surfaces_answer_over_tls(service: Service, files: Files) -> None:
    credentials = grpc.ssl_channel_credentials(files.authority.read_bytes())
    trusting = httpx.HTTPTransport(verify=files.tls)
    with (
        Client(service.url, transport=trusting) as http,
        GrpcClient(service.target, credentials=credentials) as client,
    ):
        texts = {asked.chat("q", temperature=0, max_tokens=8).text for asked in (http, client)}

    assert len(texts) == 1


@pytest.mark.cluster
def test_who_does_not_know_the_authority_is_not_fooled(service: Service) -> None:
    credentials = grpc.ssl_channel_credentials()
    with (
        Client(service.url, retries=NO_RETRIES) as http,
        GrpcClient(
            service.target, credentials=credentials, retries=NO_RETRIES, timeout_s=20
        ) as client,
    ):
        for asked in (http, client):
            with pytest.raises(Unavailable):
                asked.chat("q")


@pytest.mark.cluster
def test_plain_connections_get_no_answer(service: Service) -> None:
    with (
        Client(service.url.replace("https", "http"), retries=NO_RETRIES) as http,
        GrpcClient(service.target, retries=NO_RETRIES, timeout_s=20) as client,
    ):
        for asked in (http, client):
            with pytest.raises(Unavailable):
                asked.chat("q")


def test_a_certificate_needs_its_key(files: Files, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="need each other"):
        load_settings({"tls_cert_file": files.cert}, environ={})

    other = trustme.CA().issue_cert("localhost")
    other.private_key_pem.write_to_path(tmp_path / "other.pem")
    (tmp_path / "empty.pem").write_text("")
    for key in (tmp_path / "other.pem", tmp_path / "empty.pem", tmp_path / "missing.pem"):
        command = ["serve", "--set", f"tls_cert_file={files.cert}", "--set", f"tls_key_file={key}"]
        done = CliRunner().invoke(app, command)
        assert done.exit_code != 0
        message = str(done.exception) + done.output
        assert str(key) in message
