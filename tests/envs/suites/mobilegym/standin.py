"""A small stand-in for a built checkout of MobileGym: a phone in a page, and a bench_env with the same classes.

The phone has one application with two switches. The program in the place of Vite is one of Python, so that `node` is
this interpreter, which also has what the stand-in of bench_env imports.
"""

from __future__ import annotations

from pathlib import Path

SERVER = """
import argparse
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("verb"); parser.add_argument("root", type=Path)
parser.add_argument("--host"); parser.add_argument("--port", type=int)
parser.add_argument("--strictPort", action="store_true")
args = parser.parse_args()
handler = partial(SimpleHTTPRequestHandler, directory=args.root / "dist")
ThreadingHTTPServer((args.host, args.port), handler).serve_forever()
"""

PAGE = """<!doctype html><meta name="viewport" content="width=device-width"><title>phone</title><body style="margin:0"><script>
let state = JSON.parse(localStorage.state || '{"os": {}, "apps": {"clock": {"wifi": false, "sound": false, "text": ""}}}');
let path = "/";
const later = (ms) => new Promise((done) => setTimeout(done, ms));
const show = () => {
  document.body.textContent = "";
  ["wifi", "sound"].forEach((name, index) => {
    const button = document.createElement("button");
    button.textContent = name + (state.apps.clock[name] ? " on" : " off");
    button.style = `position:absolute;left:0;top:${60 * index}px;width:180px;height:60px`;
    button.onclick = () => { state.apps.clock[name] = !state.apps.clock[name]; keep(); };
    document.body.append(button);
  });
};
const keep = () => { localStorage.state = JSON.stringify(state); show(); };
window.calls = [];
window.__SIM__ = {
  getState: () => state,
  setState: (patch) => { Object.assign(state.apps.clock, patch.apps?.clock ?? {}); state.apps.answer_sheet = patch.apps?.answer_sheet ?? state.apps.answer_sheet; keep(); },
};
window.__OS__ = {openApp: () => { path = "/clock"; }, getAppRoute: () => ({app: "clock", path})};
window.__SIM_INPUT__ = {
  tap: (x, y) => { calls.push(["tap", x, y]); document.elementFromPoint(x, y)?.click(); },
  doubleTap: (...all) => calls.push(["doubleTap", ...all]),
  longPress: async (x, y, ms) => { await later(ms); calls.push(["longPress", x, y, ms]); },
  swipe: async (from, to, options) => { await later(options.ms); calls.push(["swipe", from, to]); },
  drag: async (from, to, options) => { await later(options.ms); calls.push(["drag", from, to]); },
  type: async (text) => { state.apps.clock.text += text; calls.push(["type", text]); },
  back: () => { path = "/"; calls.push(["back"]); },
  home: () => calls.push(["home"]),
  recent: () => calls.push(["recent"]),
  enter: () => calls.push(["enter"]),
};
show();
</script></body>"""

FILES = {
    "bench_env/__init__.py": "",
    "bench_env/splits/test.txt": "clock.ReadText\n",
    "bench_env/splits/train.txt": "clock.SwitchOn\n",
    "bench_env/config.py": """
class RunnerConfig:
    viewport_size, device_scale_factor = (180, 320), 2.0
    def __init__(self, agent, model_name):
        pass
    def get_max_steps(self, task):
        return task.max_steps
""",
    "bench_env/env/__init__.py": "",
    "bench_env/env/mobile_gym.py": """
import asyncio, json
from types import SimpleNamespace

class MobileGymEnv:
    supports_state_injection = True
    def __init__(self, *, url, viewport_size, physical_size, device_scale_factor, coord_space, verbose):
        assert physical_size == (viewport_size[0] * device_scale_factor, viewport_size[1] * device_scale_factor)
        self.url, self._page, self._fresh = url, None, False
    @staticmethod
    def get_context_args(width, height, scale):
        return {"user_agent": "Phone/1.0"}
    async def reset(self):
        if not self._fresh:
            await self._page.goto(self.url)
        await self._page.wait_for_function("() => Boolean(window.__SIM__)", timeout=60000)
    async def open_app(self, name):
        await self._page.evaluate("async ({a}) => { await new Promise(r => setTimeout(r, 300)); __OS__.openApp(a); }", {"a": name})
        await asyncio.sleep(0.3)
    async def get_state(self, *, required_apps=None):
        return json.loads(await self._page.evaluate("() => JSON.stringify(__SIM__.getState())"))
    async def set_state(self, patch, *, deep=True, reload=False):
        await self._page.evaluate("(patch) => { __SIM__.setState(patch) }", patch)
    async def get_observation(self):
        await self._page.screenshot(type="jpeg")
        return SimpleNamespace(route=await self._page.evaluate("__OS__.getAppRoute()"), state=await self.get_state())
""",
    "bench_env/task/__init__.py": "",
    "bench_env/task/registry.py": """
import random

class SwitchOn:
    apps, difficulty, max_steps, answer_fields = ["clock"], "L1", 15, None
    def __init__(self, seed=0):
        self.id = f"clock.{type(self).__name__}"
        self.target = random.Random(seed).choice(["wifi", "sound"])
        self.description = f"Switch {self.target} on"
    def checks(self, first, last, answer):
        return [last.state["apps"]["clock"][self.target], last.route["path"] == "/clock"]
    def allowed(self):
        return {self.target}

class ReadText(SwitchOn):
    difficulty, max_steps, answer_fields = "L3", 45, [{"label": "text"}]
    def __init__(self, seed=0):
        super().__init__(seed)
        self.description = "Say the word"
    def checks(self, first, last, answer):
        if answer == "boom":
            raise ValueError("no such word")
        return [answer == "word"]

def load_tasks(suite=None, *, seed=None):
    return [SwitchOn(seed or 0), ReadText(seed or 0)]
""",
    "bench_env/runner/__init__.py": "",
    "bench_env/runner/base.py": """
class Result:
    def __init__(self, **fields):
        self.fields = fields
    def to_dict(self):
        return self.fields

class Controller:
    @staticmethod
    async def setup(env, task):
        await env.reset()
        await env.open_app("clock")
        if "sound" == task.target:
            await env.set_state({"apps": {"clock": {"sound": False}}})
        return await env.get_observation(), {}

class Evaluator:
    def __init__(self, judge_mode):
        assert judge_mode == "state"
    async def evaluate(self, task, first, last, done):
        try:
            checks = task.checks(first, last, done.agent_answer)
        except ValueError as error:
            return Result(passed=False, success=False, clean=True, progress=0.0, issues=[], warnings=[], judge_error=str(error))
        before, after = first.state["apps"]["clock"], last.state["apps"]["clock"]
        warnings = [{"field": name, "before": before[name], "after": after[name]}
                    for name in before if before[name] != after[name] and name not in task.allowed()]
        issues = [{"field": str(n), "expected": True, "actual": check, "passed": check} for n, check in enumerate(checks)]
        success = all(checks)
        return Result(passed=success and not warnings, success=success, clean=not warnings,
                      progress=sum(checks) / len(checks), issues=issues, warnings=warnings)
""",
}


def write_folder(folder: Path) -> Path:
    """Write the checkout, built, and return it."""
    files = {
        **FILES,
        "node_modules/vite/bin/vite.js": SERVER,
        "dist/index.html": PAGE,
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder
