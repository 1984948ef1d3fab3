"""Are our loss and its gradient those of TRL, and of formulas written from other sources?

    python benchmarks/exactness/lossparity.py [--cases 500] [--variants kl_k3 ...] [--seed 0]
        [--out benchmarks/results/lossparity.json]

For each variant, random batches are drawn in float64: completions of 1 to 12 tokens, log-probabilities that cross
every bound, another clip, cap and range in each. `policy_loss` (dart_cli/algo) and the same objective

- of TRL: `GRPOTrainer._compute_loss` of the installed release, which is given our log-probabilities as
  its model's (`pip install -e '.[parity]'`); left out where TRL cannot be imported;
- derived: benchmarks/exactness/lossparity_formulas.py, from the sources of verl, slime, prime-rl and TRL and from
  the papers, in plain Python.

Differences are absolute, of the loss and of its derivative by each token's log-probability. The limit is
rounding in float64; the last line is JSON, and the exit code is 1 beyond 1e-9.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.exactness import lossparity_formulas as formulas
from benchmarks.exactness.lossparity_formulas import FORMULAS, Case, Numbers
from dart_cli.algo.loss import policy_loss
from dart_cli.algo.objective import Normalise, Objective, loss_weights

LIMIT = 1e-9


@dataclass(frozen=True)
class Variant:
    """A setting of our objective and of TRL's, by which both compute the same loss."""

    objective: dict[str, Any]  # of Objective; a text names one of the case's numbers
    normalise: Normalise = "tokens"
    trl: dict[str, Any] | None = None  # of TRL's trainer; None where it has no such loss
    is_first_pass: bool = False  # the policy is the proximal one
    is_demonstration: bool = False
    far: float = 1.0  # nats, standard deviation of reference - policy


CLIP = {"clip_low": "clip_low", "clip_high": "clip_high"}
RATIO = {**CLIP, "correction": "ratio"}
VARIANTS: dict[str, Variant] = {
    "grpo_token_mean": Variant(RATIO, trl={"loss_type": "bnpo"}),
    "grpo_sequence_mean": Variant(RATIO, "samples", {"loss_type": "grpo"}),
    "grpo_trajectory_mean": Variant(RATIO, "trajectories"),
    "dapo_clip_higher": Variant(RATIO, trl={"loss_type": "dapo"}),
    "decoupled_ppo": Variant({**CLIP, "correction": "none"}, trl={"loss_type": "bnpo", "old": "q"}),
    "truncated_is": Variant(
        {**CLIP, "importance_cap": "cap"}, trl={"loss_type": "bnpo", "old": "q", "weight": True}
    ),
    "dart_step_mean": Variant(
        {**CLIP, "importance_cap": "cap"},
        "samples",
        {"loss_type": "grpo", "old": "q", "weight": True},
    ),
    # Near the reference nothing is clamped, as in TRL; far from it most is.
    "kl_k3": Variant(
        {**RATIO, "kl_beta": "kl_beta"},
        "samples",
        {"loss_type": "grpo", "beta": "kl_beta"},
        far=0.5,
    ),
    "kl_k3_clamped": Variant({**RATIO, "kl_beta": "kl_beta"}, far=8.0),
    "demonstrations_cloned": Variant(CLIP, is_first_pass=True, is_demonstration=True),
}


@dataclass(frozen=True)
class Result:
    """A loss, and its derivatives by all log-probabilities [N]."""

    value: float
    gradient: np.ndarray


@dataclass
class Worst:
    """The largest differences from one comparator."""

    value: float = 0.0
    gradient: float = 0.0

    def add(self, ours: Result, theirs: Result) -> None:
        """Compare one case."""
        self.value = _larger(self.value, abs(ours.value - theirs.value))
        self.gradient = _larger(self.gradient, np.abs(ours.gradient - theirs.gradient).max())


