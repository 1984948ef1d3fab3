"""The forward pass of Gated DeltaNet layers, which engine and trainer share (arXiv 2412.06464).

    use_states      lets the recurrent layers of a model take packs and batches that begin from states
    LayerStates     what one layer keeps of some sequences: the last inputs of its convolution, and a state
    StateCache      one layer's states before and after a pass
    delta_net       computes a layer over the nodes of a StatePlan (state_plan.py)
    rule_in_chunks, rule_of_one_token
                    apply the gated delta rule; vLLM's CPU build uses them, too (engines/vllm/recurrence.py)

Three of four layers of Qwen3.5 are of this kind. With `use_states` they compute packs and batches by one
function, so that no state passes from one sequence to another, and a tree gives the hidden states of its
paths. A forward pass without a plan, as transformers itself makes it, is computed by transformers.

The gated delta rule is computed in float32 or better whatever its inputs are; on a GPU in half precision by
the kernel of flash-linear-attention. No kernel is downloaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from bus.errors import MissingPartError
from dart_cli.config.devices import kernel_problem
from dart_cli.hardware import accelerator
from dart_cli.policy.packed import PackPlans, gather_rows
from dart_cli.policy.state_plan import StatePlan, StateShape

CHUNK = 64  # tokens at most of which one triangular system is solved


@dataclass
class LayerStates:
    """What one layer keeps of S sequences."""

    inputs: torch.Tensor  # [S, columns, channels], the last inputs of the convolution
    states: torch.Tensor  # [S, heads, key, value], float32 or better

    def select(self, rows: torch.Tensor) -> LayerStates:
        """Return copies of some sequences [R]."""
        return LayerStates(self.inputs.index_select(0, rows), self.states.index_select(0, rows))


class StateCache:
    """One layer's states: of the roots of a pass before it, and of all nodes after it."""

    def __init__(self, begin: LayerStates | None = None) -> None:
        self.content = begin

    @property
    def device(self) -> torch.device:
        """The device of the states, which must be there."""
        assert self.content is not None
        return self.content.states.device

    def begin(self) -> LayerStates | None:
        """Return the states from which the roots begin; None if they begin from nothing."""
        return self.content

    def end(self, after: LayerStates) -> None:
        """Take the states after the pass, of all nodes in order."""
        self.content = after

    def batch_select_indices(self, rows: torch.Tensor) -> None:
        """Keep the states of some sequences [R] alone, some of them several times."""
        assert self.content is not None
        self.content = self.content.select(rows)

    def join(self, fresh: LayerStates) -> None:
        """Add the states of more sequences after the present ones."""
        if self.content is not None:
            before = self.content
            fresh = LayerStates(
                torch.cat([before.inputs, fresh.inputs]), torch.cat([before.states, fresh.states])
            )
        self.content = fresh


def use_states(model: PreTrainedModel, compute: torch.dtype | None = None) -> None:
    """Let the recurrent layers of `model`, if it has any, take packs and batches that begin from states.

    The model computes in `compute`, by default the type of its parameters. Raises MissingPartError on a GPU
    without the kernel for that type.
    """
    shape = StateShape.of(model)
    if shape is None:
        return
    device = next(model.buffers()).device
    if accelerator.takes_packs(device, compute or model.dtype) and (missing := kernel_problem()):
        raise MissingPartError(f"model.path: {missing}")
    inner: Any = model.model
    for index in shape.layers:
        layer = inner.language_model.layers[index].linear_attn
        layer.forward = MethodType(_planned_forward, layer)


def _planned_forward(
    layer: Any,
    hidden_states: torch.Tensor,  # [B, L, H]
    cache_params: Any = None,
    attention_mask: torch.Tensor | None = None,
    *,
    pack_plans: PackPlans | None = None,
    state_plan: StatePlan | None = None,
    **options: Any,
) -> torch.Tensor:
    """Compute `layer` by a plan, or as transformers does where none is passed; transformers calls it."""
    if pack_plans is not None:
        state_plan = pack_plans.states(hidden_states.device, layer.conv_kernel_size - 1)
    out: torch.Tensor
    if state_plan is None:
        options |= {"cache_params": cache_params, "attention_mask": attention_mask}
        out = type(layer).forward(layer, hidden_states, **options)
    else:
        cache = None if cache_params is None else cache_params.layers[layer.layer_idx]
        out = delta_net(layer, hidden_states.flatten(0, 1), state_plan, cache)
    return out.view(hidden_states.shape)


