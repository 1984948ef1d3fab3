"""An agent's loop that knows nothing of dart but its HTTP endpoint; the policy learns from what it plays.

    dart up configs/quickstart.toml --set up.serve=true --set up.envs=0 --set run.dir=runs/served
    python docs/examples/chat_loop.py 16          # episodes at once; a port other than 8480 after it

The environment is gymnasium-like: suite `mini`, as one could play any other.
"""

import base64
import json
import re
import sys
import threading
import time
import urllib.error
import urllib.request

from envs.contract import actions as act
from envs.contract.registry import find_task, make_env

BASE = "http://127.0.0.1:8480/v1/sessions"


def post(path, body):
    """Return the answer of the endpoint; ask again for as long as it says so."""
    request = urllib.request.Request(
        BASE + path, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    while True:
        try:
            with urllib.request.urlopen(request, timeout=600) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            if error.code == 410:
                raise LookupError("the session is over") from None
            if "retry-after" not in error.headers:
                raise RuntimeError(error.read().decode()) from None
            time.sleep(float(error.headers["retry-after"]))


def parse(text, size):
    """`click(500,20)`, in thousandths of the screen, as an action; None for what is none."""
    match_of_call = re.fullmatch(r"(\w+)\((.*)\)", text, re.DOTALL)
    name, inside = match_of_call.groups() if match_of_call else ("", "")
    pixels = [(2 * int(n) + 1) * size // 2000 for n in re.findall(r"\d+", inside)]
    match name, pixels:
        case "click" | "right_click", [x, y]:
            return act.Click(x=x, y=y, button="left" if name == "click" else "right")
        case "double_click" | "move", [x, y]:
            return (act.Move if name == "move" else act.DoubleClick)(x=x, y=y)
        case "drag", [x, y, to_x, to_y]:
            return act.Drag(path=[(x, y), (to_x, to_y)])
        case "scroll", [x, y]:
            return act.Scroll(x=x, y=y, dy=3 if inside.endswith("down") else -3)
        case "type" | "answer", _:
            return (act.Type if name == "type" else act.Answer)(text=inside)
        case "key", _:
            return act.KeyPress(keys=inside.split("+"))
        case "wait" | "done" | "fail", []:
            return {"wait": act.Wait, "done": act.Done, "fail": act.Fail}[name]()
    return None


def episode(env):
    """Play what the endpoint chose, and hand the reward in."""
    session = post("", {})
    task = find_task("mini", session["task"])
    observation, info = env.reset(seed=session["seed"], options={"task": task})
    verdict = {"outcome": "fail", "reason": "no action", "stop_reason": "malformed"}
    for _ in range(session["max_steps"]):
        image = f"data:image/png;base64,{base64.b64encode(observation.screenshot).decode()}"
        parts = [
            {"type": "image_url", "image_url": {"url": image}},
            {"type": "text", "text": info["instruction"]},
        ]
        body = {"model": "dart", "messages": [{"role": "user", "content": parts}]}
        answer = post(f"/{session['id']}/chat/completions", body)
        action = parse(answer["choices"][0]["message"]["content"], observation.width)
        if action is None:
            break
        observation, reward, terminated, truncated, _ = env.step(action)
        if terminated or truncated or isinstance(action, act.Done | act.Fail | act.Answer):
            verdict = {"reward": reward, "stop_reason": "done" if terminated else "step_limit"}
            break
    post(f"/{session['id']}/end", verdict)


def play():
    """Episodes one after the other, until the run is over and nothing answers any more."""
    env = make_env("mini")
    while True:
        try:
            episode(env)
        except LookupError:  # its group is not needed any more: on with the next
            continue
        except (urllib.error.URLError, ConnectionError) as gone:
            print(f"the run is over: {gone}", file=sys.stderr)
            return


if __name__ == "__main__":
    if len(sys.argv) > 2:
        BASE = BASE.replace("8480", sys.argv[2])
    for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 16):
        threading.Thread(target=play).start()
