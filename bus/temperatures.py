"""The range of sampling temperatures, for messages and the configuration, which imports no messages."""

from __future__ import annotations

MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-3, 10.0
"""Range in which logits of any dtype can be divided; a request outside of it would fail its whole prefill
batch."""
