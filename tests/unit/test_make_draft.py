"""Draft models made of a target's own layers, and vocabularies that must be equal."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from rakv_cluster.cli.main import app
from rakv_cluster.errors import ConfigError
from rakv_cluster.model.loader import load_model
from rakv_cluster.model.make_draft import (
    REPORT_FILE,
    Distillation,
    accepted_runs,
    make_draft,
    steps_taken,
)
from rakv_cluster.speculation.draft_model import check_vocabulary
from rakv_cluster.testing.tiny_models import (
    save_tiny_model,
    tiny_gemma3,
    tiny_llama,
    tiny_tokenizer,
)

TEXT = "All work and no play makes Jack a dull boy. " * 40


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return save_tiny_model(tmp_path / "target", tiny_llama(layers=6))


def test_keeps_every_nth_layer_and_the_last(target: Path, tmp_path: Path) -> None:
    folder = tmp_path / "draft"

    report = make_draft(str(target), folder, every=2)

    assert report.kept_layers == (0, 2, 4, 5)
    assert report.target_layers == 6
    assert 0 < report.parameters_share < 1
    written = json.loads((folder / REPORT_FILE).read_text())
    assert written["agreement"] == report.agreement
    original = load_file(target / "model.safetensors")
    kept = load_file(folder / "model.safetensors")
    for index, source in enumerate(report.kept_layers):
        name = "mlp.up_proj.weight"
        assert torch.equal(
            kept[f"model.layers.{index}.{name}"], original[f"model.layers.{source}.{name}"]
        )
    assert load_model(str(folder)).runner.layout.layers == 4


def test_layers_that_do_nothing_are_not_missed(tmp_path: Path) -> None:
    model = tiny_llama(layers=4)
    with torch.no_grad():
        for index in (1, 2):
            model.model.layers[index].self_attn.o_proj.weight.zero_()
            model.model.layers[index].mlp.down_proj.weight.zero_()
    target = save_tiny_model(tmp_path / "target", model)

    report = make_draft(str(target), tmp_path / "draft", every=3)

    assert report.kept_layers == (0, 3)
    assert report.agreement == 1.0
    assert report.tokens_per_step[8] > 8 * 0.8


def test_other_architectures_keep_their_kinds_of_layers(tmp_path: Path) -> None:
    target = save_tiny_model(tmp_path / "target", tiny_gemma3())

    report = make_draft(str(target), tmp_path / "draft", every=2)

    loaded = load_model(str(tmp_path / "draft"))
    assert loaded.runner.layout.layers == len(report.kept_layers)


def test_distillation_trains_the_layers_and_leaves_the_vocabulary(
    target: Path, tmp_path: Path
) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text(TEXT)
    minutes = itertools.count()
    notes: list[str] = []

    report = make_draft(
        str(target),
        tmp_path / "draft",
        every=3,
        distillation=Distillation(minutes=41, texts=texts),
        note=notes.append,
        clock_s=lambda: next(minutes) * 60.0,
    )

    assert report.training_steps == 40
    divergences = [float(note.split()[3]) for note in notes if note.startswith("step")]
    assert divergences[-1] < divergences[0]
    original = load_file(target / "model.safetensors")
    trained = load_file(tmp_path / "draft" / "model.safetensors")
    assert torch.equal(trained["model.embed_tokens.weight"], original["model.embed_tokens.weight"])
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(trained[name], original[name])


@pytest.mark.parametrize(("every", "field"), [(1, "every"), (0, "every")])
def test_useless_settings_are_refused(target: Path, tmp_path: Path, every: int, field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make_draft(str(target), tmp_path / "draft", every=every)

    assert refused.value.field == field
    assert not (tmp_path / "draft").exists()


def test_an_existing_folder_is_left_alone(target: Path) -> None:
    with pytest.raises(ConfigError, match="exists"):
        make_draft(str(target), target, every=2)


def test_texts_that_are_not_there_leave_nothing_behind(target: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no folder"):
        make_draft(
            str(target),
            tmp_path / "draft",
            every=2,
            distillation=Distillation(1.0, tmp_path / "nowhere"),
        )

    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_runs_of_agreement() -> None:
    agrees = [True, True, False, True, False]

    assert accepted_runs(agrees) == [2, 1, 0, 1, 0]
    assert steps_taken(agrees, 0) == 5
    assert steps_taken(agrees, 1) == 3
    assert steps_taken(agrees, 4) == 2


def test_a_vocabulary_is_compared_token_by_token() -> None:
    check_vocabulary(tiny_tokenizer(), tiny_tokenizer())
    other = tiny_tokenizer()
    other.add_tokens(["surplus"])

    with pytest.raises(ConfigError, match="259") as refused:
        check_vocabulary(tiny_tokenizer(), other)

    assert refused.value.field == "draft_model"


def test_serve_refuses_another_vocabulary_before_anything_starts(
    target: Path, tmp_path: Path
) -> None:
    other = save_tiny_model(tmp_path / "other", tiny_llama())
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["surplus"])
    tokenizer.save_pretrained(other)

    done = CliRunner().invoke(
        app, ["serve", "--model", str(target), "--set", f"draft_model={other}"]
    )

    assert done.exit_code == 2
    assert "another vocabulary: id 259" in done.output
