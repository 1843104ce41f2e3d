"""Loading: identity of what was loaded, and clear refusals."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rakv_cluster.errors import ConfigError
from rakv_cluster.model.fingerprint import weights_fingerprint
from rakv_cluster.model.loader import load_model, load_tokenizer
from rakv_cluster.testing.tiny_models import (
    CHAT_TEMPLATE,
    save_tiny_model,
    tiny_gemma3,
    tiny_llama,
    tiny_tokenizer,
)

KNOWN = ".rakv-fingerprint.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny_model(tmp_path / "tiny", tiny_llama())


def digest(folder: Path, **options: str) -> bytes:
    return load_model(str(folder), **options).card.digest  # type: ignore[arg-type]  # test options


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change_one_weight(folder: Path) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    weights["model.layers.0.mlp.up_proj.weight"][0, 0] += 0.5
    save_file(weights, path, metadata={"format": "pt"})


class TestCard:
    def test_describes_the_model(self, folder: Path) -> None:
        loaded = load_model(str(folder), threads=1)
        card = loaded.card
        assert card.model_id == "tiny"
        assert (card.vocab_size, card.context_tokens) == (259, 2048)
        assert (card.layout.layers, card.layout.kv_heads, card.layout.head_dim) == (2, 2, 16)
        assert card.layout.dtype == "float32"
        assert card.eos_token_ids == {2}
        assert card.self_check_error < 1e-4
        assert loaded.runner.layout == card.layout
        assert card.numeric_class.startswith("fused[")
        assert "/cpu-torch" in card.numeric_class
        assert card.numeric_class.endswith("/1t/float32")

    def test_crosses_processes(self, folder: Path) -> None:
        card = load_model(str(folder)).card
        assert pickle.loads(pickle.dumps(card)) == card  # noqa: S301  # our own bytes

    def test_is_served_under_another_name(self, folder: Path) -> None:
        named = load_model(str(folder), model_id="mine").card
        assert named.model_id == "mine"
        assert named.digest == digest(folder)

    def test_bfloat16(self, folder: Path) -> None:
        card = load_model(str(folder), dtype="bfloat16").card
        assert card.layout.dtype == "bfloat16"
        assert card.numeric_class.endswith("bfloat16")


class TestDigest:
    def test_is_stable_and_ignores_where_the_folder_is(self, folder: Path) -> None:
        before = digest(folder)
        moved = folder.rename(folder.with_name("elsewhere"))
        edit_json(moved / "config.json", transformers_version="5.0.0", use_cache=False)
        assert digest(moved) == before

    def test_changes_with_a_weight(self, folder: Path) -> None:
        before = digest(folder)
        change_one_weight(folder)
        assert digest(folder) != before

    def test_changes_with_the_dtype(self, folder: Path) -> None:
        assert digest(folder, dtype="bfloat16") != digest(folder)

    def test_changes_with_rope(self, folder: Path) -> None:
        before = digest(folder)
        edit_json(
            folder / "config.json", rope_parameters={"rope_theta": 5e5, "rope_type": "default"}
        )
        assert digest(folder) != before

    def test_changes_with_the_chat_template(self, folder: Path) -> None:
        before = digest(folder)
        tiny_tokenizer(CHAT_TEMPLATE.replace("assistant", "helper")).save_pretrained(folder)
        assert digest(folder) != before

    def test_changes_with_the_vocabulary(self, folder: Path) -> None:
        before = digest(folder)
        tokenizer = tiny_tokenizer()
        tokenizer.add_tokens(["<|extra|>"])
        tokenizer.save_pretrained(folder)
        assert digest(folder) != before

    def test_is_equal_in_a_process_with_another_hash_seed(self, folder: Path) -> None:
        code = (
            "import sys; from rakv_cluster.model.loader import load_model;"
            "print(load_model(sys.argv[1]).card.digest.hex())"
        )
        seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
        done = subprocess.run(
            [sys.executable, "-c", code, str(folder)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == digest(folder).hex()


class TestFingerprint:
    def test_is_remembered_by_size_and_time(self, folder: Path) -> None:
        before = weights_fingerprint(folder)
        path = folder / "model.safetensors"
        status = path.stat()
        path.write_bytes(bytes(status.st_size))
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert weights_fingerprint(folder) == before  # not read again: the documented limit

    def test_a_newer_file_is_read_again(self, folder: Path) -> None:
        before = weights_fingerprint(folder)
        path = folder / "model.safetensors"
        status = path.stat()
        path.write_bytes(bytes(status.st_size))
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
        assert weights_fingerprint(folder) != before

    @pytest.mark.parametrize(
        "content", ["", "{", "[]", '{"model.safetensors": 3}', '{"model.safetensors": [1, "x"]}']
    )
    def test_a_damaged_memory_is_made_anew(self, folder: Path, content: str) -> None:
        before = weights_fingerprint(folder)
        good = (folder / KNOWN).read_text()
        (folder / KNOWN).write_text(content)
        assert weights_fingerprint(folder) == before
        assert (folder / KNOWN).read_text() == good

    def test_works_where_nothing_can_be_written(self, folder: Path) -> None:
        before = weights_fingerprint(folder)
        (folder / KNOWN).unlink()
        (folder / KNOWN).mkdir()  # cannot be replaced by a file, whoever runs the test
        assert weights_fingerprint(folder) == before

    def test_covers_every_shard(self, folder: Path) -> None:
        before = weights_fingerprint(folder)
        save_file({"more": torch.zeros(2)}, folder / "model-2.safetensors")
        assert weights_fingerprint(folder) != before

    def test_a_folder_without_weights_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="holds no safetensors weights"):
            weights_fingerprint(tmp_path)


class TestRefusals:
    def test_neither_folder_nor_id(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="is no folder, no name that") as caught:
            load_model(str(tmp_path / "absent"))
        assert caught.value.field == "model"

    def test_a_folder_without_a_model(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="cannot read the model"):
            load_model(str(tmp_path))

    def test_a_folder_without_weights(self, folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        with pytest.raises(ConfigError, match="cannot load the weights"):
            load_model(str(folder))

    def test_torn_weights(self, folder: Path) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:1000])
        with pytest.raises(ConfigError, match="cannot load the weights"):
            load_model(str(folder))

    def test_missing_weights(self, folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        del weights["model.layers.1.mlp.up_proj.weight"]
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ConfigError, match=r"lack .*layers\.1\.mlp\.up_proj"):
            load_model(str(folder))

    def test_a_folder_without_a_tokenizer(self, folder: Path) -> None:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (folder / name).unlink()
        with pytest.raises(ConfigError, match="cannot load the tokenizer"):
            load_tokenizer(str(folder))

    @pytest.mark.parametrize(
        ("options", "field"),
        [({"device": "abacus"}, "device"), ({"dtype": "int3"}, "dtype")],
    )
    def test_unknown_options(self, folder: Path, options: dict[str, str], field: str) -> None:
        with pytest.raises(ConfigError) as caught:
            digest(folder, **options)
        assert caught.value.field == field

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
    def test_a_gpu_that_is_not_there(self, folder: Path) -> None:
        with pytest.raises(ConfigError, match="no usable GPU"):
            load_model(str(folder), device="cuda")


def test_gemma3_loads(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "gemma", tiny_gemma3())
    card = load_model(str(folder)).card
    assert card.layout.layers == 3
    assert card.self_check_error < 1e-4
