"""Task bundles in CUA-Gym's documented format, for five of its mocks, and broken ones.

The bundles of its data set are on a model hub and are not shipped. These have the same files and the same shape:
task.json, initial_setup.py with a session of its own, reward.py that prints `REWARD: NUMBER`. Each comes with the
actions that do its task at 1280x720.

TASKS          the sound bundles
BROKEN         name -> files that replace those of a sound bundle, and the word that a check must find
write_folder   writes a folder for `cuagym:FOLDER` from a checkout of CUA-Gym-Hub with built mocks
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from envs.contract.actions import Action, Click, Drag, KeyPress, Type, action_to_dict

SETUP = '''"""Write the first state of a session and open it."""
import subprocess
import uuid

import requests

BASE = "__CUA_GYM_{app}_URL__"
sid = str(uuid.uuid4())
with open("/tmp/task_web_sid", "w") as file:
    file.write(sid)
{patch}
subprocess.Popen(["google-chrome", f"{{BASE}}/?sid={{sid}}"])
'''
REWARD = '''"""Compare the state with the first one."""
import requests

BASE = "__CUA_GYM_{app}_URL__"
with open("/tmp/task_web_sid") as file:
    sid = file.read().strip()
answer = requests.get(f"{{BASE}}/go?sid={{sid}}", timeout=30).json()
first, now = answer["initial_state"], answer["current_state"]
{check}
print(f"REWARD: {{score}}")
'''


def _set(patch: str) -> str:
    """Return lines of a setup program that write the mock's own first state into the session, changed by `patch`."""
    return f"""state = requests.get(f"{{BASE}}/go?sid={{sid}}", timeout=30).json()["current_state"]
{patch}
answer = requests.post(f"{{BASE}}/post?sid={{sid}}", json={{"action": "set", "state": state}}, timeout=30)
answer.raise_for_status()"""


@dataclass(frozen=True)
class Sound:
    """One task: its mock, what is asked, the first state, the score, and actions that do it."""

    name: str
    app: str
    instruction: str
    check: str
    actions: Sequence[Action]
    patch: str = ""  # of the first state
    injects: bool = (
        True  # False: the mock makes its first state itself, whose ids are new in each session
    )


def _mail_check(subject: str, condition: str) -> str:
    return f"mails = [m for m in now['emails'] if m['subject'] == {subject!r}]\nscore = float(any({condition} for m in mails))"


def _message_check(channel: str, text: str) -> str:
    return (
        f"new = [m['content'] for m in now['messages'][{channel!r}][len(first['messages'][{channel!r}]):]]\n"
        f"score = 1.0 if any({text!r} in text for text in new) else 0.5 if new else 0.0"
    )


def _completion_check(*names: str) -> str:
    return (
        f"done = [t['completed'] for t in now['tasks'] if t['name'] in {names!r}]\n"
        f"score = sum(done) / {len(names)}"
    )


def _say(text: str) -> list[Action]:
    return [Click(x=700, y=607), Type(text=text), KeyPress(keys=["enter"])]


TASKS: Sequence[Sound] = (
    Sound(
        "gmail-star",
        "gmail",
        "Star the mail from Bob Jones about lunch.",
        _mail_check("Re: Lunch tomorrow?", "m['starred']"),
        [Click(x=310, y=270)],
        "for mail in state['emails']:\n    mail['starred'] = False",
    ),
    Sound(
        "gmail-archive",
        "gmail",
        "Archive the mail of the HR department about benefits.",
        _mail_check("Benefits Enrollment - Action Required", "m['folder'] == 'all-mail'"),
        [Click(x=282, y=314), Click(x=351, y=104)],
    ),
    Sound(
        "gmail-delete",
        "gmail",
        "Delete David Park's mail about the Q4 reports.",
        _mail_check("Q4 Reports and Assets", "m['folder'] == 'trash'"),
        [Click(x=282, y=358), Click(x=393, y=104)],
    ),
    Sound(
        "slack-general",
        "slack",
        "Write `On my way` in the channel general.",
        _message_check("general", "On my way"),
        _say("On my way"),
    ),
    Sound(
        "slack-design",
        "slack",
        "Write `Looks good` in the channel design.",
        _message_check("design", "Looks good"),
        [Click(x=77, y=407), *_say("Looks good")],
    ),
    Sound(
        "slack-unstar",
        "slack",
        "Take the star off the channel general.",
        "starred = [c['isStarred'] for c in now['channels'] if c['channelId'] == 'general']\nscore = float(starred == [False])",
        [Click(x=396, y=25)],
    ),
    Sound(
        "asana-complete",
        "asana",
        "Mark the task `Review API documentation` as complete.",
        _completion_check("Review API documentation"),
        [Click(x=325, y=398)],
    ),
    Sound(
        "asana-two",
        "asana",
        "Mark `Review API documentation` and `Update privacy policy` as complete.",
        _completion_check("Review API documentation", "Update privacy policy"),
        [Click(x=325, y=456), Click(x=325, y=398)],
    ),
    Sound(
        "asana-analysis",
        "asana",
        "Mark the task `Review competitor analysis` as complete.",
        _completion_check("Review competitor analysis"),
        [Click(x=325, y=514)],
    ),
    Sound(
        "notion-unfavourite",
        "notion",
        "Take the page Getting Started out of the favourites.",
        "score = float(any(p['title'] == 'Getting Started' and not p['favorite'] for p in now['pages'].values()))",
        [Click(x=1210, y=15)],
        injects=False,
    ),
    Sound(
        "notion-favourite",
        "notion",
        "Make the page Team Wiki a favourite.",
        "score = float(any(p['title'] == 'Team Wiki' and p['favorite'] for p in now['pages'].values()))",
        [Click(x=98, y=397), Click(x=1210, y=15)],
        injects=False,
    ),
    Sound(
        "notion-rename",
        "notion",
        "Rename the page Getting Started to `First Steps`.",
        "score = float(any(p['title'] == 'First Steps' for p in now['pages'].values()))",
        [Click(x=560, y=385), KeyPress(keys=["ctrl", "a"]), Type(text="First Steps")],
        injects=False,
    ),
    Sound(
        "jira-review",
        "jira",
        "Move KAN-5 from To Do to In Progress on the board.",
        "status = [i['status'] for i in now['issues'] if i['key'] == 'KAN-5']\nscore = float(status == ['In Progress'])",
        [Click(x=80, y=200), Drag(path=[(490, 298), (560, 300), (640, 310)])],
    ),
    Sound(
        "jira-memory",
        "jira",
        "Move KAN-7 from To Do to In Progress on the board.",
        "status = [i['status'] for i in now['issues'] if i['key'] == 'KAN-7']\nscore = float(status == ['In Progress'])",
        [Click(x=80, y=200), Drag(path=[(490, 436), (560, 440), (640, 450)])],
    ),
    Sound(
        "jira-read",
        "jira",
        "Mark all notifications as read.",
        "unread = [n for n in now['notifications'] if not n['read']]\nscore = float(not unread)",
        [Click(x=34, y=637), Click(x=1171, y=30)],
    ),
)
MOCKS = tuple(dict.fromkeys(f"{task.app}_mock" for task in TASKS))
BLANK_MOCK = "uber_eats_mock"  # shows nothing, in the release that was tried