def _larger(one: float, other: float) -> float:
    """Return the larger one; anything that is not a number is infinitely large."""
    return max(one, float(other)) if np.isfinite(other) else float("inf")


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare every variant; the last line is JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    results = {}
    for name in options.variants:
        results[name] = compare(name, options.cases, options.seed)
        summary = "  ".join(
            f"{other}: value {worst.value:.1e}, gradient {worst.gradient:.1e}"
            for other, worst in results[name].items()
        )
        print(f"{name:24} {summary}")
    most = {
        name: max(max(differences.value, differences.gradient) for differences in worst.values())
        for name, worst in results.items()
    }
    line = json.dumps(
        {
            "benchmark": "lossparity",
            "cases": options.cases,
            "seed": options.seed,
            "limit": LIMIT,
            "trl": trl_version(),
            "max_abs_difference": most,
            "by_comparator": {
                name: {other: vars(differences) for other, differences in worst.items()}
                for name, worst in results.items()
            },
        }
    )
    if options.out:
        options.out.write_text(line + "\n", encoding="utf-8")
    print(line)
    return int(any(value > LIMIT for value in most.values()))


def compare(name: str, cases: int, seed: int = 0, **changed: Any) -> dict[str, Worst]:
    """Return, by comparator, the largest differences over so many cases; `changed` replaces Objective's fields."""
    variant = VARIANTS[name]
    draw = random.Random(f"{seed}:{name}")
    differences = {"derived": Worst()}
    trainer = trl_trainer() if variant.trl is not None else None
    if trainer is not None:
        differences[f"trl {trl_version()}"] = Worst()
    for _ in range(cases):
        case = random_case(draw, variant)
        values = ours(case, variant, **changed)
        derived = FORMULAS[name](case)
        differences["derived"].add(values, Result(derived.value, derived.slope))
        if trainer is not None:
            differences[f"trl {trl_version()}"].add(values, of_trl(trainer, case, variant))
    return differences


def random_case(draw: random.Random, variant: Variant) -> Case:
    """Return a batch of one to six completions, some of one trajectory."""
    numbers = Numbers(
        clip_low=draw.uniform(0.05, 0.4),
        clip_high=draw.uniform(0.05, 0.6),
        cap=draw.choice([0.5, 1.0, 2.0, 5.0]),
        kl_beta=draw.uniform(0.001, 0.2),
    )

    def near(values: Sequence[float], sd: float) -> list[float]:
        return [value + draw.gauss(0, sd) for value in values]

    count = draw.randint(1, 6)
    sequences = []
    for _ in range(count):
        length = draw.randint(1, 12)
        policy = [-draw.expovariate(0.7) for _ in range(length)]
        proximal = policy if variant.is_first_pass else near(policy, 0.4)
        sequences.append(
            formulas.Sequence(
                trajectory=draw.randrange(count),
                advantage=draw.gauss(0, 1.5),
                policy=policy,
                proximal=proximal,
                behaviour=near(proximal, 0.6),
                reference=near(policy, variant.far),
            )
        )
    if variant.far < 1:  # k3 is below its bound
        sequences = [replace(sequence, reference=_within(sequence, 2.0)) for sequence in sequences]
    return Case(sequences, numbers)


def _within(sequence: formulas.Sequence, nats: float) -> list[float]:
    return [
        policy + max(-nats, min(nats, reference - policy))
        for policy, reference in zip(sequence.policy, sequence.reference, strict=True)
    ]


def settings_of(settings: dict[str, Any], numbers: Numbers) -> dict[str, Any]:
    """Return the settings, with the case's numbers for their names."""
    numbers_by_name = vars(numbers)
    return {name: numbers_by_name.get(value, value) for name, value in settings.items()}


def ours(case: Case, variant: Variant, **changed: Any) -> Result:
    """Return `policy_loss` of the case as one pack."""
    objective = Objective(**(settings_of(variant.objective, case.numbers) | changed))
    lengths = [len(sequence) for sequence in case.sequences]
    keys = [sequence.trajectory for sequence in case.sequences]
    shares = loss_weights(zip(keys, lengths, strict=True), variant.normalise)

    def tokens(name: str) -> torch.Tensor:
        values = [value for sequence in case.sequences for value in getattr(sequence, name)]
        return torch.tensor(values, dtype=torch.float64)

    def spread(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64).repeat_interleave(torch.tensor(lengths))

    policy = tokens("policy").requires_grad_()
    output = policy_loss(
        policy,
        tokens("proximal"),
        tokens("behaviour"),
        spread([sequence.advantage for sequence in case.sequences]),
        spread([shares.of(key, length) for key, length in zip(keys, lengths, strict=True)]),
        objective,
        divisor=shares.divisor,
        unknown=torch.full((case.tokens,), variant.is_demonstration),
        reference_logprobs=tokens("reference") if objective.kl_beta else None,
    )
    return _result(output.loss, policy)


