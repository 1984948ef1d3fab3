"""Sizes that bound the trainer's memory; without torch, so that `dart doctor` can read them."""

from __future__ import annotations

CHUNK_TOKENS = 1024
"""Completion tokens whose distributions over the vocabulary are in memory at once (chunked.py). With
VOCABULARY_CHUNK ids these are float32 logits of 64 MiB, enough work to keep a GPU busy."""

VOCABULARY_CHUNK = 16_384
"""Ids of the vocabulary whose logits are computed at once (chunked.py)."""

WHOLE_GRADIENTS_BYTES = 1 << 30
"""If the float32 gradients of all trained parameters take at most this, each rank keeps all of them, and they
are summed over ranks once an update (dart_cli/train/sharded.py)."""
