"""What the caches of an engine may keep when its weights change.

PrefixWindow    which versions take over each other's keys and values of prompts
vision_digest   what the vision tower is in a set of weights, from its manifest
"""

from __future__ import annotations

import hashlib
import json

from dart_cli.policy.weight_set import WeightSet, directory_of

MANIFEST = "manifest.json"
"""The file of a set's digests in its directory (dart_cli/weights/manifest.py)."""
NO_VISION = ""
"""The digest of a set without tensors of the vision tower: adapters of the text model."""


class PrefixWindow:
    """Versions whose prefixes serve one another: those from one version to `most` after it.

    With `most` = 0 each version has its own. Windows follow one another, so a prefix is never of weights
    that are more than `most` versions older than those that continue it. A version that is not after the last
    one begins a window: a trainer that went back to a checkpoint has published it, and what it left behind is
    no older version of it.
    """

    def __init__(self, most: int, version: int) -> None:
        self.number = 0
        self._most = most
        self._first = self._last = version

    def take(self, version: int) -> bool:
        """These weights serve from now on; whether a new window begins, in which no earlier prefix counts."""
        last, self._last = self._last, version
        if last < version <= self._first + self._most:
            return False
        self._first = version
        self.number += 1
        return True


def vision_digest(source: WeightSet) -> str | None:
    """One digest of the vision tower's tensors in a checked set; None if its manifest has none.

    Two sets of equal digests have equal towers, so features of screens are the same under both.
    """
    try:
        text = (directory_of(source) / MANIFEST).read_text(encoding="utf-8")
        tensors = json.loads(text)["tensors"]
        found = sorted(
            (name, str(tensors[name]["digest"])) for name in tensors if "visual." in name
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return hashlib.blake2b(repr(found).encode()).hexdigest() if found else NO_VISION
