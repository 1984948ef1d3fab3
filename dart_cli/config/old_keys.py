"""Keys of older releases: one line each that says where the key went. A section stands by its name."""

from __future__ import annotations

OLD_KEYS = {
    "timing": "times of simulated parts are options of a simulated suite, in [env.options] (benchmarks/simulation)",
    "bus.deadline_s": "a request has 30 s (DEADLINE_S of dart_cli/config/endpoints.py)",
    "bus.stall_s": "a stall is told after 20 s (STALL_S of dart_cli/config/endpoints.py)",
    "bus.transport": "bus.host names an address for tcp, and empty means sockets in the run directory",
    "gpus": "set up.train_gpus and up.rollout_gpus",
    "train.micro_batch": "train.pack_tokens bounds a forward pass, by its tokens",
    "up.cluster_wait_s": "a process waits 600 s for room in a cluster",
    "up.restart": "a process that died is started again three times",
}
"""`section.key` (or `section`) -> what is in its place, as a part of a sentence."""