def delta_net(
    layer: Any, hidden: torch.Tensor, plan: StatePlan, cache: StateCache | None = None
) -> torch.Tensor:
    """Return a layer's output [T, H] from hidden states [T, H]; tokens that are in no node get that of zeros.

    The roots begin from the states in `cache`, which gets those of all nodes; without one from nothing.
    """
    # 1. Project every token once.
    tokens = len(hidden)
    mixed, gate = layer.in_proj_qkv(hidden), layer.in_proj_z(hidden)
    beta = layer.in_proj_b(hidden).sigmoid()
    speed = F.softplus(_precise(layer.in_proj_a(hidden)) + layer.dt_bias)
    decay = -_precise(layer.A_log).exp() * speed
    # 2. Apply convolution and rule.
    if plan.single and not hidden.requires_grad and cache is not None and cache.begin() is not None:
        core = _one_token(layer, mixed, decay, beta, cache)
    else:
        core = _all_nodes(layer, mixed, decay, beta, plan, cache)
    # 3. Leave the layer.
    width = layer.head_v_dim
    core = layer.norm(core.reshape(-1, width), gate.reshape(-1, width))
    out: torch.Tensor = layer.out_proj(core.reshape(tokens, -1))
    return out


def _one_token(
    layer: Any, mixed: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, cache: StateCache
) -> torch.Tensor:
    """Return the outputs [B, heads, value] for one more token of each sequence in `cache`.

    It is what `_all_nodes` computes, without the copies of states that its tables would make.
    """
    before = cache.begin()
    assert before is not None
    rows = torch.cat([before.inputs, mixed[:, None]], 1)  # [B, columns + 1, channels]
    core, last = rule_of_one_token(
        *_heads(layer, rows), decay[:, None], beta[:, None], before.states
    )
    cache.end(LayerStates(rows[:, 1:], last))
    return core[:, 0]


def _all_nodes(
    layer: Any,
    mixed: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    plan: StatePlan,
    cache: StateCache | None,
) -> torch.Tensor:
    """Return the outputs [T, heads, value] from inputs of the convolution [T, channels] and gates [T, heads].

    Tokens that are in no node get 0.
    """
    # 1. One more row of zeros is the padding; after it come the inputs that earlier passes left.
    begin = None if cache is None else cache.begin()
    earlier = () if begin is None else (begin.inputs.flatten(0, 1),)
    rows = torch.cat([F.pad(mixed, (0, 0, 0, 1)), *earlier])
    decay, beta = F.pad(decay, (0, 0, 0, 1)), F.pad(beta, (0, 0, 0, 1))
    # 2. Compute the nodes depth by depth; those of a group in one call of the rule.
    states = None if begin is None else begin.states
    outputs: list[torch.Tensor] = []
    left: list[torch.Tensor] = []  # the states after the nodes
    for groups in plan.depths:
        before, states = states, None
        following: list[torch.Tensor] = []
        for group in groups:
            query, key, value = _convolved(layer, rows, group.inputs)
            core, last = _chunked(
                query,
                key,
                value,
                decay[group.tokens],
                beta[group.tokens],
                None if before is None else before.index_select(0, group.starts),
                group.lengths,
            )
            outputs.append(core.flatten(0, 1))
            following.append(last)
        states = torch.cat(following)
        left.append(states)
    if cache is not None:
        cache.end(LayerStates(rows[plan.ends], torch.cat(left).index_select(0, plan.nodes)))
    # 3. Put the tokens in their order.
    padded = F.pad(torch.cat(outputs), (0, 0, 0, 0, 0, 1))
    return padded.index_select(0, plan.places)


