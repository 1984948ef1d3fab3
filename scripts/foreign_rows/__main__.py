"""Rows of other projects -> rows that `dart tune` reads, written beside them; nothing is fetched.

    .venv/bin/python scripts/foreign_rows opencua sets/AgentNet       # writes sets/AgentNet/episodes.jsonl
    .venv/bin/python scripts/foreign_rows cua-lite sets/cua-lite      # likewise
    .venv/bin/python scripts/foreign_rows gui-actor sets/gui-actor    # writes sets/gui-actor/screenspot_web.json
    dart tune --data sets/AgentNet --model models/mine --out runs/models/begun

opencua     AgentNet, the data of OpenCUA: agentnet*.jsonl
cua-lite    CUA-Lite's episodes: *.jsonl or *.parquet
gui-actor   GUI-Actor's questions with boxes: *.json; a grounding set of ScreenSpot's layout is written

A step of several actions is malformed, but with --max-actions N for up to N. Pictures stay where they are. Malformed rows are refused with their places, or left out with --skip-malformed.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bus.errors import DartError, UserError
from dart_cli.config.schema import MOST_ACTIONS
from dart_cli.runtime.streams import take_streams
from dart_cli.tune.episodes import EPISODES
from scripts.foreign_rows import cua_lite, gui_actor, opencua

EPISODE_READERS = {"opencua": opencua.read, "cua-lite": cua_lite.read}
ITEMS = "screenspot_web.json"


def convert(layout: str, home: Path, *, skip_malformed: bool = False, max_actions: int = 1) -> str:
    """Write the rows of a folder or file; return a message about what was written. Raises UserError.

    A step may have up to `max_actions` actions.
    """
    foreign = (
        gui_actor.read(home)
        if layout == "gui-actor"
        else EPISODE_READERS[layout](home, max_actions)
    )
    if foreign.malformed and not skip_malformed:
        raise UserError(
            f"{len(foreign.malformed)} rows are malformed, the first is {foreign.malformed[0]}; mend the files, or leave "
            "such rows out with --skip-malformed"
        )
    if not foreign.rows:
        raise UserError(f"{home} has no rows of {layout}; is it the whole set?")
    folder = home.parent if home.is_file() else home
    if layout == "gui-actor":
        out, text = folder / ITEMS, json.dumps(foreign.rows, indent=1) + "\n"
    else:
        out, text = folder / EPISODES, "".join(json.dumps(row) + "\n" for row in foreign.rows)
    draft = out.with_suffix(".draft")
    draft.write_text(text, encoding="utf-8")
    draft.replace(out)
    message = f"{out}: {len(foreign.rows)} rows"
    message += (
        f", {foreign.left_out} of failures or other kinds left out" if foreign.left_out else ""
    )
    return message + (
        f", {len(foreign.malformed)} malformed ones left out" if foreign.malformed else ""
    )


def main() -> int:
    """Read the options, convert."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("layout", choices=[*EPISODE_READERS, "gui-actor"])
    parser.add_argument("home", type=Path, help="folder or file of the rows")
    parser.add_argument("--skip-malformed", action="store_true")
    parser.add_argument(
        "--max-actions", type=int, default=1, help="most actions of a step, as policy.max_actions"
    )
    options = parser.parse_args()
    if not 1 <= options.max_actions <= MOST_ACTIONS:
        parser.error(f"--max-actions must be 1 to {MOST_ACTIONS}, got {options.max_actions}")
    take_streams()  # a name that the terminal cannot show ends nothing
    try:
        message = convert(
            options.layout,
            options.home,
            skip_malformed=options.skip_malformed,
            max_actions=options.max_actions,
        )
        print(message)
    except DartError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
