"""Settings: three sources, one order, no silent default."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import rakv_cluster
from rakv_cluster.config import Settings, load_settings
from rakv_cluster.errors import ConfigError


def test_flags_win_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "rakv.yaml"
    file.write_text("port: 1001\nreplicas: 2\nmodel: from-file\n")
    environ = {"RAKV_PORT": "1002", "RAKV_REPLICAS": "3"}

    settings = load_settings({"port": 1003}, environ=environ, file=file)

    assert (settings.port, settings.replicas, settings.model) == (1003, 3, "from-file")


def test_a_toml_file_named_by_the_environment_is_read(tmp_path: Path) -> None:
    file = tmp_path / "rakv.toml"
    file.write_text('disk_budget_bytes = "2GiB"\n')

    settings = load_settings(environ={"RAKV_CONFIG": str(file)})

    assert settings.disk_budget_bytes == 2 * 1024**3


@pytest.mark.parametrize(
    ("text", "size"), [("2GiB", 2 << 30), ("500MB", 500_000_000), ("12345", 12345), ("0", 0)]
)
def test_byte_sizes_are_written_as_people_write_them(text: str, size: int) -> None:
    assert load_settings(environ={"RAKV_RAM_BUDGET_BYTES": text}).ram_budget_bytes == size


def test_an_unknown_flag_names_its_neighbour() -> None:
    with pytest.raises(ConfigError, match=r"'prot' \(flags\); did you mean 'port'"):
        load_settings({"prot": 1}, environ={})


def test_an_unknown_variable_names_its_neighbour() -> None:
    with pytest.raises(ConfigError, match=r"'RAKV_REPLICA' .*did you mean 'replicas'"):
        load_settings(environ={"RAKV_REPLICA": "2"})


def test_an_unknown_key_of_a_file_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "rakv.yml"
    file.write_text("stor_dir: /x\n")

    with pytest.raises(ConfigError, match=r"'stor_dir' \(file .*rakv\.yml\).*'store_dir'"):
        load_settings(environ={}, file=file)


def test_a_name_like_no_other_gets_no_hint() -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings({"xyzzy_plugh": 1}, environ={})

    assert "did you mean" not in caught.value.message


def test_the_projects_own_variables_are_no_settings() -> None:
    environ = {"RAKV_SHARED": "/shared", "RAKV_CACHE_DIR": "/cache", "PATH": "/bin"}

    assert load_settings(environ=environ).store_path == Path("/cache/store")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"port": 0}, "'port' (flags)"),
        ({"port": "http"}, "'port' (flags)"),
        ({"device": "tpu"}, "'device' (flags)"),
        ({"ram_budget_bytes": "much"}, "'ram_budget_bytes' (flags)"),
        ({"request_timeout_s": float("nan")}, "'request_timeout_s' (flags)"),
        ({"chunk_min_tokens": 9, "chunk_max_tokens": 8}, "chunk_min_tokens is larger"),
    ],
)
def test_a_bad_value_names_the_setting_and_its_source(flags: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(flags, environ={})

    assert named in caught.value.message


@pytest.mark.parametrize("content", ["- a\n- b\n", "a: [", "\x00"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "rakv.yaml"
    file.write_text(content)

    with pytest.raises(ConfigError, match=r"rakv\.yaml"):
        load_settings(environ={}, file=file)


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "rakv.yaml"
    file.write_text("# nothing yet\n")

    assert load_settings(environ={}, file=file) == Settings()


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"draft_model": "drafts/small"}, "choose one"),
        ({"fused": "off"}, "fused decoder"),
        ({"device": "cuda"}, "on a CPU"),
    ],
)
def test_a_model_that_drafts_for_itself_needs_what_it_needs(
    flags: dict[str, object], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        load_settings({"self_draft": True, **flags}, environ={})


@pytest.mark.parametrize("flags", [{"device": "cpu"}, {"device": "cuda", "fused": "off"}])
def test_cuda_graphs_are_refused_where_there_are_none(flags: dict[str, object]) -> None:
    assert load_settings({"cuda_graphs": True, "device": "cuda"}, environ={}).cuda_graphs
    with pytest.raises(ConfigError, match="cuda_graphs needs the fused decoder and device cuda"):
        load_settings({"cuda_graphs": True, **flags}, environ={})


def test_replicas_share_the_cores_unless_told() -> None:
    assert load_settings({"threads": 3}, environ={}).threads_per_replica == 3
    assert load_settings({"replicas": 10_000}, environ={}).threads_per_replica == 1


def test_settings_cannot_change_and_every_one_is_described() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Settings().port = 1  # type: ignore[misc]  # the point of the test
    assert all(field.description for field in Settings.model_fields.values())


def test_every_setting_is_read_somewhere() -> None:
    package = Path(rakv_cluster.__file__).parent
    sources = "\n".join(file.read_text() for file in package.rglob("*.py"))
    read = set(re.findall(r"\.(\w+)", sources))

    assert sorted(set(Settings.model_fields) - read) == []