def _result(loss: torch.Tensor, policy: torch.Tensor, mask: torch.Tensor | None = None) -> Result:
    loss.backward()  # type: ignore[no-untyped-call]
    assert policy.grad is not None
    return Result(loss.item(), (policy.grad if mask is None else policy.grad[mask]).numpy())


# --- TRL ------------------------------------------------------------------------------------------


@cache
def trl_trainer() -> Any:
    """Return TRL's GRPOTrainer; None where it cannot be imported."""
    if importlib.util.find_spec("trl") is None:
        return None
    try:
        from trl.trainer.grpo_trainer import GRPOTrainer
    except (ImportError, RuntimeError) as error:  # one of the packages that it wants is missing
        print(f"TRL cannot be imported and is left out: {error}", file=sys.stderr)
        return None
    return GRPOTrainer


@cache
def trl_version() -> str | None:
    """Return the version of the installed TRL; None where there is none."""
    if trl_trainer() is None:
        return None
    import trl

    return str(trl.__version__)


def of_trl(trainer: Any, case: Case, variant: Variant) -> Result:
    """Return `_compute_loss` of a batch whose model gives the case's log-probabilities."""
    settings = settings_of(variant.trl or {}, case.numbers)
    numbers, sequences = case.numbers, case.sequences
    longest = max(map(len, sequences))

    def padded(name: str) -> torch.Tensor:
        rows = [
            getattr(sequence, name) + [-1.0] * (longest - len(sequence)) for sequence in sequences
        ]
        return torch.tensor(rows, dtype=torch.float64)

    mask = torch.tensor([[t < len(sequence) for t in range(longest)] for sequence in sequences])
    policy = padded("policy").requires_grad_()
    old = padded("proximal" if settings.get("old") == "q" else "behaviour")
    none = torch.zeros(len(sequences), 1, dtype=torch.long)
    inputs = {
        "prompt_ids": none,
        "prompt_mask": none,
        "completion_ids": torch.zeros(len(sequences), longest, dtype=torch.long),
        "completion_mask": mask.double(),
        "advantages": torch.tensor(
            [sequence.advantage for sequence in sequences], dtype=torch.float64
        ),
        "old_per_token_logps": old,
        "ref_per_token_logps": padded("reference"),
        "num_items_in_batch": mask.sum(),
        "importance_sampling_ratio": _weights_of_trl(
            (padded("proximal") - padded("behaviour")) * mask, numbers
        ),
    }
    stub = SimpleNamespace(
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False),
        loss_type=settings["loss_type"],
        importance_sampling_level="token",
        epsilon_low=numbers.clip_low,
        epsilon_high=numbers.clip_high,
        beta=settings.get("beta", 0.0),
        use_vllm="weight" in settings,
        vllm_importance_sampling_correction="weight" in settings,
        max_completion_length=longest,
        _entropy_bonus_enabled=False,
        use_adaptive_entropy=False,
        entropy_coef=0.0,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        aux_loss_enabled=False,
        model=SimpleNamespace(training=False),  # no gradient accumulation to divide by
        current_gradient_accumulation_steps=1,
        accelerator=SimpleNamespace(
            num_processes=1,
            gather=lambda tensor: tensor,
            reduce=lambda tensor, reduction: tensor,  # noqa: ARG005 - accelerate's
        ),
        _metrics={"eval": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (
            policy,
            torch.zeros_like(policy),
            None,
        ),
    )
    loss = trainer._compute_loss(stub, None, inputs)  # noqa: SLF001 - it has no other name
    return _result(loss, policy, mask)


def _weights_of_trl(drift: torch.Tensor, numbers: Numbers) -> torch.Tensor:
    """Return importance weights as `_generate_and_score_completions` makes them (`token_truncate`)."""
    return drift.exp().clamp(max=numbers.cap)


if __name__ == "__main__":
    sys.exit(main())
