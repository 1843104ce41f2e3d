"""API keys, the gate and what a tenant may use."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rakv_cluster.cli.main import app
from rakv_cluster.config import Settings, load_settings
from rakv_cluster.errors import ConfigError, PermissionDenied, RateLimited, Unauthenticated
from rakv_cluster.serving.auth import ANONYMOUS, Caller, Gate, bearer
from rakv_cluster.serving.keys import (
    KeyTable,
    SecretHash,
    TenantLimits,
    new_key,
    parse_table,
    read_table,
    write_table,
)
from rakv_cluster.testing.clock import ManualClock


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def add_key(path: Path, tenant: str, *, admin: bool = False) -> str:
    table = read_table(path) if path.exists() else KeyTable()
    key, entry = new_key(tenant, admin=admin)
    write_table(path, KeyTable({**table.keys, entry.id: entry}, table.tenants))
    return key


def gate_of(path: Path, clock: ManualClock) -> Gate:
    return Gate(Settings(api_keys_file=path), clock)


def test_a_hash_matches_its_secret_alone_and_survives_text() -> None:
    hashed = SecretHash.of("secret")

    again = SecretHash.parse(str(hashed))

    assert again == hashed
    assert again.matches("secret")
    assert not again.matches("secreT")
    assert "secret" not in str(hashed)
    assert SecretHash.of("secret").digest != hashed.digest


@pytest.mark.parametrize(
    "text",
    [
        "", "secret", "md5:1:1:1:AA==:AA==", "scrypt:15:8:1:AA==:AA==", "scrypt:x:8:1:AA==:AA==",
        "scrypt:16:8:1:****:AA==", f"scrypt:{2**30}:8:1:AA==:AA==", "scrypt:16:8:1:AA==:AA==",
        "scrypt:16:0:1:AA==:AA==", "scrypt:16:8:999:AA==:AA==",
    ],
)  # fmt: skip
def test_what_is_no_hash_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"hash|parameters|short"):
        SecretHash.parse(text)


async def test_a_key_leads_to_its_tenant(tmp_path: Path, clock: ManualClock) -> None:
    file = tmp_path / "keys.yaml"
    alpha, beta = add_key(file, "alpha"), add_key(file, "beta", admin=True)
    gate = gate_of(file, clock)

    assert await gate.authenticate(alpha) == Caller("alpha", admin=False)
    assert await gate.authenticate(beta) == Caller("beta", admin=True)
    assert (await gate.authenticate(alpha)).salt != (await gate.authenticate(beta)).salt


async def test_wrong_keys_are_refused_without_saying_why(
    tmp_path: Path, clock: ManualClock
) -> None:
    file = tmp_path / "keys.yaml"
    key = add_key(file, "alpha")
    gate = gate_of(file, clock)
    _, key_id, secret = key.split("_", 2)

    messages = set()
    for wrong in (
        key + "x", key[:-1], f"rakv_{key_id}_", f"rakv_000000000000_{secret}", "rakv", "x" * 10_000,
        f"sk_{key_id}_{secret}", f"rakv_{key_id}_\udcff", key.upper(),
    ):  # fmt: skip
        with pytest.raises(Unauthenticated) as caught:
            await gate.authenticate(wrong)
        messages.add(caught.value.message)
    assert messages == {"the API key is not valid"}
    with pytest.raises(Unauthenticated, match="no API key"):
        await gate.authenticate("")


async def test_rotation_needs_no_restart(tmp_path: Path, clock: ManualClock) -> None:
    file = tmp_path / "keys.yaml"
    old = add_key(file, "alpha")
    gate = gate_of(file, clock)
    await gate.authenticate(old)

    new = add_key(file, "alpha")
    clock.advance(1.0)
    assert (await gate.authenticate(new)).tenant == "alpha"
    assert (await gate.authenticate(old)).tenant == "alpha"

    entries = read_table(file).keys
    write_table(file, KeyTable({new.split("_")[1]: entries[new.split("_")[1]]}))
    clock.advance(1.0)
    with pytest.raises(Unauthenticated):
        await gate.authenticate(old)
    assert (await gate.authenticate(new)).tenant == "alpha"


async def test_a_replaced_hash_ends_the_old_secret(tmp_path: Path, clock: ManualClock) -> None:
    file = tmp_path / "keys.yaml"
    key = add_key(file, "alpha")
    gate = gate_of(file, clock)
    await gate.authenticate(key)
    (entry,) = read_table(file).keys.values()
    other = entry.model_copy(update={"hash": str(SecretHash.of("another"))})

    write_table(file, KeyTable({entry.id: other}))
    clock.advance(1.0)

    with pytest.raises(Unauthenticated):
        await gate.authenticate(key)
    assert (await gate.authenticate(f"rakv_{entry.id}_another")).tenant == "alpha"


@pytest.mark.parametrize("damage", ["keys: [", "keys: [{id: 1}]", None])
async def test_a_damaged_file_leaves_the_last_good_keys(
    damage: str | None, tmp_path: Path, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys.yaml"
    key = add_key(file, "alpha")
    gate = gate_of(file, clock)
    if damage is None:
        file.unlink()
    else:
        file.write_text(damage)
    clock.advance(1.0)

    assert (await gate.authenticate(key)).tenant == "alpha"
    assert "stay in force" in caplog.text
    assert key not in caplog.text


async def test_no_key_and_no_secret_in_logs(
    tmp_path: Path, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    file = tmp_path / "keys.yaml"
    key = add_key(file, "alpha")
    gate = gate_of(file, clock)
    await gate.authenticate(key)
    with pytest.raises(Unauthenticated) as caught:
        await gate.authenticate(key + "y")

    assert key.split("_", 2)[2] not in caplog.text + repr(caught.value) + file.read_text()


async def test_without_keys_everyone_is_the_owner(clock: ManualClock) -> None:
    gate = Gate(Settings(), clock)

    assert await gate.authenticate("") is ANONYMOUS
    assert await gate.authenticate("anything") is ANONYMOUS
    assert ANONYMOUS.salt == b""
    ANONYMOUS.require_admin()


async def test_keys_come_from_the_environment_too(clock: ManualClock) -> None:
    key, entry = new_key("alpha", admin=False)
    document = f"keys: [{entry.model_dump_json()}]"
    settings = load_settings(environ={"RAKV_API_KEYS": document})

    assert (await Gate(settings, clock).authenticate(key)).tenant == "alpha"
    assert entry.hash not in repr(settings)


def test_the_admin_scope_is_asked_for() -> None:
    with pytest.raises(PermissionDenied):
        Caller("alpha", admin=False).require_admin()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "example.org"])
def test_other_addresses_than_loopback_need_keys(host: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="api_keys_file"):
        load_settings({"host": host}, environ={})
    assert load_settings({"host": host, "api_keys_file": tmp_path / "k"}, environ={}).has_api_keys


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1", "localhost"])
def test_loopback_needs_none(host: str) -> None:
    assert not load_settings({"host": host}, environ={}).has_api_keys


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("keys: 5", "keys"),
        ("kees: []", "kees"),
        ("keys: [{id: 0123456789ab, tenant: a b, hash: x}]", "keys.0.tenant"),
        ("tenants: {ghost: {concurrent: 1}}", "ghost"),
        ("{", "not YAML"),
    ],
)
def test_a_document_that_is_wrong_names_the_place(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_table(text, "test")


def test_a_missing_file_is_named_at_start(tmp_path: Path, clock: ManualClock) -> None:
    with pytest.raises(ConfigError, match=r"gone\.yaml"):
        gate_of(tmp_path / "gone.yaml", clock)


async def test_a_tenants_concurrency_is_bounded_and_given_back(clock: ManualClock) -> None:
    gate = Gate(Settings(), clock)
    alpha = Caller("alpha", admin=False, limits=TenantLimits(concurrent=1))

    with gate.admit(alpha):
        with pytest.raises(RateLimited, match="running"), gate.admit(alpha):
            pass
        with gate.admit(Caller("beta", admin=False)):
            pass
    with gate.admit(alpha):
        pass


async def test_tokens_are_booked_afterwards_and_waited_for(clock: ManualClock) -> None:
    gate = Gate(Settings(), clock)
    caller = Caller("alpha", admin=False, limits=TenantLimits(tokens_per_minute=60))
    with gate.admit(caller):
        gate.charge_tokens(caller, 90)

    with pytest.raises(RateLimited, match="tokens") as caught, gate.admit(caller):
        pass
    assert caught.value.retry_after_s == pytest.approx(30.0, abs=1e-3)
    clock.advance(caught.value.retry_after_s)
    with gate.admit(caller):
        pass


def test_bearer_takes_the_key_out_of_the_header() -> None:
    assert [bearer(h) for h in ("Bearer abc", "bearer  abc ", "Basic abc", "", "abc")] == [
        "abc", "abc", "", "", "",
    ]  # fmt: skip


def test_the_file_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    settings = load_settings({"api_keys_file": "keys.yaml"}, environ={})

    assert settings.api_keys_file == tmp_path / "keys.yaml"


def test_serve_refuses_keys_that_cannot_be_read_at_once(tmp_path: Path) -> None:
    missing = tmp_path / "gone.yaml"

    done = CliRunner().invoke(app, ["serve", "--set", f"api_keys_file={missing}"])

    assert done.exit_code == 2
    assert "gone.yaml" in done.output


def test_the_key_command_makes_lists_limits_and_revokes(tmp_path: Path) -> None:
    run, file = CliRunner().invoke, tmp_path / "keys.yaml"
    options = ["--file", str(file)]

    made = run(app, ["key", "new", *options, "--tenant", "alpha"])
    key = made.stdout.strip()
    key_id = key.split("_")[1]
    assert run(app, ["key", "limit", "alpha", *options, "--concurrent", "3"]).exit_code == 0
    listed = run(app, ["key", "list", *options]).stdout

    assert made.exit_code == 0
    assert stat.S_IMODE(os.stat(file).st_mode) == 0o600
    assert key_id in listed
    assert "3" in listed
    assert key.split("_", 2)[2] not in listed + file.read_text()
    assert run(app, ["key", "revoke", key_id, *options]).exit_code == 0
    assert read_table(file) == KeyTable({}, {})
    assert run(app, ["key", "revoke", key_id, *options]).exit_code == 2
    assert run(app, ["key", "new", *options, "--tenant", "a b"]).exit_code == 2


def test_limits_that_are_not_named_stay_as_they_are(tmp_path: Path) -> None:
    run, file = CliRunner().invoke, tmp_path / "keys.yaml"
    options = ["--file", str(file)]
    run(app, ["key", "new", *options, "--tenant", "alpha"])

    run(app, ["key", "limit", "alpha", *options, "--tokens-per-minute", "9", "--concurrent", "3"])
    run(app, ["key", "limit", "alpha", *options, "--concurrent", "0"])

    assert read_table(file).limits("alpha") == TenantLimits(tokens_per_minute=9)
    assert run(app, ["key", "limit", "alpha", *options]).exit_code == 2
