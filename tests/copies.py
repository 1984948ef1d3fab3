"""Copies of messages or rows with changed fields, including the fields of their sampled tokens."""

from __future__ import annotations

from dataclasses import is_dataclass, replace
from typing import Any

from bus.messages import SampledTokens


def copy_with(item: Any, **changes: Any) -> Any:
    """Return `item` with `changes`, not validated; a field of SampledTokens is changed in `item.sampled`."""
    inner = {
        name: changes.pop(name) for name in list(changes) if name in SampledTokens.model_fields
    }
    if inner:
        changes["sampled"] = item.sampled.model_copy(update=inner)
    return replace(item, **changes) if is_dataclass(item) else item.model_copy(update=changes)
