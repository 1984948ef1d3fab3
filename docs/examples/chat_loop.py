"""The loop of an agent that uses only the HTTP endpoint of dart; the policy learns from its episodes.

    dart up configs/quickstart.toml --set up.serve=true --set up.envs=0 --set run.dir=runs/served
    python docs/examples/chat_loop.py 16          # 16 episodes at once; then the port, if not 8480

The environment has gymnasium's methods. Here it is suite `mini`; any other works as well.
"""

import base64
import json
import re
import sys
import threading
import time
import urllib.error
import urllib.request

import envs

BASE = "http://127.0.0.1:8480/v1/sessions"


def post(path, body):
    """Return the answer of the endpoint; repeat the request for as long as it sends `retry-after`."""
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
    """Return the action in a text such as `click(500,20)` (thousandths of the screen), or None."""
    call = re.fullmatch(r"(\w+)\((.*)\)", text, re.DOTALL)
    name, inside = call.groups() if call else ("", "")
    pixels = [(2 * int(n) + 1) * size // 2000 for n in re.findall(r"\d+", inside)]
    match name, pixels:
        case "click" | "right_click", [x, y]:
            return envs.Click(x=x, y=y, button="left" if name == "click" else "right")
        case "double_click" | "move", [x, y]:
            return (envs.Move if name == "move" else envs.DoubleClick)(x=x, y=y)
        case "drag", [x, y, to_x, to_y]:
            return envs.Drag(path=[(x, y), (to_x, to_y)])
        case "scroll", [x, y]:
            return envs.Scroll(x=x, y=y, dy=3 if inside.endswith("down") else -3)
        case "type" | "answer", _:
            return (envs.Type if name == "type" else envs.Answer)(text=inside)
        case "key", _:
            return envs.KeyPress(keys=inside.split("+"))
        case "wait" | "done" | "fail", []:
            return {"wait": envs.Wait, "done": envs.Done, "fail": envs.Fail}[name]()
    return None


def episode(env):
    """Play the task that the endpoint chooses, and send the reward."""
    session = post("", {})
    task = envs.find_task("mini", session["task"])
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
        if terminated or truncated or isinstance(action, envs.Done | envs.Fail | envs.Answer):
            verdict = {"reward": reward, "stop_reason": "done" if terminated else "step_limit"}
            break
    post(f"/{session['id']}/end", verdict)


def play():
    """Play one episode after the other, until the run is over and the endpoint does not answer any more."""
    env = envs.make_env("mini")
    while True:
        try:
            episode(env)
        except LookupError:  # the episode is not needed any more
            continue
        except (urllib.error.URLError, ConnectionError) as error:
            print(f"the run is over: {error}", file=sys.stderr)
            return


if __name__ == "__main__":
    if len(sys.argv) > 2:
        BASE = BASE.replace("8480", sys.argv[2])
    for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 16):
        threading.Thread(target=play).start()
