"""What the rest of the cluster must know about a loaded model, as one picklable value."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

from transformers import PreTrainedTokenizerFast

from rakv_cluster.kv.layout import LAYOUT_VERSION, KvLayout

Exactness: TypeAlias = Literal["bitwise", "guarded", "numerically equivalent"]
"""``bitwise``: equal logits, whatever the batch, drafts and cache. ``guarded``: logits differ by
rounding, and tokens that it could change are computed again as plain decoding does. ``numerically
equivalent``: tokens may differ where two are nearly level."""

_NOT_SEMANTIC = frozenset(
    {"_name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype", "use_cache"}
)


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A loaded model's identity and limits.

    ``digest`` (32 bytes) covers everything that changes KV, see :func:`model_digest`; it names
    the cache's namespace together with a tenant's salt. ``numeric_class`` names what may round
    differently between replicas of the same model (device type, kernels, threads, dtype);
    ``self_check_error`` is the largest difference between this runner's logits and its
    reference's seen at load. Logits closer than ``near_tie_eps`` may change places with batching,
    speculation or reuse; 0 where a self-test at load found them equal bit for bit.
    """

    model_id: str
    digest: bytes
    context_tokens: int
    vocab_size: int
    layout: KvLayout
    eos_token_ids: frozenset[int]
    numeric_class: str
    self_check_error: float
    near_tie_eps: float

    @property
    def guarded_eps(self) -> float:
        """``near_tie_eps`` where near-ties are decided by replays, else 0.

        In half precision they are too many (1.6% of tokens): answers there are numerically
        equivalent to plain decoding, not equal.
        """
        return self.near_tie_eps if self.layout.dtype == "float32" else 0.0

    @property
    def exactness(self) -> Exactness:
        """What holds of exact mode's tokens against plain decoding without a cache."""
        if self.near_tie_eps == 0:
            return "bitwise"
        return "guarded" if self.guarded_eps else "numerically equivalent"


def tokenizer_digest(tokenizer: PreTrainedTokenizerFast) -> bytes:
    """SHA-256 over how text becomes ids: vocabulary, merges, special tokens, chat template."""
    return _sha256_json(
        {
            "backend": tokenizer.backend_tokenizer.to_str(),
            "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
            "chat_template": tokenizer.chat_template,
        }
    )


def model_digest(
    *,
    weights: bytes,
    config: Mapping[str, Any],
    layout: KvLayout,
    tokenizer: bytes,
) -> bytes:
    """SHA-256 over all that a stored KV depends on but its tokens.

    ``weights`` is the fingerprint of the weight files, ``config`` the model's whole configuration
    (RoPE parameters among it; keys that only describe its origin are left out), ``layout`` holds
    the compute dtype, ``tokenizer`` is :func:`tokenizer_digest`.
    """
    return _sha256_json(
        {
            "domain": "rakv-model",
            "layout_version": LAYOUT_VERSION,
            "weights": weights.hex(),
            "config": {key: config[key] for key in config if key not in _NOT_SEMANTIC},
            "layout": asdict(layout),
            "tokenizer": tokenizer.hex(),
        }
    )


def _sha256_json(value: object) -> bytes:
    text = json.dumps(value, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).digest()
