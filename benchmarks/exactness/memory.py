"""How far are the doctor's formulas for a trainer rank's memory from what torch counts in one update?

    python benchmarks/exactness/memory.py                              # UI-TARS' widths at 2 and 3 layers
    python benchmarks/exactness/memory.py --small                      # widths of a few seconds, as the tests have
    python benchmarks/exactness/memory.py --tokens 17600 --ranks 4 --recompute
    python benchmarks/exactness/memory.py --kind qwen3_5 --layers 4 --recompute

A language model with transformers' own classes is made under FakeTensorMode, where tensors have shapes
and no numbers, is sharded by the trainer's own function over ranks that are not there, and
FSDPMemTracker counts what one rank's update holds at its peak: two packs whose gradients add up, after an update that made AdamW's moments.
The vision tower does not run: screens' features are an input, as they are in an update with a frozen
tower. Recurrent layers (qwen3_5) run by the trainer's own function. Their rule in bfloat16, a GPU's kernel, is
replaced by a function that allocates and stores what version 0.6 of the kernel does. The last line is JSON: `worst` is the largest relative error of a formula;
the limit is 0.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AttentionInterface, AutoConfig, AutoModelForImageTextToText

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from dart_cli.algo.chunked import token_scores
from dart_cli.config.architecture import HYBRID, NEWER, is_tied, shape_of
from dart_cli.config.published import PUBLISHED
from dart_cli.config.schema import LoraConfig
from dart_cli.doctor.trainer_memory import WIDTH, TrainerMemory, TrainerSetup, trainer_memory
from dart_cli.policy import delta_net
from dart_cli.policy.experts import use_routing
from dart_cli.policy.lora import add_adapters
from dart_cli.policy.pack_plan import PackLayout
from dart_cli.policy.packed import use_recompute
from dart_cli.policy.state_plan import NodeGroup, StatePlan, plan_layout
from dart_cli.train.sharded import ShardingPlan, shard
from scripts.small_models import FAMILIES

ATTENTION = "counted"
"""Name of our attention in transformers."""

SEVEN_B: dict[str, Any] = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}
SMALL: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 8192,
}
NINE_B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "vocab_size": 248320,
}
SMALL_HYBRID: dict[str, Any] = {
    **SMALL,
    "head_dim": 128,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
_MIXTURE = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 192}
SMALL_MIXTURE: dict[str, Any] = {**SMALL, **_MIXTURE, "head_dim": 64}
SMALL_HYBRID_MIXTURE: dict[str, Any] = {
    **SMALL_HYBRID,
    **_MIXTURE,
    "shared_expert_intermediate_size": 192,
}
RULE_CHUNK = 64
"""Tokens of a chunk of the gated delta rule."""


WIDTHS = {
    "qwen3_5": (SMALL_HYBRID, NINE_B),
    "qwen3_vl_moe": (SMALL_MIXTURE, PUBLISHED["qwen3_vl_moe"].tree["text_config"]),
    "qwen3_5_moe": (SMALL_HYBRID_MIXTURE, PUBLISHED["qwen3_5_moe"].tree["text_config"]),
}
"""Small widths of a class and those of a published model, where they differ from SMALL and SEVEN_B."""


def _causal(
    _module: nn.Module, query: Any, key: Any, value: Any, _mask: Any, **_: Any
) -> tuple[torch.Tensor, None]:
    """Compute attention [1, heads, L, D] as a varlen kernel does: keys of few heads are not repeated."""
    output = functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=True
    )
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, _causal)


class _KernelSizes(torch.autograd.Function):
    """The tensors that flash-linear-attention's `chunk_gated_delta_rule` allocates and stores, without numbers.

    It takes queries and keys [1, T, heads, key], values [1, T, heads, value], g and beta [1, T, heads].
    """

    @staticmethod
    def forward(ctx: Any, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return empty outputs and states; keep what the kernel's backward pass reads."""
        query, key, value, decay, beta = inputs
        norms = [torch.empty_like(part) for part in (query, key)]
        sizes = [key.new_empty(key.shape[:3], dtype=torch.float32) for _ in range(3)]
        chunks = key.new_empty(*key.shape[:3], RULE_CHUNK)
        ctx.save_for_backward(*norms, *sizes, value, decay, beta, chunks)
        _ = _states(key, value), torch.empty_like(key), torch.empty_like(value)
        last = value.new_empty(1, *key.shape[2:], value.shape[3], dtype=torch.float32)
        return torch.empty_like(value), last

    @staticmethod
    def backward(ctx: Any, *_gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return empty gradients, while there are states, their gradients, and a chunk's own tensors."""
        query, key, _, _, _, value, decay, beta, _ = ctx.saved_tensors
        _ = _states(key, value), _states(key, value), torch.empty_like(key), torch.empty_like(key)
        _ = [torch.empty_like(value) for _ in range(3)]
        return tuple(torch.empty_like(each) for each in (query, key, value, decay, beta))


def _states(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return room for the state before each chunk, in the dtype of the keys."""
    chunks = -(-key.shape[1] // RULE_CHUNK)
    return key.new_empty(1, chunks, *key.shape[2:], value.shape[3])


def _counted_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    begin: torch.Tensor | None,
    lengths: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply the rule of the dtype: the trainer's own in float32, else the kernel's sizes."""
    if query.dtype == torch.float32:
        return _LIBRARY(query, key, value, decay, beta, begin, lengths)
    # The trainer copies the tokens of all sequences behind one another.
    copies = [part.contiguous().clone() for part in (query, key, value)]
    output, last = _KernelSizes.apply(*copies, decay, beta)  # type: ignore[no-untyped-call]
    return output + 0, last


_LIBRARY = delta_net._chunked  # noqa: SLF001 - what is replaced


class _OnePlan:
    """Stands for the trainer's plans of a pack: one sequence, in tensors without numbers."""

    def __init__(self, plan: StatePlan) -> None:
        self._plan = plan

    def states(self, _device: torch.device, _columns: int) -> StatePlan:
        """Return the plan of the recurrent layers."""
        return self._plan


class Scored(nn.Module):
    """A language model and its head, as the root that FSDP2 gathers: hidden states and their scores."""

    def __init__(self, model: nn.Module, predicted: int, plans: _OnePlan | None) -> None:
        """Keep the language model of `model` and its head; the last `predicted` tokens are a completion."""
        super().__init__()
        self.inner: Any = model.model.language_model
        self.lm_head: Any = model.lm_head
        self._predicted = predicted
        self._plans = {} if plans is None else {"pack_plans": plans}

    def forward(
        self, ids: torch.Tensor, features: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Return a loss of tokens [1, L] with their places [3, 1, L] and the screens' features [S, H]."""
        embedded = self.inner.embed_tokens(ids)
        before, after = embedded[:, :1], embedded[:, 1 + len(features) :]
        embeds = torch.cat([before, features.to(embedded.dtype)[None], after], 1)
        hidden = self.inner(
            inputs_embeds=embeds,
            position_ids=positions,
            attention_mask=torch.empty(1, 1, 1, 1),  # four axes: taken as finished, and ignored
            use_cache=False,
            **self._plans,
        ).last_hidden_state[0]
        read = hidden[-self._predicted - 1 : -1]
        logprobs, _ = token_scores(
            read,
            self.lm_head.weight,
            ids[0, -self._predicted :],
            temperature=1.0,
            forbidden=torch.zeros(1, dtype=torch.int64),
        )
        loss: torch.Tensor = logprobs.sum()
        return loss


def tree_of(kind: str, text: dict[str, Any], layers: int) -> dict[str, Any]:
    """Return a config.json of `kind` with these sizes of its language model and a small vision tower."""
    tree = copy.deepcopy({**FAMILIES[kind].config, "model_type": kind})
    head = text.get("head_dim", text["hidden_size"] // text["num_attention_heads"])
    rotated = head // 4 if kind in HYBRID else head
    sections = [rotated // 2 - 2 * (rotated * 3 // 16), rotated * 3 // 16, rotated * 3 // 16]
    inner = tree.get("text_config", tree)
    inner |= {**text, "num_hidden_layers": layers, "max_position_embeddings": 131072}
    if kind in NEWER:
        inner["head_dim"] = head
    if kind in HYBRID:
        inner["layer_types"] = None  # every fourth layer attends, as in the published models
    for key in ("rope_scaling", "rope_parameters"):
        if key in inner:
            inner[key] = {**inner[key], "mrope_section": sections}
    hidden_key = "hidden_size" if kind == "qwen2_vl" else "out_hidden_size"
    tree["vision_config"] |= {hidden_key: text["hidden_size"]}
    return tree


@contextmanager
def pretended_ranks(count: int) -> Iterator[Any]:
    """Yield a mesh of ranks that are not there: collectives return at once."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield init_device_mesh("cpu", (count,))
    finally:
        dist.destroy_process_group()


def counted(kind: str, tree: dict[str, Any], setup: TrainerSetup) -> int:
    """Return the bytes at the peak of a rank's second update of two packs, with a frozen vision tower."""
    plan = _plan(tree, setup.tokens)
    with pretended_ranks(setup.ranks) as mesh, FakeTensorMode() as mode, _rule_of_sizes():
        model = _model(kind, tree, setup)
        plans = None if plan is None else _OnePlan(_without_numbers(plan, mode))
        root = Scored(model, setup.predicted, plans)
        compute = getattr(torch, setup.dtype)
        shard(root, model, ShardingPlan(mesh, torch.device("cpu"), compute))
        optimizer = torch.optim.AdamW(root.parameters(), lr=1e-6, fused=True)
        width = shape_of(tree).width
        inputs = (
            torch.zeros(1, setup.tokens, dtype=torch.int64),
            torch.zeros(setup.tokens * 3 // 4, width, dtype=compute),
            torch.zeros(3, 1, setup.tokens, dtype=torch.int64),
        )
        tracker = FSDPMemTracker(root, optimizer)
        tracker.track_inputs(inputs)
        with tracker:
            root(*inputs).backward()  # type: ignore[no-untyped-call]
            optimizer.step()  # from here on the moments are there
            optimizer.zero_grad()
            tracker.reset_mod_stats()
            tracker._peak_mem.clear()  # noqa: SLF001 - it has no other way
            tracker._peak_mem_snap.clear()  # noqa: SLF001
            for _ in range(2):
                root(*inputs).backward()  # type: ignore[no-untyped-call]
                tracker.reset_mod_stats()
            optimizer.step()
        (peak,) = tracker.get_tracker_snapshot("peak").values()
        return int(peak["Total"])


@contextmanager
def _rule_of_sizes() -> Iterator[None]:
    """Let recurrent layers compute by `_counted_rule` in the block."""
    delta_net._chunked = _counted_rule  # noqa: SLF001
    try:
        yield
    finally:
        delta_net._chunked = _LIBRARY  # noqa: SLF001


def _plan(tree: dict[str, Any], tokens: int) -> StatePlan | None:
    """Return the plan of a pack of one sequence; None if no layer is recurrent."""
    delta = shape_of(tree).delta
    if delta is None:
        return None
    return plan_layout(PackLayout((0, tokens), (-1,)), delta.kernel - 1, torch.device("cpu"))


def _without_numbers(plan: StatePlan, mode: FakeTensorMode) -> StatePlan:
    """Return `plan` with tensors of `mode`."""
    depths = tuple(
        tuple(
            NodeGroup(
                *(
                    mode.from_tensor(each)
                    for each in (group.inputs, group.tokens, group.lengths, group.starts)
                )
            )
            for group in depth
        )
        for depth in plan.depths
    )
    rest = (mode.from_tensor(each) for each in (plan.places, plan.nodes, plan.ends))
    return StatePlan(depths, *rest)


def _model(kind: str, tree: dict[str, Any], setup: TrainerSetup) -> Any:
    settings = {key: value for key, value in tree.items() if key != "model_type"}
    config = AutoConfig.for_model(kind, **settings)
    config._attn_implementation = ATTENTION  # noqa: SLF001 - transformers has no other
    tied = is_tied(tree)
    config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = tied
    if setup.adapters:
        model = _adapted(config, tree, setup)
    else:
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        model.model.visual.requires_grad_(False)
    model.eval()
    delta_net.use_states(model)
    use_routing(model)
    if setup.recompute:
        use_recompute(model)
    return model


def _adapted(config: Any, tree: dict[str, Any], setup: TrainerSetup) -> Any:
    """Return a model with float32 adapters on frozen weights of `setup.dtype`, in tensors of the present mode."""
    with unset_fake_temporarily(), torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config, dtype=getattr(torch, setup.dtype))
        add_adapters(model, LoraConfig(rank=setup.adapters // shape_of(tree).adapters(1)))
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            is_trained = weight.requires_grad
            dtype = torch.float32 if is_trained else weight.dtype
            fresh = nn.Parameter(torch.empty(weight.shape, dtype=dtype), requires_grad=is_trained)
            module.register_parameter(name, fresh)
        for name, buffer in list(module.named_buffers(recurse=False)):
            module.register_buffer(name, torch.empty(buffer.shape, dtype=buffer.dtype))
    return model


def predicted(tree: dict[str, Any], setup: TrainerSetup) -> TrainerMemory:
    """Return the doctor's formulas of the same update; no frozen tower stands beside it."""
    shape = shape_of(tree)
    memory = trainer_memory(shape, setup, whole_gradients=0)
    tower = WIDTH[setup.dtype] * shape.vision
    return replace(
        memory, permanent={**memory.permanent, "frozen": memory.permanent["frozen"] - tower}
    )


def main() -> None:
    """Count, compare, print a line each, then JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="widths that take seconds")
    parser.add_argument("--kind", default="qwen2_5_vl", choices=sorted(FAMILIES))
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--tokens", type=int, nargs="+", default=[9500, 17600])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--predicted", type=int, default=512)
    parser.add_argument("--recompute", action="store_true")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    small, whole = WIDTHS.get(options.kind, (SMALL, SEVEN_B))
    text = small if options.small else whole
    results = []
    for tokens in options.tokens:
        for layers in options.layers:
            tree = tree_of(options.kind, text, layers)
            setup = TrainerSetup(
                tokens=tokens,
                predicted=options.predicted,
                ranks=options.ranks,
                recompute=options.recompute,
            )
            began = time.monotonic()
            count, formula = counted(options.kind, tree, setup), predicted(tree, setup)
            error = formula.peak / count - 1
            results.append(
                {"tokens": tokens, "layers": layers, "counted": count, "formula": formula.peak}
            )
            print(
                f"{layers} layers, {tokens} tokens, {options.ranks} ranks"
                f"{', recompute' if options.recompute else ''}: counted {count / 1e9:.3f} GB, formula "
                f"{formula.peak / 1e9:.3f} GB at {formula.phase} ({error:+.2%}), "
                f"{time.monotonic() - began:.0f} s",
                flush=True,
            )
    worst = max(abs(result["formula"] / result["counted"] - 1) for result in results)
    print(json.dumps({"cases": results, "worst": worst}))


if __name__ == "__main__":
    main()