_REWARD_1 = REWARD.format(app="GMAIL", check="score = 1.0")
_FOREIGN = SETUP.format(
    app="GMAIL", patch=_set('requests.get("http://example.com/mails.json", timeout=5)')
)
_BLANK = SETUP.format(app="UBER_EATS", patch="")

BROKEN: Mapping[str, tuple[dict[str, str], str]] = {
    "reward-empty": ({"reward.py": " \n"}, "missing or empty"),
    "reward-syntax": (
        {"reward.py": "BASE = '__CUA_GYM_GMAIL_URL__'\nprint('REWARD: 1.0'\n"},
        "compiled",
    ),
    "reward-silent": ({"reward.py": "BASE = '__CUA_GYM_GMAIL_URL__'\nscore = 1.0\n"}, "REWARD"),
    "reward-crash": ({"reward.py": f"{_REWARD_1}raise SystemExit(3)\n"}, "exit status 3"),
    "reward-judge": (
        {"reward.py": f"from reward_judge import call_llm_judge\n{_REWARD_1}"},
        "model as a judge",
    ),
    "reward-always": ({"reward.py": _REWARD_1}, "reset"),
    "setup-foreign": ({"initial_setup.py": _FOREIGN}, "example.com"),
    "setup-program": (
        {
            "initial_setup.py": SETUP.format(
                app="GMAIL", patch=_set('subprocess.run(["libreoffice", "a.ods"])')
            )
        },
        "libreoffice",
    ),
    "mock-missing": ({"reward.py": _REWARD_1.replace("GMAIL", "CARRIER_PIGEON")}, "carrier_pigeon"),
    "page-blank": (
        {
            "initial_setup.py": _BLANK,
            "reward.py": REWARD.format(app="UBER_EATS", check="score = 0.0"),
        },
        "blank",
    ),
    "no-instruction": ({"task.json": json.dumps({"id": "x", "instruction": "  "})}, "instruction"),
}


def files_of(task: Sound) -> dict[str, str]:
    """Return the files of a bundle by name."""
    app = task.app.upper()
    home = "/home/user/initial_setup.py"
    about = {
        "id": task.name,
        "instruction": task.instruction,
        "app_type": f"{task.app}_mock",
        "config": [
            {
                "type": "download",
                "parameters": {"files": [{"url": "./initial_setup.py", "path": home}]},
            },
            {"type": "execute", "parameters": {"command": f"python3 {home}"}},
        ],
        "evaluator": {"type": "python", "url": "./reward.py"},
    }
    return {
        "task.json": json.dumps(about, indent=2),
        "initial_setup.py": SETUP.format(app=app, patch=_set(task.patch) if task.injects else ""),
        "reward.py": REWARD.format(app=app, check=task.check),
        "actions.json": json.dumps([action_to_dict(action) for action in task.actions]),
    }


def write_folder(folder: Path, hub: Path, *, broken: bool) -> None:
    """Write a folder with the mocks of a checkout, as links, and the bundles, with the broken ones or without."""
    websites = folder / "websites"
    websites.mkdir(parents=True, exist_ok=True)
    for mock in (*MOCKS, *([BLANK_MOCK] if broken else [])):
        link = websites / mock
        if not link.is_symlink():
            link.symlink_to((hub / "websites" / mock).resolve())
    bundles = {task.name: files_of(task) for task in TASKS}
    if broken:
        sound = files_of(TASKS[0])
        bundles |= {f"broken-{name}": {**sound, **changes} for name, (changes, _) in BROKEN.items()}
    for name, texts in bundles.items():
        place = folder / "cua_gym_tasks" / name
        place.mkdir(parents=True, exist_ok=True)
        for file, text in texts.items():
            (place / file).write_text(text, encoding="utf-8")
