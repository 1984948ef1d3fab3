from __future__ import annotations

from random import Random

import torch
from transformers import DynamicCache

from dart_cli.engines.caches import SPARE_COLUMNS, BatchKVCache, kv_bytes_per_token
from dart_cli.policy.loader import LoadedPolicy

HEADS, WIDTH, LAYERS = 2, 3, 2


def made(tokens: int) -> torch.Tensor:
    """Keys or values [heads, tokens, width] that no other call gives."""
    return torch.randn(HEADS, tokens, WIDTH)


def prefilled(rows: list[torch.Tensor]) -> DynamicCache:
    """What a prefill of rows [layers, 2, heads, tokens, width] leaves: padded on the left."""
    longest = max(row.shape[3] for row in rows)
    cache = DynamicCache()
    for layer in range(LAYERS):
        padded = [torch.full((2, HEADS, longest, WIDTH), 99.0) for _ in rows]
        for whole, row in zip(padded, rows, strict=True):
            whole[:, :, longest - row.shape[3] :] = row[layer]
        both = torch.stack(padded)
        cache.update(both[:, 0], both[:, 1], layer)
    return cache


def random_row(tokens: int) -> torch.Tensor:
    return torch.randn(LAYERS, 2, HEADS, tokens, WIDTH)


def grow(cache: BatchKVCache, rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """One token more for every row, checked: the pass sees each row whole and nothing else."""
    mask = cache.begin_pass()
    grown = [torch.cat([row, random_row(1)], dim=3) for row in rows]
    for layer in range(LAYERS):
        new = torch.stack([row[layer, :, :, -1:] for row in grown])
        seen = torch.stack(cache.update(new[:, 0], new[:, 1], layer), dim=1)
        assert seen.shape[3] == mask.shape[1] == max(row.shape[3] for row in grown)
        assert seen.isfinite().all()
        for index, row in enumerate(grown):
            torch.testing.assert_close(seen[index][:, :, mask[index] == 1], row[layer])
    cache.end_pass()
    return grown


def test_each_row_keeps_its_own_keys_and_values_as_others_come_and_go() -> None:
    """Any order of joins, passes and leaves, of rows of any length."""
    torch.manual_seed(0)
    rng = Random(0)
    cache, rows = BatchKVCache(), list[torch.Tensor]()
    most, emptied = 0, 0
    for _ in range(400):
        kind = rng.choice(["join", "leave", "grow", "grow", "grow"])
        if kind == "join" or not rows:
            joiners = [random_row(rng.choice([1, 3, 20, 90])) for _ in range(rng.randint(1, 3))]
            cache.join(prefilled(joiners), [row.shape[3] for row in joiners])
            rows += joiners
        elif kind == "leave":
            gone = set(rng.sample(range(len(rows)), rng.randint(1, len(rows))))
            rows = [rows[row] for row in cache.remove(gone)]
            emptied += not rows
        else:
            rows = grow(cache, rows)
        assert cache.lengths == [row.shape[3] for row in rows]
        most = max(most, len(rows))
    assert most > 5
    assert emptied > 5


def test_rows_that_stay_after_a_leave_are_named_by_where_they_were() -> None:
    cache = BatchKVCache()
    cache.join(prefilled([random_row(tokens) for tokens in (4, 5, 6, 7, 8)]), [4, 5, 6, 7, 8])
    assert cache.remove({0, 3}) == [4, 1, 2]
    assert cache.lengths == [8, 5, 6]


def test_an_unused_cache_holds_no_memory() -> None:
    cache = BatchKVCache()
    cache.join(prefilled([random_row(4), random_row(9)]), [4, 9])
    assert cache.remove({0, 1}) == []
    assert len(cache.layers) == 0


def test_a_pass_copies_nothing_while_there_are_columns_to_spare() -> None:
    cache = BatchKVCache()
    rows = [random_row(4), random_row(9)]
    cache.join(prefilled(rows), [4, 9])
    before = cache.layers[0].keys.data_ptr()
    for _ in range(SPARE_COLUMNS):
        rows = grow(cache, rows)
    assert cache.layers[0].keys.data_ptr() == before
    grow(cache, rows)
    assert cache.layers[0].keys.data_ptr() != before


@torch.inference_mode()
def test_a_token_takes_as_many_bytes_as_is_said(policy: LoadedPolicy) -> None:
    cache = DynamicCache()
    policy.model(input_ids=torch.tensor([[20, 21, 22]]), past_key_values=cache, use_cache=True)
    held = sum(part.nbytes for layer in cache.layers for part in (layer.keys, layer.values))
    assert kv_bytes_per_token(policy.model) * 3 == held
