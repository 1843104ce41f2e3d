"""API keys: how they look, how they are kept, and the document that lists them.

A key is ``rakv_<id>_<secret>``: the id is public and finds the entry, the secret has 256 random
bits. Only its scrypt digest (RFC 7914) is kept, so the document may be read without harm; a key
itself is shown once, when it is made.

    keys:
      - {id: 4f0c2a9d71be, tenant: search, hash: "scrypt:16384:8:1:...:...", admin: false}
    tenants:
      search: {requests_per_minute: 600, tokens_per_minute: 500000, concurrent: 16}
"""

from __future__ import annotations

import hmac
import os
import secrets
import tempfile
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import scrypt
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from rakv_cluster.errors import ConfigError

PREFIX = "rakv"
_ID_BYTES, _SECRET_BYTES, _SALT_BYTES, _DIGEST_BYTES = 6, 32, 16, 32
_COST_N, _COST_R, _COST_P = 2**14, 8, 1
_MAX_COST_BYTES = 128 * 1024**2
_KEY_LIMIT = 10_000

Limit = Annotated[int, Field(ge=0, le=10**12)]


@dataclass(frozen=True, slots=True)
class SecretHash:
    """A secret's scrypt digest with what it takes to compute it again."""

    n: int
    r: int
    p: int
    salt: bytes
    digest: bytes

    @classmethod
    def of(cls, secret: str) -> SecretHash:
        """Hash a new secret under a fresh salt. Takes some 50 ms and 16 MiB."""
        salt = secrets.token_bytes(_SALT_BYTES)
        digest = _derive(secret, salt, _COST_N, _COST_R, _COST_P)
        return cls(_COST_N, _COST_R, _COST_P, salt, digest)

    @classmethod
    def parse(cls, text: str) -> SecretHash:
        """Inverse of ``str``; raises ``ValueError``."""
        try:
            name, n, r, p, salt, digest = text.split(":")
            parsed = cls(int(n), int(r), int(p), _decoded(salt), _decoded(digest))
        except ValueError as error:
            raise ValueError("not a hash that `rakv key new` writes") from error
        costs = 128 * parsed.n * parsed.r
        sound = parsed.n > 1 and parsed.n & (parsed.n - 1) == 0 and parsed.r > 0
        if name != "scrypt" or not sound or not 1 <= parsed.p <= 16 or costs > _MAX_COST_BYTES:
            raise ValueError("not scrypt parameters that this server accepts")
        if len(parsed.digest) != _DIGEST_BYTES or len(parsed.salt) < _SALT_BYTES:
            raise ValueError("salt or digest is too short")
        return parsed

    def matches(self, secret: str) -> bool:
        """Whether this is the secret; compared in constant time."""
        derived = _derive(secret, self.salt, self.n, self.r, self.p)
        return hmac.compare_digest(derived, self.digest)

    def __str__(self) -> str:
        salt, digest = b64encode(self.salt).decode(), b64encode(self.digest).decode()
        return f"scrypt:{self.n}:{self.r}:{self.p}:{salt}:{digest}"


def _decoded(text: str) -> bytes:
    return b64decode(text, validate=True)


def _derive(secret: str, salt: bytes, n: int, r: int, p: int) -> bytes:
    return scrypt(
        secret.encode(), salt=salt, n=n, r=r, p=p, maxmem=2 * _MAX_COST_BYTES, dklen=_DIGEST_BYTES
    )


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class KeyEntry(_Entry):
    """One key; ``admin`` opens metrics and the operator's endpoints."""

    id: str = Field(pattern=r"^[0-9a-f]{12}$")
    tenant: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    hash: str
    admin: bool = False

    @field_validator("hash")
    @classmethod
    def _is_hash(cls, value: str) -> str:
        SecretHash.parse(value)
        return value


class TenantLimits(_Entry):
    """What a tenant may use on each ingress; 0 is no limit. Tokens are prompt and output tokens,
    cached or not."""

    requests_per_minute: Limit = 0
    tokens_per_minute: Limit = 0
    concurrent: Limit = 0


class _Document(_Entry):
    keys: list[KeyEntry] = Field(default_factory=list, max_length=_KEY_LIMIT)
    tenants: dict[str, TenantLimits] = Field(default_factory=dict, max_length=_KEY_LIMIT)


@dataclass(frozen=True, slots=True)
class KeyTable:
    """A validated document. ``keys`` by id."""

    keys: Mapping[str, KeyEntry] = field(default_factory=lambda: MappingProxyType({}))
    tenants: Mapping[str, TenantLimits] = field(default_factory=lambda: MappingProxyType({}))

    def limits(self, tenant: str) -> TenantLimits:
        """What the document says of ``tenant``, or no limits."""
        return self.tenants.get(tenant, TenantLimits())


def parse_table(text: str, source: str) -> KeyTable:
    """A YAML or JSON document of keys; raises :class:`ConfigError` that names ``source``."""
    try:
        document = _Document.model_validate(yaml.safe_load(text) or {})
    except yaml.YAMLError as error:
        raise ConfigError(f"API keys ({source}): not YAML: {error}") from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"API keys ({source}): {where}: {first['msg']}") from error
    keys = {entry.id: entry for entry in document.keys}
    if len(keys) < len(document.keys):
        raise ConfigError(f"API keys ({source}): two keys have the same id")
    unknown = sorted(set(document.tenants) - {entry.tenant for entry in document.keys})
    if unknown:
        raise ConfigError(f"API keys ({source}): limits of a tenant without key: {unknown[0]}")
    return KeyTable(keys, document.tenants)


def read_table(path: Path) -> KeyTable:
    """The document in a file; raises :class:`ConfigError`."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"API keys ({path}): cannot be read: {error}") from error
    return parse_table(text, str(path))


def write_table(path: Path, table: KeyTable) -> None:
    """Replace the file at once, so that a server never reads half of it; mode 0600."""
    document = {
        "keys": [entry.model_dump() for entry in table.keys.values()],
        "tenants": {name: limits.model_dump() for name, limits in table.tenants.items()},
    }
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            yaml.safe_dump(document, file, sort_keys=False)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def new_key(tenant: str, *, admin: bool) -> tuple[str, KeyEntry]:
    """A fresh key, to be shown once, and its entry; raises :class:`ConfigError` for a tenant's
    name that is none."""
    key_id = secrets.token_hex(_ID_BYTES)
    secret = secrets.token_urlsafe(_SECRET_BYTES)
    try:
        entry = KeyEntry(id=key_id, tenant=tenant, hash=str(SecretHash.of(secret)), admin=admin)
    except ValidationError as error:
        raise ConfigError(
            "a tenant's name is up to 64 letters, digits, '.', '_' and '-'", field="tenant"
        ) from error
    return f"{PREFIX}_{key_id}_{secret}", entry
