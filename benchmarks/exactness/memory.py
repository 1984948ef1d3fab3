"""How far are the doctor's formulas for a trainer rank's memory from what torch counts in one update?

    python benchmarks/exactness/memory.py                              # UI-TARS' widths at 2 and 3 layers
    python benchmarks/exactness/memory.py --small                      # widths of a few seconds, as the tests have
    python benchmarks/exactness/memory.py --tokens 17600 --ranks 4 --recompute

A language model with transformers' own classes is made under FakeTensorMode, where tensors have shapes
and no numbers, is sharded by the trainer's own function over ranks that are not there, and
FSDPMemTracker counts what one rank's update holds at its peak: two packs whose gradients add up, after an update that made AdamW's moments.
The vision tower does not run: screens' features are an input, as they are in an update with a frozen
tower. The last line is JSON: `worst` is the largest relative error of a formula;
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
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AttentionInterface, AutoConfig, AutoModelForImageTextToText

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from dart_cli.algo.chunked import token_scores
from dart_cli.config.architecture import is_tied, shape_of
from dart_cli.doctor.trainer_memory import TrainerMemory, TrainerSetup, trainer_memory
from dart_cli.policy.packed import use_recompute
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


def _causal(
    _module: nn.Module, query: Any, key: Any, value: Any, _mask: Any, **_: Any
) -> tuple[torch.Tensor, None]:
    """Compute attention [1, heads, L, D] as a varlen kernel does: keys of few heads are not repeated."""
    output = functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=True
    )
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, _causal)


class Scored(nn.Module):
    """A language model and its head, as the root that FSDP2 gathers: hidden states and their scores."""

    def __init__(self, model: nn.Module, predicted: int) -> None:
        """Keep the language model of `model` and its head; the last `predicted` tokens are a completion."""
        super().__init__()
        self.inner: Any = model.model.language_model
        self.lm_head: Any = model.lm_head
        self._predicted = predicted

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
    head = text["hidden_size"] // text["num_attention_heads"]
    sections = [head // 2 - 2 * (head * 3 // 16), head * 3 // 16, head * 3 // 16]
    inner = tree.get("text_config", tree)
    inner |= {**text, "num_hidden_layers": layers, "max_position_embeddings": 131072}
    if kind == "qwen3_vl":
        inner["head_dim"] = head
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
    with pretended_ranks(setup.ranks) as mesh, FakeTensorMode():
        model = _model(kind, tree, setup)
        root = Scored(model, setup.predicted)
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


def _model(kind: str, tree: dict[str, Any], setup: TrainerSetup) -> Any:
    settings = {key: value for key, value in tree.items() if key != "model_type"}
    config = AutoConfig.for_model(kind, **settings)
    config._attn_implementation = ATTENTION  # noqa: SLF001 - transformers has no other
    tied = is_tied(tree)
    config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = tied
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    model.model.visual.requires_grad_(False)
    model.eval()
    if setup.recompute:
        use_recompute(model)
    return model


def predicted(tree: dict[str, Any], setup: TrainerSetup) -> TrainerMemory:
    """Return the doctor's formulas of the same update; no frozen tower stands beside it."""
    memory = trainer_memory(shape_of(tree), setup, whole_gradients=0)
    return replace(memory, permanent={**memory.permanent, "frozen": 0})


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
    text, results = SMALL if options.small else SEVEN_B, []
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
