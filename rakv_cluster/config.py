"""Settings of a service: read from three places, validated once, frozen afterwards.

Flags win over the environment (``RAKV_PORT``), the environment over a YAML or TOML file. A name
that no setting has is refused in all three, with the nearest name that exists: a misspelt limit
must not become a silent default.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    ByteSize,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)

from rakv_cluster.errors import ConfigError
from rakv_cluster.logs import LogFormat
from rakv_cluster.types import ReuseMode

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ENV_PREFIX = "RAKV_"
NOT_SETTINGS = frozenset({"RAKV_CONFIG", "RAKV_API_KEY", "RAKV_SHARED"})
"""Variables with our prefix that are no settings: the file's path, a client's own key, and the
project's data folder (which tests and benchmarks read)."""

MIB = 1024**2
GIB = 1024**3

Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Bytes = Annotated[ByteSize, Field(ge=0)]


class Settings(BaseModel):
    """Everything that can be set. Byte sizes take ``2GiB``, ``500MB`` or a plain number."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    model: str = Field("smollm2", min_length=1, description="model name, Hugging Face id or folder")
    served_model_name: str = Field("", description="name clients use; empty: the model's own")
    device: Literal["cpu", "cuda"] = Field("cpu", description="where the model runs")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="compute dtype; auto: float32 on the CPU, bfloat16 on a GPU"
    )
    threads: int = Field(
        0, ge=0, description="CPU threads per replica; 0: all cores, shared by the replicas"
    )
    replicas: Count = Field(1, description="copies of the model; with max_replicas, the fewest")
    router: Literal["expected_time", "power_of_two"] = Field(
        "expected_time",
        description="where requests go: to the replica where each should finish first, or to the "
        "less busy one of two at random, whatever they have cached",
    )
    hedge_share: float = Field(
        0.0,
        ge=0,
        le=0.5,
        allow_inf_nan=False,
        description="share of requests, those whose first token is latest, that are sent to a "
        "second replica as well; 0: none",
    )
    max_replicas: int = Field(
        0, ge=0, description="most copies, started and stopped as the backlog asks; 0: no scaling"
    )
    target_backlog_ms: Seconds = Field(
        2000.0, description="backlog per replica that scaling aims at, in ms of work"
    )
    scale_up_delay_s: float = Field(
        10.0, ge=0, allow_inf_nan=False, description="how long more replicas must be wanted first"
    )
    scale_down_delay_s: float = Field(
        300.0, ge=0, allow_inf_nan=False, description="how long fewer replicas must do first"
    )
    fused: Literal["auto", "on", "off"] = Field(
        "auto", description="our own decoder for Llama-type models; auto: where it passes its check"
    )
    native: Literal["auto", "off"] = Field(
        "auto",
        description="CPU kernels compiled at load by gcc, for decode steps up to twice as fast; "
        "auto: where there is a gcc and they pass their check",
    )
    numerics: Literal["uniform", "fast"] = Field(
        "uniform",
        description="uniform: the same bits whatever the batch, speculation or reuse; "
        "fast: PyTorch's fastest kernel for each step, logits differ by rounding",
    )
    packed_budget_bytes: Bytes = Field(
        ByteSize(4 * GIB), description="second copy of the weights for CPU kernels, per replica"
    )
    cuda_graphs: bool = Field(
        False,
        description="record small steps of the fused decoder as CUDA graphs, where they pass its "
        "check; needs device cuda; not yet run on a GPU",
    )

    host: str = Field("127.0.0.1", description="address the HTTP server binds")
    port: int = Field(8000, ge=1, le=65535, description="port the HTTP server binds")
    grpc_host: str = Field("127.0.0.1", description="address the gRPC server binds")
    grpc_port: int = Field(0, ge=0, le=65535, description="port of the gRPC server; 0: none")
    tls_cert_file: Path = Field(
        Path(), description="PEM certificate chain: both servers then speak TLS alone"
    )
    tls_key_file: Path = Field(Path(), description="PEM private key of tls_cert_file")
    api_keys_file: Path = Field(
        Path(), description="file of API keys (see `rakv key`), read again when it changes"
    )
    api_keys: SecretStr = Field(
        SecretStr(""), description="the content of such a file, where there is no file to mount"
    )

    cache_dir: Path = Field(
        Path("~/.cache/rakv"), description="folder for fetched models and, by default, the store"
    )
    store_dir: Path = Field(Path(), description="folder of the KV store; default: CACHE_DIR/store")
    store: Literal["tiered", "memory", "none"] = Field(
        "tiered", description="where KV is kept: RAM and disk, RAM only, or nowhere"
    )
    ram_budget_bytes: Bytes = Field(ByteSize(1 * GIB), description="KV kept in RAM, per replica")
    warm_up_s: float = Field(
        2.0,
        ge=0,
        allow_inf_nan=False,
        description="how long a new replica may take to fill half of its RAM from disks with the "
        "KV used last, before it takes requests; 0: not at all",
    )
    disk_budget_bytes: Bytes = Field(ByteSize(8 * GIB), description="KV kept on disk, per node")
    disk_codec: Literal["lossless", "fp16", "int8"] = Field(
        "lossless",
        description="how KV is kept on disk; fp16 and int8 take half and a quarter, and serve "
        "`reuse: blend` only",
    )
    default_reuse: ReuseMode = Field(
        ReuseMode.EXACT, description="`reuse` of requests that do not say"
    )
    default_max_kl: float = Field(
        0.1,
        gt=0,
        allow_inf_nan=False,
        description="`max_kl` of blended requests that do not say: nats per token, the 95th "
        "percentile that the model's calibration must show",
    )
    calibration_prompts: int = Field(
        16,
        ge=0,
        description="prompts by which a model without calibration is measured, whenever the "
        "service is idle, once a request asks it to blend; 0: only by `rakv calibrate`",
    )
    price_loads: bool = Field(
        True, description="load stored KV only where that should be faster than computing it"
    )
    share_across_classes: bool = Field(
        False,
        description="use KV made by replicas whose kernels, threads or device round differently; "
        "answers are then labelled numerically equivalent",
    )
    single_flight_min_ms: float = Field(
        1000.0,
        ge=0,
        allow_inf_nan=False,
        description="a prefix that takes this long to compute is computed by one replica only, "
        "the others wait for it",
    )
    single_flight_wait_s: Seconds = Field(
        30.0, description="longest wait for another replica, then a request computes it itself"
    )
    chunk_min_tokens: Count = Field(64, description="a chunk is not cut before this length")
    chunk_max_tokens: Count = Field(256, description="a chunk is always cut at this length")

    default_speculation: Literal["auto", "off", "1", "2", "4", "8"] = Field(
        "auto", description="`speculation` of requests that do not say"
    )
    speculation_governor: Literal["bucket", "strict", "throughput"] = Field(
        "bucket",
        description="what drafts may lose: 1% of 1,000 tokens and 5% of a request; 1% of every "
        "request; anything",
    )

    draft_model: str = Field(
        "",
        description="model with the same vocabulary that drafts where that promises more than the "
        "text so far (see `rakv model make-draft`); empty: none",
    )
    self_draft: bool = Field(
        False,
        description="draft with the model's own weights in four bits where that promises more than "
        "the text: 0.6 bytes a weight more; needs the fused decoder on a CPU, and no draft_model",
    )
    draft_kv_budget_bytes: Bytes = Field(
        ByteSize(512 * MIB), description="the draft model's KV of running requests, per replica"
    )

    kv_budget_bytes: Bytes = Field(
        ByteSize(2 * GIB), description="KV of running requests, per replica"
    )
    step_token_budget: Count = Field(512, description="tokens of one engine step")
    max_running: Count = Field(8, description="requests a replica works on at once")
    max_waiting: Count = Field(64, description="requests a replica queues; more get 429")

    log_format: LogFormat = Field(
        "text", description="json: a line per request and event, on the processes' standard error"
    )
    otlp_endpoint: str = Field(
        "", description="where traces go (OTLP over HTTP; the otel extra); empty: none are made"
    )

    request_timeout_s: Seconds = Field(600.0, description="longest time for one request")
    body_limit_bytes: Bytes = Field(ByteSize(8 * MIB), description="largest HTTP request body")
    body_timeout_s: Seconds = Field(60.0, description="longest time for a request body to arrive")
    max_choices: Count = Field(16, description="largest `n`")
    max_documents: Count = Field(256, description="most documents in one request")
    documents_budget_bytes: Bytes = Field(
        ByteSize(64 * MIB), description="texts left under /v1/documents, per tenant"
    )
    max_messages: Count = Field(1024, description="most messages in one request")
    default_max_tokens: Count = Field(
        512, description="output limit of requests that state none (the context's rest if shorter)"
    )

    @field_validator("api_keys_file", "tls_cert_file", "tls_key_file")
    @classmethod
    def _absolute(cls, path: Path) -> Path:
        # The process that reads it may have been started in another folder.
        return path if path == Path() else path.expanduser().absolute()

    @model_validator(mode="after")
    def _consistent(self) -> Settings:
        if self.chunk_min_tokens > self.chunk_max_tokens:
            raise ValueError("chunk_min_tokens is larger than chunk_max_tokens")
        if 0 < self.max_replicas < self.replicas:
            raise ValueError("max_replicas is smaller than replicas")
        if self.api_keys_file != Path() and self.api_keys.get_secret_value():
            raise ValueError("api_keys and api_keys_file are both set; choose one")
        if (self.tls_cert_file == Path()) != (self.tls_key_file == Path()):
            raise ValueError("tls_cert_file and tls_key_file need each other")
        if self.self_draft and self.draft_model:
            raise ValueError("self_draft and draft_model are both set; choose one")
        if self.self_draft and (self.fused == "off" or self.device != "cpu"):
            raise ValueError("self_draft needs the fused decoder on a CPU")
        if self.cuda_graphs and (self.fused == "off" or self.device != "cuda"):
            raise ValueError("cuda_graphs needs the fused decoder and device cuda")
        for host in (self.host, self.grpc_host):
            if not self.has_api_keys and not is_loopback(host):
                raise ValueError(
                    f"{host} can be reached from other machines: set api_keys_file "
                    "(`rakv key new --file FILE --tenant NAME` makes one)"
                )
        return self

    @property
    def cache_path(self) -> Path:
        """``cache_dir`` with ``~`` expanded."""
        return self.cache_dir.expanduser()

    @property
    def store_path(self) -> Path:
        """The store's folder, defaults applied."""
        chosen = self.store_dir.expanduser()
        return chosen if chosen != Path() else self.cache_path / "store"

    @property
    def has_tls(self) -> bool:
        """Whether the servers speak TLS."""
        return self.tls_cert_file != Path()

    @property
    def has_api_keys(self) -> bool:
        """Whether callers need a key."""
        return self.api_keys_file != Path() or bool(self.api_keys.get_secret_value())

    @property
    def threads_per_replica(self) -> int:
        """``threads``, or this machine's cores shared evenly between all replicas there may be."""
        most = max(self.replicas, self.max_replicas)
        return self.threads or max(1, len(os.sched_getaffinity(0)) // most)


def is_loopback(host: str) -> bool:
    """Whether nothing but this machine reaches what is bound to ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def load_settings(
    flags: Mapping[str, object] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> Settings:
    """Merge the sources and validate.

    ``environ`` defaults to the process's; ``file`` to what ``RAKV_CONFIG`` names. Raises
    :class:`ConfigError` naming the source, the setting and, for an unknown one, its neighbour.
    """
    environ = os.environ if environ is None else environ
    if file is None and environ.get("RAKV_CONFIG"):
        file = Path(environ["RAKV_CONFIG"])
    merged: dict[str, object] = {}
    origin: dict[str, str] = {}
    for source, values in _sources(dict(flags or {}), environ, file):
        for name, value in values.items():
            if name not in Settings.model_fields:
                raise ConfigError(_unknown(name, source), field=name)
            merged[name] = value
            origin[name] = source
    try:
        return Settings.model_validate(merged)
    except ValidationError as error:
        raise _config_error(error, origin) from error


def _sources(
    flags: Mapping[str, object], environ: Mapping[str, str], file: Path | None
) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Weakest first, each with the name it has in messages."""
    if file is not None:
        yield f"file {file}", _read_file(file)
    yield (
        "environment",
        {
            name.removeprefix(ENV_PREFIX).lower(): value
            for name, value in environ.items()
            if name.startswith(ENV_PREFIX) and name not in NOT_SETTINGS
        },
    )
    yield "flags", flags


def _read_file(path: Path) -> Mapping[str, object]:
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".toml":
            content: Any = tomllib.loads(text)
        elif path.suffix in {".yaml", ".yml"}:
            content = yaml.safe_load(text)
        else:
            raise ConfigError(f"settings file {path}: its name must end in .yaml, .yml or .toml")
    except (OSError, UnicodeDecodeError, yaml.YAMLError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"settings file {path} cannot be read: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"settings file {path} must be a mapping of setting names to values")
    return content


def nearest(name: str, known: Mapping[str, object]) -> str:
    """``"; did you mean 'x'?"`` for the closest known name, or nothing if none is close."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean '{close[0]}'?" if close else ""


def _unknown(name: str, source: str) -> str:
    shown = ENV_PREFIX + name.upper() if source == "environment" else name
    hint = nearest(name, Settings.model_fields)
    return f"unknown setting '{shown}' ({source}){hint}"


def _config_error(error: ValidationError, origin: Mapping[str, str]) -> ConfigError:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    name = str(first["loc"][0]) if first["loc"] else ""
    where = f"setting '{name}' ({origin.get(name, 'default')})" if name else "settings"
    return ConfigError(f"{where}: {first['msg'].removeprefix('Value error, ')}", field=name or None)
