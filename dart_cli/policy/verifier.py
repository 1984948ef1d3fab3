"""The verifier: a second model that checks whether a place is the one that an instruction names.

    VerifierSpec   the mark, the crop and the question that a verifier was trained with (`verifier.json`)
    mark_place     cuts out the part of a screenshot around a place, with a hollow red circle on the place
    Verifier       scores a place by P(True) / (P(True) + P(False))
    load_verifier  loads the verifier of a model folder
    first_good     chooses the first candidate with a sufficient score, or the best one

The design follows GUI-Actor's verifier (arXiv 2506.03143, 3.4), with circle and crop as in its released code.
Training and use both take their pictures from this module. The engine's part is
dart_cli/engines/verified_responder.py.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from PIL import Image, ImageDraw, UnidentifiedImageError
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bus.errors import EngineError, ModelError
from dart_cli.config.model_folder import VERIFIER
from dart_cli.policy.forward import logits
from dart_cli.policy.loader import LoadedPolicy, load_policy
from dart_cli.policy.prompt import PromptRenderer
from envs.contract.screenshots import BROKEN, as_seen

ANSWERS = ("True", "False")

THRESHOLD = 0.8
"""The score from which on a candidate is clicked without trying the next ones (arXiv 2506.03143)."""

PROMPT = (
    "A hollow red circle marks a place on this screenshot. Is it the place that the instruction names? "
    "Answer True or False.\nInstruction: {instruction}"
)


class VerifierSpec(BaseModel):
    """The mark, the crop and the question with which a verifier is trained and used."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    radius: int = Field(default=7, ge=1, le=500)  # of the circle, pixels of the screenshot
    width: int = Field(default=3, ge=1, le=100)  # of its line, inwards
    reach: int = Field(ge=8, le=10_000)  # of the crop, pixels to each side of the place
    prompt: str = PROMPT  # with {instruction} in it

    @classmethod
    def of(cls, folder: Path) -> VerifierSpec:
        """Return the spec of the verifier in a model folder. Raises ModelError if the folder has none."""
        path = folder / VERIFIER
        try:
            return cls.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            raise ModelError(
                f"{folder} is no verifier: it has no {VERIFIER}; train one with "
                "`dart tune --data ROWS --model MODEL --out OUT`"
            ) from None
        except ValidationError as error:
            raise ModelError(
                f"{path}: {error.errors()[0]['msg']}; copy it again, or train the verifier again"
            ) from None

    def write(self, folder: Path) -> None:
        """Write the spec into a model folder, which makes it the folder of a verifier."""
        text = json.dumps(self.model_dump(), indent=2)
        (folder / VERIFIER).write_text(text + "\n", encoding="utf-8")


def mark_place(screenshot: Image.Image, x: float, y: float, spec: VerifierSpec) -> Image.Image:
    """Return the part of a screenshot around the place (x, y), in pixels, with a circle on the place.

    The part reaches `spec.reach` pixels from the place, or to the edge of the screenshot.
    """
    picture = screenshot.convert("RGB")  # makes a copy
    at, radius = (round(x), round(y)), spec.radius
    ring = (at[0] - radius, at[1] - radius, at[0] + radius, at[1] + radius)
    ImageDraw.Draw(picture).ellipse(ring, outline="red", width=spec.width)
    wide, high = picture.size
    middle = min(max(at[0], 0), wide - 1), min(max(at[1], 0), high - 1)
    return picture.crop(
        (
            max(0, middle[0] - spec.reach),
            max(0, middle[1] - spec.reach),
            min(wide, middle[0] + spec.reach),
            min(high, middle[1] + spec.reach),
        )
    )


def open_screenshot(encoded: bytes) -> Image.Image:
    """Return a decoded screenshot to mark places on. Raises EngineError if it is not an image."""
    try:
        with Image.open(io.BytesIO(encoded)) as image:
            return as_seen(image)
    except (UnidentifiedImageError, *BROKEN) as error:
        raise EngineError(f"a screenshot of {len(encoded)} bytes cannot be read: {error}") from None


def as_png(picture: Image.Image) -> bytes:
    """Return a picture as encoded bytes, as prompts have them."""
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


class Verifier:
    """A loaded verifier, which scores places. Not thread-safe."""

    def __init__(self, policy: LoadedPolicy, renderer: PromptRenderer, spec: VerifierSpec) -> None:
        self.policy = policy
        self.spec = spec
        self._renderer = renderer
        self._answers = answer_tokens(policy)
        # An empty thought, which training also puts before the answer.
        self._thought = policy.encode(renderer.closed_thought())

    @torch.inference_mode()
    def score(self, screenshot: Image.Image, instruction: str, x: float, y: float) -> float:
        """Return P(True) / (P(True) + P(False)) for the place (x, y), in pixels.

        Raises EngineError if the prompt is longer than the verifier's model allows.
        """
        picture = as_png(mark_place(screenshot, x, y, self.spec))
        prompt = self._renderer.render(instruction, [], picture)
        token_ids = [*prompt.token_ids, *self._thought]
        if len(token_ids) > self.policy.max_positions:
            raise EngineError(
                f"a verifier's prompt of {len(token_ids)} tokens is longer than the "
                f"{self.policy.max_positions} of its model"
            )
        values = logits(self.policy.model, self.policy.inputs([token_ids], [prompt.images]), last=1)
        true, false = values[0, -1, list(self._answers)].tolist()
        return float(torch.sigmoid(torch.tensor(true - false, dtype=torch.float64)))


def load_verifier(folder: Path, dtype: str, device: torch.device) -> Verifier:
    """Load the verifier of a folder. Its prompts are built as in training: the picture, then the question.

    Raises ModelError if the folder is no verifier, or cannot be loaded.
    """
    spec = VerifierSpec.of(folder)
    policy = load_policy(folder, dtype, device)
    return Verifier(policy, PromptRenderer(policy, "", spec.prompt, "image_first"), spec)


def answer_tokens(policy: LoadedPolicy) -> tuple[int, int]:
    """Return the first tokens of `True` and `False`. Raises ModelError if they are the same."""
    true, false = (policy.encode(answer)[0] for answer in ANSWERS)
    if true == false:
        raise ModelError(
            f"{policy.folder}: True and False begin with the same token; choose another model as verifier"
        )
    return true, false


def first_good(scores: Iterable[float], threshold: float) -> tuple[int, list[float]]:
    """Return the index of the chosen candidate, and the scores that were computed until then.

    The first candidate with a score of at least `threshold` is chosen, and no later score is computed. If no
    score is sufficient, the best one is chosen, the first of equal ones.
    """
    computed: list[float] = []
    for score in scores:
        computed.append(score)
        if score >= threshold:
            return len(computed) - 1, computed
    return _best(computed), computed


def _best(scores: Sequence[float]) -> int:
    """Return the index of the highest score, the first of equal ones; 0 without scores."""
    return max(range(len(scores)), key=lambda i: (scores[i], -i)) if scores else 0
