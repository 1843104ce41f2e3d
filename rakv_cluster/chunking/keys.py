"""Names of stored KV: 256-bit keys that are equal exactly when the KV may be shared.

Every key is ``sha256(namespace | domain letter | ...)`` with a namespace of fixed length, so no
two kinds of key can collide by concatenation. Token ids are hashed as little-endian uint32.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

import numpy as np

from rakv_cluster.errors import InvalidRequest

KEY_BYTES = 32
ROOT = bytes(KEY_BYTES)
"""Parent of a prompt's first chunk."""

_ID_LIMIT = 2**32
_HEAD_LENGTHS = (128, 64, 32, 16, 8, 0)


def namespace(model_digest: bytes, tenant_salt: bytes) -> bytes:
    """The 32-byte namespace of one tenant's KV of one model.

    ``model_digest`` covers everything that changes KV (``ModelCard.digest``); ``tenant_salt`` is
    set by the server, never by a client. Its length is hashed too, so that no digest/salt pair
    can pass for another.
    """
    length = len(model_digest).to_bytes(4, "little")
    return sha256(b"rakv.namespace.1\0" + length + model_digest + tenant_salt).digest()


def content_key(ns: bytes, token_ids: Sequence[int] | np.ndarray) -> bytes:
    """Names the tokens alone, wherever they stand."""
    return sha256(ns + b"C" + id_bytes(token_ids)).digest()


def prefix_key(ns: bytes, parent: bytes, token_ids: Sequence[int] | np.ndarray) -> bytes:
    """Names the tokens behind everything that ``parent`` (a prefix key or ``ROOT``) names."""
    return sha256(ns + b"P" + parent + id_bytes(token_ids)).digest()


def tail_key(ns: bytes, parent: bytes, head: Sequence[int] | np.ndarray = ()) -> bytes:
    """Names the open tail behind ``parent`` that begins with the tokens ``head``.

    That is one record: the tokens last seen there that complete no chunk. KV of equal tokens behind
    an equal prefix is valid whatever follows, so a reader uses the longest common prefix of the
    record's tokens and the wanted ones. ``head`` keeps apart tails behind one common prefix, such
    as the first turns of chats that share a system prompt; see :func:`head_lengths`.
    """
    return sha256(ns + b"T" + parent + id_bytes(head)).digest()


def head_lengths(tokens: int) -> tuple[int, ...]:
    """Lengths of heads that a tail's ``tokens`` leading tokens can be filed under, longest first.

    A writer files a tail once, under the first of them for the tokens that any later request for
    it will have; a reader asks for all of them for the tokens it wants.
    """
    return tuple(length for length in _HEAD_LENGTHS if length <= tokens)


def id_array(token_ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """Token ids as little-endian uint32; raises ``InvalidRequest`` outside ``0 .. 2**32 - 1``."""
    try:
        wide = np.asarray(token_ids, dtype=np.int64)
    except (OverflowError, TypeError, ValueError) as error:
        raise InvalidRequest("token ids must be integers", field="token_ids") from error
    if wide.size and not (wide.min() >= 0 and wide.max() < _ID_LIMIT):
        raise InvalidRequest("token ids must be in 0 .. 2**32 - 1", field="token_ids")
    return wide.astype("<u4")


def id_bytes(token_ids: Sequence[int] | np.ndarray) -> bytes:
    """The hashed form of token ids."""
    if isinstance(token_ids, np.ndarray) and token_ids.dtype == np.dtype("<u4"):
        return token_ids.tobytes()
    return id_array(token_ids).tobytes()
