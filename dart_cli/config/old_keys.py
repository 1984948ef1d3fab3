"""Keys of older releases: one line each that says where the key went. A section stands by its name."""

from __future__ import annotations

OLD_KEYS = {
    "timing": "times of simulated parts are options of a simulated suite, in [env.options] (benchmarks/simulation)",
    "train.micro_batch": "train.pack_tokens bounds a forward pass, by its tokens",
}
"""`section.key` (or `section`) -> what is in its place, as a part of a sentence."""
