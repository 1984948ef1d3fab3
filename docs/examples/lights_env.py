"""An environment of your own, whole: press the square switch, then light the lamp that is named.

`dart up docs/examples/lights.toml` trains the tiny model on it. From here to a policy for your application:
docs/your-application.md.
"""

import io
import random

from PIL import Image, ImageDraw

from envs.actions import Click, Done
from envs.base import Observation, Task, Verdict, task_of

COLOURS = {"red": (220, 40, 40), "green": (30, 160, 60), "blue": (40, 80, 220)}
SIDE = 168  # pixels


class LightsEnv:
    """The square switch shows three lamps, the round one blows the fuse; a click lights a lamp."""

    def reset(self, *, seed=None, options=None):
        task = task_of(options, LightsSuite.tasks, "lights")
        rng = random.Random(seed)
        self.order = rng.sample(list(COLOURS), k=3)
        self.goal = rng.choice(self.order)
        self.square = rng.choice([46, 122])  # pixels; the round switch is on the other side
        self.on, self.blown, self.lit, self.steps = False, False, set(), 0
        self.max_steps = task.max_steps
        return self._look(), {"instruction": task.instruction.format(colour=self.goal)}

    def step(self, action):
        self.steps += 1
        if isinstance(action, Click) and self.on:
            self.lit ^= {self.order[min(2, action.x * 3 // SIDE)]}
        elif isinstance(action, Click) and action.y > 100:
            self.on = abs(action.x - self.square) < 24
            self.blown = abs(action.x - (SIDE - self.square)) < 24
        terminated = isinstance(action, Done) or self.blown or bool(self.lit)
        reward = float(terminated and self.evaluate().outcome == "pass")
        return self._look(), reward, terminated, self.steps >= self.max_steps, {}

    def evaluate(self):
        passed = self.lit == {self.goal}
        return Verdict("pass" if passed else "fail", f"lit {self.lit}, blown {self.blown}")

    def close(self):
        """Nothing to free; a browser or a container would be stopped here."""

    def _look(self):
        image = Image.new("RGB", (SIDE, SIDE), "white")
        draw = ImageDraw.Draw(image)
        draw.rectangle((self.square - 20, 112, self.square + 20, 152), "black")
        draw.ellipse((148 - self.square, 112, 188 - self.square, 152), "black")
        for i, colour in enumerate(self.order if self.on else []):
            width = 4 if colour in self.lit else 1
            draw.ellipse((i * 56 + 6, 40, i * 56 + 50, 84), COLOURS[colour], "black", width)
        encoded = io.BytesIO()
        image.save(encoded, "PNG")
        return Observation(encoded.getvalue(), "image/png", SIDE, SIDE)


class LightsSuite:
    """What `env.suite` names: tasks by id, and a way to make the environment."""

    name = "lights"
    tasks = {"lights/on": Task("lights/on", name, "click the {colour} button", max_steps=4)}

    def make_env(self):
        return LightsEnv()
