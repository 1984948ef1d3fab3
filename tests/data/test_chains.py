"""Chains hold each step's prompt and completion exactly, and each token once where steps extend."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from weakref import ref

from hypothesis import given
from hypothesis import strategies as st

from bus.messages import Batch
from bus.packed import float64s, int32s
from dart_cli.data.loading import chained, chained_of
from dart_cli.data.store.steps import BatchStep


def a_step(
    trajectory: str,
    step: int,
    prompt: list[int],
    completion: list[int],
    images: list[str],
    group: str = "g",
) -> BatchStep:
    return BatchStep(
        group_id=group,
        trajectory_id=trajectory,
        step=step,
        prompt_token_ids=int32s(prompt),
        token_ids=int32s(completion),
        image_hashes=images,
        behaviour_logprobs=float64s([-0.5] * len(completion)),
        version_spans=[],
        advantage=float(step),
        weight=1.0,
        patches=[-1] * (len(completion) - 1) + [step] if step % 2 else [],
    )


def batch_of(steps: list[BatchStep]) -> Batch:
    chains, samples = chained(steps)
    return Batch(
        batch_id=1, group_ids=[], temperature=1.0, chains=chains, samples=samples, images={}
    )


def assert_holds(batch: Batch, steps: list[BatchStep]) -> None:
    for step, sample in zip(steps, batch.samples, strict=True):
        assert (sample.group_id, sample.trajectory_id, sample.step, sample.advantage) == (
            step.group_id, step.trajectory_id, step.step, step.advantage
        )  # fmt: skip
        assert batch.prompt(sample) == step.prompt_token_ids
        assert batch.completion(sample) == step.token_ids
        assert batch.image_hashes(sample) == step.image_hashes
        assert sample.behaviour_logprobs == step.behaviour_logprobs
        assert sample.patches == step.patches


EXTENDING = [
    a_step("t", 0, [1, 2], [3], ["a"]),
    a_step("t", 1, [1, 2, 3, 4], [5, 6], ["a", "b"]),
    a_step("t", 2, [1, 2, 3, 4, 5, 6, 7], [8], ["a", "b"]),
]


def test_steps_that_extend_one_another_are_one_chain() -> None:
    batch = batch_of(EXTENDING)
    [chain] = batch.chains
    assert list(chain.token_ids) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert chain.image_hashes == ["a", "b"]
    assert_holds(batch, EXTENDING)


def test_a_step_that_is_left_out_breaks_no_chain_whose_prompt_holds_it() -> None:
    steps = [EXTENDING[0], EXTENDING[2]]
    batch = batch_of(steps)
    assert len(batch.chains) == 1
    assert_holds(batch, steps)


def test_other_tokens_or_images_begin_another_chain() -> None:
    for steps in (
        [EXTENDING[0], a_step("t", 1, [1, 2, 9, 4], [5], ["a", "b"])],
        [EXTENDING[0], a_step("t", 1, [1, 2, 3, 4], [5], ["z", "b"])],
        [EXTENDING[1], a_step("t", 2, [1, 2, 3, 4, 5, 6, 7], [8], ["a"])],
        [EXTENDING[0], a_step("u", 1, [1, 2, 3, 4], [5], ["a", "b"])],
        [EXTENDING[0], a_step("t", 1, [1, 2], [3], ["a"]), EXTENDING[2]],
    ):
        batch = batch_of(steps)
        assert len(batch.chains) >= 2
        assert_holds(batch, steps)


def test_a_trajectory_of_two_groups_is_in_the_chains_once() -> None:
    again = [a_step("t", 0, [1, 2], [3], ["a"], group="other")]
    batch = batch_of([*EXTENDING, *again])
    assert len(batch.chains) == 1
    assert_holds(batch, [*EXTENDING, *again])


def test_no_more_than_two_steps_are_held_while_they_are_read() -> None:
    made: list[ref[BatchStep]] = []

    def read() -> Iterator[BatchStep]:
        for number in range(9):
            assert sum(each() is not None for each in made) <= 2
            prompt = list(range(2 * number + 1))
            step = a_step("t", number, prompt, [len(prompt)], ["a"])
            made.append(ref(step))
            yield step
            del step

    chains, samples = chained_of(read(), range(9))
    assert [list(chain.token_ids) for chain in chains] == [list(range(18))]
    assert [(sample.step, sample.start) for sample in samples] == [(n, 2 * n + 1) for n in range(9)]


@st.composite
def episodes(draw: st.DrawFn) -> list[BatchStep]:
    """Trajectories whose prompts extend the step before, or do not, some of their steps left out."""
    steps = []
    for name in ("t", "u"):
        held: list[int] = []
        images: list[str] = []
        for step in range(draw(st.integers(0, 6))):
            if not draw(st.integers(0, 3)):
                held, images = held[: draw(st.integers(0, 3))], images[1:]
            held = held + draw(st.lists(st.integers(0, 2), min_size=1, max_size=3))
            images = [*images, *draw(st.sampled_from([[], ["a"], ["b", "a"]]))]
            completion = draw(st.lists(st.integers(0, 2), min_size=1, max_size=3))
            steps.append(a_step(name, step, held, completion, images))
            if draw(st.booleans()):
                held = held + completion
    kept = draw(st.lists(st.booleans(), min_size=len(steps), max_size=len(steps)))
    return draw(
        st.permutations([step for step, is_kept in zip(steps, kept, strict=True) if is_kept])
    )


@given(episodes())
def test_each_sample_is_its_step_however_they_extend(steps: list[BatchStep]) -> None:
    batch = batch_of(steps)
    assert_holds(batch, steps)
    # No chain could have gone on in the next one of its trajectory.
    for name in {step.trajectory_id for step in steps}:
        own = sorted((s.step, s.chain) for s in batch.samples if s.trajectory_id == name)
        assert [chain for _, chain in own] == sorted(chain for _, chain in own)
        for (_, one), (_, other) in pairwise(own):
            last, first = batch.chains[one], batch.chains[other]
            if one != other:
                begin = min(s.start for s in batch.samples if s.chain == other)
                shown = min(s.images for s in batch.samples if s.chain == other)
                assert (
                    first.token_ids[:begin][: len(last.token_ids)] != last.token_ids
                    or first.image_hashes[:shown][: len(last.image_hashes)] != last.image_hashes
                )
