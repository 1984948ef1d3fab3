"""An environment of your own, whole: switch the named light on.

    dart up configs/quickstart.toml --set env.suite=docs/examples/lights_env.py:LightsSuite
"""

import io
import random

from PIL import Image, ImageDraw

from envs.actions import Click, Done
from envs.base import Observation, Task, Verdict

COLOURS = {"red": (220, 40, 40), "green": (30, 160, 60), "blue": (40, 80, 220)}
SIDE = 168  # pixels


class LightsEnv:
    """Three lamps in a random order; a click toggles the one under the pointer."""

    def reset(self, *, seed=None, options=None):
        rng = random.Random(seed)
        self.order = rng.sample(list(COLOURS), k=3)
        self.goal = rng.choice(self.order)
        self.lit = set()
        self.max_steps = options["task"].max_steps
        self.steps = 0
        instruction = options["task"].instruction.format(colour=self.goal)
        return self._look(), {"instruction": instruction}

    def step(self, action):
        self.steps += 1
        if isinstance(action, Click):
            self.lit ^= {self.order[min(2, action.x * 3 // SIDE)]}
        terminated = isinstance(action, Done) or self.lit == {self.goal}
        reward = float(terminated and self.evaluate().outcome == "pass")
        return self._look(), reward, terminated, self.steps >= self.max_steps, {}

    def evaluate(self):
        passed = self.lit == {self.goal}
        return Verdict("pass" if passed else "fail", f"lit: {sorted(self.lit)}")

    def close(self):
        """Nothing to free; a browser or a container would be stopped here."""

    def _look(self):
        image = Image.new("RGB", (SIDE, SIDE), "white")
        draw = ImageDraw.Draw(image)
        for i, colour in enumerate(self.order):
            box = (i * 56 + 6, 60, i * 56 + 50, 104)
            draw.ellipse(box, COLOURS[colour], "black", 4 if colour in self.lit else 1)
        encoded = io.BytesIO()
        image.save(encoded, "PNG")
        return Observation(encoded.getvalue(), "image/png", SIDE, SIDE)


class LightsSuite:
    """What `env.suite` names: tasks by id, and a way to make the environment."""

    name = "lights"
    tasks = {"lights/on": Task("lights/on", name, "click the {colour} button", max_steps=3)}

    def make_env(self):
        return LightsEnv()
