"""What a batch costs, against single examples and plain formulas in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from bus.errors import UserError
from dart_cli.algo.pointing import gaussian_target
from dart_cli.grounding.formats import grounding_config
from dart_cli.grounding.items import Item
from dart_cli.grounding.reader import read_set
from dart_cli.policy.forward import image_features, logits
from dart_cli.policy.loader import LoadedPolicy, load_policy
from dart_cli.tune.examples import Example, Examples, PointerAnswers, TextAnswers, visible_box
from dart_cli.tune.loss import LossSettings, batch_loss, collate_batch, counts_of


@pytest.fixture(scope="module")
def policy(pointer_folder: Callable[[str], Path]) -> LoadedPolicy:
    loaded = load_policy(pointer_folder("builtin:tiny"), "float64", pointing="pointer")
    loaded.model.requires_grad_(False)
    return loaded


@pytest.fixture(scope="module")
def items(grounding_set: Path) -> list[Item]:
    """Two of the trained size, one larger."""
    return [
        *read_set(grounding_set / "train").items[:2],
        *read_set(grounding_set / "test_layout").items[:1],
    ]


def examples(policy: LoadedPolicy, items: list[Item]) -> list[Example]:
    config, answers = grounding_config(
        str(policy.folder), "", ['policy.pointing="pointer"'], refusals=False
    )
    examples_of = Examples(policy, config, items, PointerAnswers(policy, config, answers))
    return [examples_of.of(index) for index in range(len(items))]


@contextmanager
def record(module: torch.nn.Module) -> Iterator[list[torch.Tensor]]:
    """What a module gives."""
    seen: list[torch.Tensor] = []
    hook = module.register_forward_hook(lambda *arguments: seen.append(arguments[-1]))
    yield seen
    hook.remove()


def test_a_pointer_stands_in_the_place_of_the_numbers(
    policy: LoadedPolicy, items: list[Item]
) -> None:
    [first, *_] = examples(policy, items)
    assert policy.pointer is not None
    words = policy.tokenizer.convert_ids_to_tokens(first.answer)
    assert words == [
        "click(",
        *("<|pointer_start|>", "<|pointer_pad|>", "<|pointer_end|>"),
        ")",
        "<|im_end|>",
    ]
    box, (wide, high) = visible_box(items[0]), items[0].size
    assert first.box == (box.x0 / wide, box.y0 / high, box.x1 / wide, box.y1 / high)


def test_a_batch_costs_what_its_examples_cost_alone_in_plain_formulas(
    policy: LoadedPolicy, items: list[Item]
) -> None:
    batch = examples(policy, items)
    settings = LossSettings(target="v2p")
    counts = counts_of(batch, policy)
    assert counts == (4 * 3, 3)  # click(, start, ), end: what is forced is not counted
    found = batch_loss(policy, collate_batch(policy, batch, settings), settings, counts)
    expected = {"lm": 0.0, "pointer": 0.0, "outside": 0.0}
    head = policy.pointer_head
    assert head is not None
    for example in batch:
        ids = [*example.prompt.token_ids, *example.answer]
        inputs = policy.inputs([ids], [example.prompt.images])
        values = logits(policy.model, inputs, last=len(ids))[0].numpy().copy()
        values[:, list(policy.forbidden_token_ids)] = -np.inf
        logprobs = values - np.log(np.exp(values).sum(axis=1, keepdims=True))
        first = len(example.prompt.token_ids)
        for index in (0, 1, 4, 5):
            expected["lm"] -= logprobs[first + index - 1, example.answer[index]] / 12
        inner = policy.model.model
        with record(inner.language_model.norm) as seen:
            logits(policy.model, inputs, last=1)
        features = image_features(policy.model, inputs.images).embeds[0]
        scores = head(features, seen[0][0, first + 2][None])[0].numpy()
        p = np.exp(scores) / np.exp(scores).sum()
        assert example.box is not None
        _, rows, columns = inputs.images[0].grid
        t = gaussian_target(example.box, rows // 2, columns // 2).numpy()
        expected["pointer"] += sum(a * np.log(a / b) for a, b in zip(t, p, strict=True) if a) / 3
        expected["outside"] += p[t == 0].sum() / 3
    for name, value in expected.items():
        assert found.sums[name] == pytest.approx(value, rel=1e-9), name
    total = expected["lm"] + expected["pointer"] + expected["outside"]
    assert found.sums["loss"] == pytest.approx(total, rel=1e-6)


def test_with_the_box_as_target_only_the_kl_counts_and_a_head_alone_learns_no_words(
    policy: LoadedPolicy, items: list[Item]
) -> None:
    batch = examples(policy, items)
    counts = counts_of(batch, policy)
    for settings, parts in (
        (LossSettings(), ("lm", "pointer")),
        (LossSettings(lm=False), ("pointer",)),
    ):
        found = batch_loss(policy, collate_batch(policy, batch, settings), settings, counts).sums
        assert found["loss"] == pytest.approx(sum(found[part] for part in parts), rel=1e-6)


def test_parts_of_a_batch_add_up_to_it(policy: LoadedPolicy, items: list[Item]) -> None:
    batch = examples(policy, items)
    settings, counts = LossSettings(), counts_of(batch, policy)
    whole = batch_loss(policy, collate_batch(policy, batch, settings), settings, counts)
    parts = [
        batch_loss(policy, collate_batch(policy, [each], settings), settings, counts)
        for each in batch
    ]
    for name, value in whole.sums.items():
        assert sum(part.sums[name] for part in parts) == pytest.approx(value, rel=1e-5), name


def test_a_token_that_is_never_sampled_is_told_before_training(grounding_set: Path) -> None:
    policy = load_policy("builtin:tiny", weights=False)
    config, answers = grounding_config("builtin:tiny", "", [], refusals=False)
    told = read_set(grounding_set / "train").items[:1]

    class Greek(TextAnswers):
        def text(self, item: Item) -> str:
            return "λ"

    with pytest.raises(
        UserError, match=r"screenspot_desktop.json\[0\].*'<unk>'.*tune.action_parser"
    ):
        Examples(policy, config, told, Greek(policy, config, answers))
