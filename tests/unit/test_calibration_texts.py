"""Prompts to calibrate by, for models with a chat template and without one."""

from __future__ import annotations

from pathlib import Path

import pytest

from rakv_cluster.errors import ConfigError
from rakv_cluster.serving.calibration_texts import calibration_prompts
from rakv_cluster.serving.prompting import PromptRenderer
from rakv_cluster.testing.tiny_models import tiny_tokenizer


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    for number in range(3):
        lines = [f"line {line} of text {number} says {line * number}\n" for line in range(40)]
        (tmp_path / f"text{number}.txt").write_text("".join(lines))
    return tmp_path


@pytest.mark.parametrize("template", [True, False])
def test_six_documents_stand_between_instructions_and_a_question(
    texts: Path, template: bool
) -> None:
    tokenizer = tiny_tokenizer()
    if not template:
        tokenizer.chat_template = None

    prompts = calibration_prompts(PromptRenderer(tokenizer), texts, count=2, tokens=16)

    for prompt in prompts:
        front, question = tokenizer.decode(prompt.front), tokenizer.decode(prompt.question)
        documents = [tokenizer.decode(document) for document in prompt.documents]
        assert "You are a helpful assistant" in front
        assert len(documents) == 6
        assert all("says" in document for document in documents)
        assert "Summarize" in question
        assert question != tokenizer.decode(prompt.donor_question)


def test_too_few_texts_are_an_error(texts: Path) -> None:
    with pytest.raises(ConfigError, match="100 prompts need 600"):
        calibration_prompts(PromptRenderer(tiny_tokenizer()), texts, count=100, tokens=16)
