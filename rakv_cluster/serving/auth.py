"""Who calls, and whether there is room for the call: the same gate for HTTP and gRPC."""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rakv_cluster.clock import Clock
from rakv_cluster.config import Settings
from rakv_cluster.errors import ConfigError, PermissionDenied, Unauthenticated
from rakv_cluster.serving.keys import (
    PREFIX,
    KeyEntry,
    KeyTable,
    SecretHash,
    TenantLimits,
    parse_table,
    read_table,
)
from rakv_cluster.serving.limits import TenantMeter

log = logging.getLogger("rakv.auth")

_RELOAD_PERIOD_S = 1.0
_VERIFIED_LIMIT = 10_000
_HASHES_AT_ONCE = 2
_LONGEST_KEY = 256


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sends a request. The anonymous caller (no keys configured) is the service's owner."""

    tenant: str = ""
    admin: bool = True
    limits: TenantLimits = field(default_factory=TenantLimits)

    @property
    def salt(self) -> bytes:
        """What keeps this tenant's keys of stored KV apart from every other tenant's."""
        return b"tenant\0" + self.tenant.encode() if self.tenant else b""

    def require_admin(self) -> None:
        """Raise :class:`PermissionDenied` unless the key has the admin scope."""
        if not self.admin:
            raise PermissionDenied("this needs a key with the admin scope")


ANONYMOUS = Caller()


class KeyRing:
    """The keys that are valid now: from the settings or a file, which is read again when it
    changes. A file that became unreadable leaves the last good keys in force."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        self._clock = clock
        self._path = settings.api_keys_file
        self._version = _file_version(self._path)
        self._checked_s = clock.monotonic_s()
        self.table = configured_keys(settings)
        self.required = settings.has_api_keys

    def refresh(self) -> bool:
        """Look at the file, at most once a second; whether the table was replaced."""
        now_s = self._clock.monotonic_s()
        if self._path == Path() or now_s - self._checked_s < _RELOAD_PERIOD_S:
            return False
        self._checked_s = now_s
        version = _file_version(self._path)
        if version == self._version:
            return False
        self._version = version
        try:
            self.table = read_table(self._path)
        except ConfigError as error:
            log.error("the former API keys stay in force: %s", error.message)
            return False
        log.info("API keys read again: %d", len(self.table.keys))
        return True


def configured_keys(settings: Settings) -> KeyTable:
    """The keys that the settings name; raises :class:`ConfigError` if they cannot be read."""
    if settings.api_keys_file != Path():
        return read_table(settings.api_keys_file)
    return parse_table(settings.api_keys.get_secret_value(), "RAKV_API_KEYS")


def _file_version(path: Path) -> tuple[int, ...]:
    """Changes when the file does; empty while there is none."""
    try:
        status = path.stat()
    except OSError:
        return ()
    return (status.st_mtime_ns, status.st_ino, status.st_size)


class Gate:
    """Authenticates callers and counts their use. Bound to one event loop."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        self._ring = KeyRing(settings, clock)
        self._clock = clock
        # Secrets that passed, as HMACs under a key that never leaves this process: scrypt is paid
        # once per key, and neither a memory dump nor the time of a look-up tells a secret.
        self._verified: OrderedDict[bytes, str] = OrderedDict()
        self._pepper = secrets.token_bytes(32)
        self._hashing = asyncio.Semaphore(_HASHES_AT_ONCE)
        self._meters: dict[str, TenantMeter] = {}

    async def authenticate(self, key: str) -> Caller:
        """The caller that ``key`` belongs to; raises :class:`Unauthenticated`.

        Without configured keys everyone is :data:`ANONYMOUS`, whatever they send.
        """
        if not self._ring.required:
            return ANONYMOUS
        if self._ring.refresh():
            self._verified.clear()
            self._drop_idle_meters()
        if not key:
            raise Unauthenticated("no API key: send 'Authorization: Bearer KEY'")
        entry = await self._entry(key)
        return Caller(entry.tenant, entry.admin, self._ring.table.limits(entry.tenant))

    @contextmanager
    def admit(self, caller: Caller) -> Iterator[None]:
        """Count one request of ``caller`` while the context lasts; raises ``RateLimited``."""
        meter = self._meter(caller)
        meter.admit(caller.limits, self._clock.monotonic_s())
        try:
            yield
        finally:
            meter.release()

    def charge_tokens(self, caller: Caller, count: int) -> None:
        """Book tokens that a request of ``caller`` took."""
        self._meter(caller).charge_tokens(count, self._clock.monotonic_s())

    async def _entry(self, key: str) -> KeyEntry:
        unknown = Unauthenticated("the API key is not valid")
        name, _, rest = key.partition("_")
        key_id, _, secret = rest.partition("_")
        entry = self._ring.table.keys.get(key_id)
        well_formed = name == PREFIX and bool(secret) and key.isascii() and len(key) <= _LONGEST_KEY
        if entry is None or not well_formed:
            raise unknown
        fingerprint = hmac.digest(self._pepper, key.encode(), "sha256")
        if self._verified.get(fingerprint) == key_id:
            self._verified.move_to_end(fingerprint)
            return entry
        async with self._hashing:
            right = await asyncio.to_thread(SecretHash.parse(entry.hash).matches, secret)
        if not right or self._ring.table.keys.get(key_id) != entry:
            raise unknown
        self._verified[fingerprint] = key_id
        while len(self._verified) > _VERIFIED_LIMIT:
            self._verified.popitem(last=False)
        return entry

    def _meter(self, caller: Caller) -> TenantMeter:
        if caller.tenant not in self._meters:
            self._meters[caller.tenant] = TenantMeter(caller.limits, self._clock.monotonic_s())
        return self._meters[caller.tenant]

    def _drop_idle_meters(self) -> None:
        """Forget tenants that are gone, so that their number stays bounded by the document."""
        known = {entry.tenant for entry in self._ring.table.keys.values()}
        self._meters = {
            name: meter for name, meter in self._meters.items() if name in known or meter.running
        }


def bearer(header: str) -> str:
    """The key in an ``Authorization`` header; empty if it holds none."""
    scheme, _, key = header.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""
