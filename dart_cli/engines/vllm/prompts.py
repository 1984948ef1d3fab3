"""A request in vLLM's words, and what vLLM says of it in ours.

engine_input     prompt and images -> what AsyncLLM takes, each image by its content hash
sampling_params  a Sampling and what is drawn already -> SamplingParams
OutputCollector            what one output of vLLM adds to a completion
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm import SamplingParams
from vllm.inputs.engine import mm_input, tokens_input
from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange
from vllm.sampling_params import RequestOutputKind

from bus.messages import Sampling
from dart_cli.engines.vllm.images import IMAGE, image_item
from dart_cli.engines.vllm.sampler import COLUMNS, SECTION
from dart_cli.policy.images import PreparedImage

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput


def engine_input(
    token_ids: list[int], images: Sequence[PreparedImage], image_token: int, salt: str
) -> Any:
    """The prompt [P] with its images [I], whose placeholders stand in it in their order.

    The images are those that the trainer sees, to the bit. `salt` sets the prefix cache apart.
    """
    if not images:
        return tokens_input(token_ids, cache_salt=salt)
    return mm_input(
        prompt_token_ids=token_ids,
        mm_kwargs=MultiModalKwargsItems(
            {IMAGE: [image_item(image.patches, image.grid) for image in images]}
        ),
        mm_hashes={IMAGE: [image.key for image in images]},
        mm_placeholders={IMAGE: placeholders(token_ids, images, image_token)},
        cache_salt=salt,
    )


def placeholders(
    token_ids: Sequence[int], images: Sequence[PreparedImage], image_token: int
) -> list[PlaceholderRange]:
    """Where each image stands. The prompt has as many placeholders as the images take."""
    ranges, position = [], 0
    for image in images:
        position = token_ids.index(image_token, position)
        ranges.append(PlaceholderRange(offset=position, length=image.tokens))
        position += image.tokens
    return ranges


def sampling_params(sampling: Sampling, drawn: int, ends: Sequence[int]) -> SamplingParams:
    """How to go on after `drawn` tokens of the completion."""
    return SamplingParams(
        temperature=sampling.temperature,
        max_tokens=sampling.max_tokens - drawn,
        logprobs=COLUMNS - 1,  # beside the drawn token's
        flat_logprobs=True,
        stop_token_ids=list(ends),
        ignore_eos=True,  # `ends` holds it where it is one
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args={SECTION: {"seed": sampling.seed, "first": drawn}},
    )


class OutputCollector:
    """What one or more outputs of vLLM say: tokens [N] and their numbers."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []  # nats
        self.entropies: list[float] = []  # nats
        self.finish = ""  # vLLM's reason, at the end
        self.versions: list[int] = []  # [N], at the end

    def add(self, output: CompletionOutput) -> None:
        """One more output."""
        self.token_ids += output.token_ids
        numbers: Any = output.logprobs
        if numbers is not None:
            self.logprobs += numbers.logprobs[0::COLUMNS]
            self.entropies += [-value for value in numbers.logprobs[1::COLUMNS]]
        if output.finish_reason is not None:
            self.finish = output.finish_reason
            for span in output.weight_versions or []:
                self.versions += [int(span.version)] * (span.end - span.start)
