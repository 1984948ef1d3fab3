"""Keys of older releases: one line each that says where the key went. A section stands by its name."""

from __future__ import annotations

OLD_KEYS = {
    "bus.deadline_s": "a request has 30 s (DEADLINE_S of dart_cli/config/endpoints.py)",
    "bus.stall_s": "a stall is told after 20 s (STALL_S of dart_cli/config/endpoints.py)",
    "bus.transport": "bus.host names an address for tcp, and empty means sockets in the run directory",
    "gpus": "set up.train_gpus and up.rollout_gpus",
    "sync": "weights.concurrent is its key of that name; a permit ends after 120 s",
    "timing": "times of simulated parts are options of a simulated suite, in [env.options] (benchmarks/simulation)",
    "train.micro_batch": "train.pack_tokens bounds a forward pass, by its tokens",
    "up.cluster_wait_s": "a process waits 600 s for room in a cluster",
    "up.restart": "a process that died is started again three times",
    "tune.gaussian_width": "a constant, that of V2P's released code",
    "tune.layout": "the files tell the layout; scripts/foreign_rows converts rows of other projects",
    "tune.limit": "all rows are learned; name fewer files, or tune.per_task",
    "tune.lm_weight": "a constant, 1",
    "tune.lr_head": "it follows the model's size",
    "tune.max_pixels": "max_pixels in the model's preprocessor_config.json",
    "tune.pointer_weight": "a constant, 1",
    "tune.points": "the centre of an item's box",
    "tune.save_every_s": "a constant, 300 s",
    "tune.suppress": 'part of tune.target = "v2p"',
    "tune.skip_malformed": "malformed rows are refused; scripts/foreign_rows leaves them out with --skip-malformed",
    "weights.delta": 'weights.channel = "gloo" or "nccl" sends only what changed',
    "weights.whole_every": "nothing: of a broadcast one version in 8 is written whole, and the last",
}
"""`section.key` (or `section`) -> what is in its place, as a part of a sentence."""
