"""Keys of older releases: one line each that says where the key went. A section stands by its name.

OLD_KEYS      the keys
without_old   a stored configuration without them
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OLD_KEYS = {
    "bus.deadline_s": "a request has 30 s (DEADLINE_S of dart_cli/config/endpoints.py)",
    "bus.stall_s": "a stall is told after 20 s (STALL_S of dart_cli/config/endpoints.py)",
    "bus.transport": "bus.host names an address for tcp, and empty means sockets in the run directory",
    "data.coupled": 'data.scheduling = "batch", "april" and "oversample" take turns',
    "data.discount": "all steps of a trajectory have its advantage",
    "data.fork_weight": "trajectories are compared as wholes, by data.advantage",
    "data.lease_s": "a lease without a sign of life is taken back after 60 s",
    "data.length_slack": "2 steps, with data.dynamic_length",
    "data.min_group_size": "2 trajectories, with data.dynamic_number",
    "data.pool_online": "a run's own successes join the pool where data.pool_ratio > 0",
    "data.pool_per_task": "the pool keeps the newest 32 of a task and source",
    "data.recycle": 'data.scheduling = "oversample" discards what is unfinished',
    "data.replacements": "a group replaces as many trajectories as it has members",
    "data.screen_credit": "trajectories are compared as wholes, by data.advantage",
    "data.screen_discount": "trajectories are compared as wholes, by data.advantage",
    "data.screen_weight": "trajectories are compared as wholes, by data.advantage",
    "data.tracker_decay": "0.95 from one outcome to the next",
    "data.tracker_half_life": "trackers keep 0.95 from one outcome to the next",
    "data.tracker_scale": "advantages by trackers are taken as they are",
    "env.judge.answer_s": "a request to a judge has 60 s",
    "env.judge.attempts": "a judge is asked up to 4 times",
    "env.judge.concurrent": "8 episodes of a process are judged at once",
    "env.judge.deadline_s": "a judge has 300 s for an episode",
    "env.judge.device": "a model folder judges on the first GPU, else on the CPU",
    "env.judge.image_size": "a judge is shown screens of at most 1280 pixels a side",
    "env.judge.max_tokens": "an answer of a judge has at most 1024 tokens",
    "env.malformed": "a completion that is no action fails its episode",
    "env.max_processes": "bound an environment's processes by the system's own means (ulimit -u, a cgroup)",
    "env.memory_mb": "bound an environment's memory by the system's own means (a cgroup); suite desktop has env.options.memory_mb",
    "env.observe_chars": "each text beside a screenshot has at most 8000 characters in a prompt",
    "env.pass_threshold": "a reward alone passes where it is 1; an evaluator that passes earlier says so",
    "env.screen_ignore": "screens are no longer compared",
    "env.screen_match": "screens are no longer compared",
    "env.screenshot_quality": "webp is without loss, jpeg of quality 90",
    "eval.max_steps": "each task's own limit, or that of eval.protocol",
    "eval.per_task": "eval.episodes, or what eval.protocol publishes",
    "eval.random_episodes": "100 at most; dart eval --mode random --episodes N",
    "eval.seed": "a constant, 1000000",
    "gpus": "set up.train_gpus and up.rollout_gpus",
    "model.lora.targets": "adapters are on all linear layers of the language model",
    "model.lora.vision": "adapters are on the language model alone; without model.lora the tower is trained",
    "policy.history": "policy.history_images_most alone switches evictions on",
    "policy.previous_line": "the family says how earlier steps are told",
    "policy.previous_none": "the family says how earlier steps are told",
    "policy.resize_factor": "it is read of the model folder's preprocessor_config.json",
    "policy.resize_max_pixels": "it is read of the model folder's preprocessor_config.json",
    "policy.resize_min_pixels": "it is read of the model folder's preprocessor_config.json",
    "policy.verifier_threshold": "a candidate is taken from 0.8 on (THRESHOLD of dart_cli/policy/verifier.py)",
    "rollout.absent_s": "an environment waits 900 s while no worker can be asked (ABSENT_S of dart_cli/env/router.py)",
    "rollout.image_cache_mb": "room for the screens of the episodes in play follows from the run",
    "rollout.kv_cache_mb": "KV_CACHE_MB of dart_cli/config/schema/rollout.py; of vLLM gpu_memory_utilization",
    "rollout.max_prefix_staleness": "nothing: keys and values of older weights are never taken",
    "rollout.prefix_cache_mb": "PREFIX_CACHE_MB of dart_cli/config/schema/rollout.py",
    "serve.body_mb": "a request may have 64 MiB",
    "serve.idle_s": "an episode without a request for 600 s is over",
    "serve.lease_wait_s": "a request waits 30 s for a task",
    "sync": "weights.concurrent is its key of that name; a permit ends after 120 s",
    "timing": "times of simulated parts are options of a simulated suite, in [env.options] (benchmarks/simulation)",
    "train.average": "the newest weights are what is played, evaluated and exported",
    "train.average_for": "the newest weights are what is played, evaluated and exported",
    "train.betas": "AdamW's decay rates are 0.9 and 0.99 (dart_cli/train/learner.py)",
    "train.chunk_tokens": "1024 completion tokens are scored at once (dart_cli/algo/memory_bounds.py)",
    "train.constant_tokens": 'train.normalise is "tokens", "samples" or "trajectories"',
    "train.demonstration_gamma": "a demonstration's tokens weigh 1, whatever their probability",
    "train.demonstrations": "a demonstration's tokens weigh 1, whatever their probability",
    "train.dual_clip": "train.clip_low and train.clip_high bound a ratio",
    "train.entropy_coef": "the entropy is measured, and no part of the loss",
    "train.epochs": "an update is one step on its batch; train.reuse trains on it again, updates later",
    "train.image_workers": "4 threads of each rank prepare screens",
    "train.is_cap": "an older token weighs at most 1 (dart_cli/algo/objective.py)",
    "train.keep_checkpoints": "the newest 2 checkpoints are kept",
    "train.low_ess": "no fresh batch is skipped for its effective sample size, which is a metric",
    "train.lr_follows": "train.lr_end says how far the rate falls by the end of the run",
    "train.lr_hold": "train.lr_end says how far the rate falls by the end of the run",
    "train.mask_high": 'train.correction is "truncated", "none" or "ratio"',
    "train.mask_low": 'train.correction is "truncated", "none" or "ratio"',
    "train.micro_batch": "train.pack_tokens bounds a forward pass, by its tokens",
    "train.min_ess": "no fresh batch is skipped for its effective sample size, which is a metric",
    "train.objective": "GRPO's is the one: train.clip_low, train.clip_high and train.correction shape it",
    "train.parity_limit": "0.001 nats in float32 and 0.1 in bfloat16 (dart_cli/train/logprob_check.py)",
    "train.reuse_fall": "train.reuse alone decides how often a batch is trained on again",
    "train.reuse_gap": "a batch comes again after 2 updates at the earliest",
    "train.reuse_min_agreement": "a batch is trained on again where its effective sample size is 0.9 or more",
    "train.reuse_min_ess": "a batch is trained on again where its effective sample size is 0.9 or more",
    "train.reuse_until": "train.reuse alone decides how often a batch is trained on again",
    "tune.gaussian_width": "a constant, that of V2P's released code",
    "tune.layout": "the files tell the layout; scripts/foreign_rows converts rows of other projects",
    "tune.limit": "all rows are learned; name fewer files, or tune.per_task",
    "tune.lm_weight": "a constant, 1",
    "tune.lr_head": "it follows the model's size",
    "tune.max_pixels": "max_pixels in the model's preprocessor_config.json",
    "tune.pointer_weight": "a constant, 1",
    "tune.points": "the centre of an item's box",
    "tune.save_every_s": "a constant, 300 s",
    "tune.seconds": "tune.max_minutes bounds a training, in minutes of the clock",
    "tune.skip_malformed": "malformed rows are refused; scripts/foreign_rows leaves them out with --skip-malformed",
    "tune.suppress": 'part of tune.target = "v2p"',
    "up.cluster_wait_s": "a process waits 600 s for room in a cluster",
    "up.restart": "a process that died is started again, at most three times in a row",
    "vllm.async_scheduling": "set async_scheduling in vllm.options",
    "vllm.enforce_eager": "set enforce_eager in vllm.options",
    "vllm.kv_cache": "nothing: running requests are computed again under new weights, so that every token is of one version",
    "vllm.kv_cache_mb": "set kv_cache_memory_bytes in vllm.options",
    "vllm.prefix_caching": "set enable_prefix_caching in vllm.options",
    "weights.delta": 'weights.channel = "gloo" or "nccl" sends only what changed',
    "weights.whole_every": "nothing: of a broadcast one version in 8 is written whole, and the last",
}
"""`section.key` (or `section`) -> what is in its place, as a part of a sentence."""


def without_old(stored: Mapping[str, Any], section: str = "") -> dict[str, Any]:
    """Return a configuration that an older release stored, without the keys that are gone.

    Its run can be looked at and gone on with; in a file that a person wrote such a key is an error.
    """
    kept = {}
    for name, value in stored.items():
        key = f"{section}.{name}" if section else name
        if key not in OLD_KEYS:
            kept[name] = without_old(value, key) if isinstance(value, dict) else value
    return kept