def _convolved(
    layer: Any, rows: torch.Tensor, inputs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries and keys [B, N, heads, key] and values [B, N, heads, value] of a group of nodes.

    `rows` [R, channels] are gathered by `inputs` [B, columns + N].
    """
    return _heads(layer, gather_rows(rows, inputs.flatten()).view(*inputs.shape, -1))


def _heads(layer: Any, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Convolve `inputs` [B, columns + N, channels], and return what `_convolved` does."""
    weight = layer.conv1d.weight
    mixed = F.conv1d(inputs.transpose(1, 2), weight, groups=len(weight)).transpose(1, 2)
    parts = torch.split(F.silu(mixed), [layer.key_dim, layer.key_dim, layer.value_dim], -1)
    query, key = (part.reshape(*part.shape[:2], -1, layer.head_k_dim) for part in parts[:2])
    shared = layer.num_v_heads // layer.num_k_heads
    if shared > 1:
        query, key = (part.repeat_interleave(shared, 2) for part in (query, key))
    return query, key, parts[2].reshape(*parts[2].shape[:2], -1, layer.head_v_dim)


def _precise(values: torch.Tensor) -> torch.Tensor:
    """Return `values` in float32, or in float64 if they are float64."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


# --- the gated delta rule: S' = exp(g) S, then S = S' + beta k (v - k S'), out = q S, per head


def _chunked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    begin: torch.Tensor | None,
    lengths: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply the rule to B sequences of at most N tokens, in chunks of tokens.

    Take queries and keys [B, N, heads, key], values [B, N, heads, value], `decay` (g) and `beta`
    [B, N, heads], 0 on padding, the states `begin` [B, heads, key, value] or None for zeros, and `lengths`
    [B]. Return the outputs [B, N, heads, value], arbitrary on padding, and the states after the sequences.
    """
    if not accelerator.takes_packs(query.device, query.dtype):
        return rule_in_chunks(query, key, value, decay, beta, begin)
    # The kernel takes sequences behind one another.
    real = torch.arange(query.shape[1], device=lengths.device) < lengths[:, None]
    inputs = [part[real][None] for part in (query, key, value)]
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    flat, last = chunk_gated_delta_rule(
        *inputs,
        g=decay[real][None],
        beta=beta[real][None],
        cu_seqlens=F.pad(lengths.cumsum(0), (1, 0)),
        initial_state=begin,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    core = value.new_zeros(value.shape)
    core[real] = flat[0]
    return core, last


def rule_in_chunks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    begin: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply the rule in torch's operations; see `_chunked`.

    A triangular system gives what the tokens of a chunk add to the state (arXiv 2412.06464, 3.3), and the state
    goes from chunk to chunk. The chunks are unbound once, so that the backward pass is linear in N. It is
    quadratic where a loop takes slices, as in transformers' function, whose values these are.
    """
    length = query.shape[1]
    size = min(CHUNK, 1 << (length - 1).bit_length())  # a turn may be far shorter than a chunk

    def chunks(part: torch.Tensor) -> torch.Tensor:
        """Return [B, N, heads, ...] as [B, heads, chunks, size, ...]."""
        padded = F.pad(part, (*[0, 0] * (part.ndim - 2), 0, -length % size))
        return padded.reshape(len(part), -1, size, *part.shape[2:]).movedim(3, 1)

    # 1. Let the tokens of each chunk decay to its beginning, to one another and to its end.
    query, key = chunks(_unit(query) * query.shape[-1] ** -0.5), chunks(_unit(key))
    values, sums = chunks(_precise(value)), chunks(_precise(decay)).cumsum(-1)
    strength = chunks(_precise(beta))[..., None]
    later = torch.ones(size, size, dtype=torch.bool, device=query.device).triu(1)
    between = (sums[..., :, None] - sums[..., None, :]).masked_fill(later, float("-inf")).exp()
    from_begin, to_end = sums.exp()[..., None], (sums[..., -1:] - sums).exp()[..., None]
    # 2. Solve for what the tokens add: `fresh` if the state is zeros, less `read` times the state.
    system = (key * strength) @ key.transpose(-1, -2) * between
    right = torch.cat([values * strength, key * strength * from_begin], -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    fresh, read = solved.split([values.shape[-1], key.shape[-1]], -1)
    # 3. Go from chunk to chunk.
    parts = (
        fresh,
        read,
        query * from_begin,
        query @ key.transpose(-1, -2) * between,
        (key * to_end).transpose(-1, -2),
        from_begin[..., -1:, :],
    )
    state = values.new_zeros(*values.shape[:2], key.shape[-1], values.shape[-1])
    state = state if begin is None else begin.to(values.dtype)
    outputs: list[torch.Tensor] = []
    for new, old, reader, within, writer, factor in zip(
        *(each.unbind(2) for each in parts), strict=True
    ):
        change = new - old @ state
        outputs.append(reader @ state + within @ change)
        state = state * factor + writer @ change
    core = torch.stack(outputs, 2).flatten(2, 3)[:, :, :length].transpose(1, 2)
    return core.to(value.dtype), state


def rule_of_one_token(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    begin: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply the rule to sequences of one token; see `_chunked`."""
    if accelerator.takes_packs(query.device, query.dtype):
        from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

        core, last = fused_recurrent_gated_delta_rule(
            query,
            key,
            value,
            g=decay,
            beta=beta,
            initial_state=begin,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        return core, last
    scaled, unit = _unit(query[:, 0]) * query.shape[-1] ** -0.5, _unit(key[:, 0])[..., None]
    values = _precise(value[:, 0])
    state = begin.to(values.dtype) * _precise(decay[:, 0]).exp()[..., None, None]
    change = (values - (state * unit).sum(-2)) * _precise(beta[:, 0])[..., None]
    state = state + unit * change[..., None, :]
    out = (state * scaled[..., None]).sum(-2)
    return out[:, None].to(value.dtype), state


def _unit(vectors: torch.Tensor) -> torch.Tensor:
    """Return vectors [..., width] divided by their length, in float32 or better."""
    vectors = _precise(vectors)
    return vectors * torch.rsqrt(vectors.square().sum(-1, keepdim=True) + 1e-6)
