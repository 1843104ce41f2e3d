"""The command line: help, versions, clear refusals, one summary line."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

import rakv_cluster
from rakv_cluster.cli.ask import summary
from rakv_cluster.cli.main import app
from rakv_cluster.client import Answer
from rakv_cluster.config import Settings
from rakv_cluster.testing.tiny_models import save_tiny_model, tiny_llama

CLI = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"})


def test_version() -> None:
    result = CLI.invoke(app, ["--version"])

    assert (result.exit_code, result.output) == (0, f"rakv-cluster {rakv_cluster.__version__}\n")


@pytest.mark.parametrize("command", [[], ["serve"], ["settings"], ["ask"], ["model"],
                                     ["model", "fetch"], ["model", "list"]])  # fmt: skip
def test_every_command_explains_itself(command: list[str]) -> None:
    result = CLI.invoke(app, [*command, "--help"])

    assert result.exit_code == 0
    assert "Usage" in result.output


def test_settings_lists_every_setting_and_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAKV_PORT", "8123")

    result = CLI.invoke(app, ["settings", "--set", "ram-budget-bytes=3GiB"])

    assert result.exit_code == 0
    assert all(name in result.output for name in Settings.model_fields)
    assert "8123" in result.output
    assert "3.0GiB" in result.output


def test_settings_are_shown_as_they_would_be_written() -> None:
    shown = {
        name.strip(): (value.strip(), meaning)
        for _, name, value, meaning, _ in (
            line.split("│") for line in CLI.invoke(app, ["settings"]).output.splitlines()
            if line.count("│") == 4
        )
    }  # fmt: skip

    assert [shown[name][0] for name in ("default_reuse", "self_draft", "tls_key_file")] == [
        "exact", "false", "",
    ]  # fmt: skip
    assert "(exact | reorder | blend | off)" in shown["default_reuse"][1]
    assert "(tiered | memory | none)" in shown["store"][1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve", "--set", "prot=1"], "did you mean 'port'?"),
        (["serve", "--set", "port"], "write it as NAME=VALUE"),
        (["serve", "--port", "99999"], "'port' (flags)"),
        (["serve", "--host", "0.0.0.0"], "error: settings: 0.0.0.0 can be reached"),
        (["serve", "--config", "/nowhere.yaml"], "/nowhere.yaml cannot be read"),
        (["serve", "--set", "cache_dir=/nowhere"], "rakv model fetch smollm2"),
        (["ask", "Why?", "--doc", "/nowhere.txt"], "document /nowhere.txt cannot be read"),
        (["ask", "Why?", "--url", "http://127.0.0.1:9"], "no answer from http://127.0.0.1:9"),
        (["model", "fetch", "gpt-4"], "unknown model 'gpt-4'"),
    ],
)
def test_a_mistake_is_one_clear_line_and_exit_code_2(arguments: list[str], said: str) -> None:
    result = CLI.invoke(app, arguments)

    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_port_in_use_is_found_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        model = save_tiny_model(tmp_path, tiny_llama())
        result = CLI.invoke(app, ["serve", "--model", str(model), "--port", str(port)])

    assert result.exit_code == 2
    assert f"cannot bind 127.0.0.1:{port}" in result.stderr


def test_a_folder_without_a_model_is_found_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:  # else a service would start
        port = str(taken.getsockname()[1])

        result = CLI.invoke(app, ["serve", "--model", str(tmp_path), "--port", port])

    assert result.exit_code == 2
    assert f"cannot read the model in {tmp_path}" in result.stderr


def test_the_summary_says_what_was_reused() -> None:
    answer = Answer(
        text="x",
        finish_reason="stop",
        ttft_s=0.125,
        total_s=1.125,
        usage={"prompt_tokens": 100, "completion_tokens": 11},
        rakv={"tokens": {"ram": 60, "disk": 30, "computed": 10}},
    )

    assert summary(answer) == (
        "first token after 0.12 s; 100 prompt tokens: 60 reused from RAM, 30 from disk, "
        "10 computed; 11 tokens out, 10.0 per second"
    )
