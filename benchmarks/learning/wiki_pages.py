"""TiddlyWiki as an application from outside: the package, and instances of it as files.

    fetched    the wiki's page, made from the npm package `tiddlywiki` (BSD-3-Clause), in a cache folder
    instance   the page with what a seed draws: notes, tags, tasks, colours
    notes_of   the notes of a seed

TiddlyWiki is a notebook of Jeremy Ruston's, one page with its program in it: a sidebar of tabs within tabs, notes that open,
close and are edited, tags with menus, a control panel of settings, search. The page is as the package builds it; an
instance adds a second store of notes to it, as TiddlyWiki's own documentation of its file format describes, and a script
(`HARNESS`) by which a page of MiniWoB++'s kind is told apart from one that is not yet loaded.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path
from random import Random

from bus.errors import MissingPartError, UserError

PACKAGE, VERSION = "tiddlywiki", "5.4.1"
SHA512 = "5Pnk7j8cUMoQHD0CarOWd4ixITURsN4DJxLfg8AGYSMiQoOHH6bp8JDCAgSdvZHRCQmvXtbm5FRxBFBT6WG24A=="
"""Of the package's archive, base64, as the registry publishes it."""
DEADLINE_S = 300.0

INSTRUCTION = "look around in the notebook"

HARNESS = """<script>
var WOB_REWARD_REASON = null, WOB_DONE_GLOBAL = false, WOB_RAW_REWARD_GLOBAL = 0;
var core = {
  cover_div: document.documentElement, EP_TIMER: null,
  setDataMode() {}, endEpisode() {}, startEpisodeReal() {}, getUtterance: () => %s,
};
Math.seedrandom = () => {};
// The page stays in its tab and in its document.
addEventListener("beforeunload", (event) => event.stopImmediatePropagation(), true);
addEventListener("click", (event) => {
  const link = event.target instanceof Element && event.target.closest("a[href]");
  if (link && /^(https?|mailto|file|blob|data):/.test(link.href) && !link.getAttribute("href").startsWith("#"))
    event.preventDefault();
}, true);
Element.prototype.requestFullscreen = () => Promise.resolve();
window.print = () => {};
</script>"""
"""What envs/suites/miniwob/page.js asks a page for."""

_SETTINGS: Mapping[str, str] = {
    "$:/themes/tiddlywiki/vanilla/metrics/fontsize": "12px",
    "$:/themes/tiddlywiki/vanilla/metrics/lineheight": "16px",
    "$:/themes/tiddlywiki/vanilla/metrics/bodyfontsize": "12px",
    "$:/themes/tiddlywiki/vanilla/metrics/bodylineheight": "16px",
    "$:/themes/tiddlywiki/vanilla/metrics/sidebarwidth": "220px",
    "$:/themes/tiddlywiki/vanilla/metrics/sidebarbreakpoint": "400px",
}
"""Of its own control panel, for a window of 448x336: story and sidebar beside each other."""

_STYLE = """
section.tc-story-river, .tc-sidebar-scrollable .tc-sidebar-header { padding: 2px 6px; }
section.tc-story-river .tc-tiddler-frame { padding: 6px 8px; margin-bottom: 8px; }
.tc-titlebar, .tc-title, .tc-site-title, h1 { font-size: 16px !important; line-height: 20px !important; margin: 2px 0; }
.tc-sidebar-scrollable { padding: 2px 0 0 0; }
.tc-topbar.tc-topbar-right { top: 0; right: 0; }
"""
"""A style sheet of the notebook's own, as its users write them: less room around things."""

_PALETTES = ("Vanilla", "Blanca", "Blue", "DesertSand", "SolarizedLight", "SpartanDay", "Nord")
_TAGS = ("garden", "kitchen", "travel", "music", "work", "family", "books", "health")
_SUBJECTS = (
    *("Tomatoes", "Rain barrel", "Compost", "Bread", "Soup", "Knives", "Night train", "Passport"),
    *("Ferry", "Piano", "Choir", "Records", "Meeting", "Budget", "Invoice", "Birthday", "School"),
    *("Grandmother", "Novel", "Library", "Atlas", "Running", "Dentist", "Sleep", "Bicycle"),
)
_KINDS = ("plan", "list", "notes", "ideas", "costs")
_SENTENCES = (
    "Ask again on Monday.",
    "The old one is broken.",
    "Two are enough.",
    "It was cheaper last year.",
    "Bring it back before the weekend.",
    "Nothing has been decided.",
)


def fetched(cache: Path, version: str = VERSION) -> Path:
    """Return the page without notes of its own; fetched by `npm pack` and built by node where it is not there.

    Raises MissingPartError without node or npm, UserError where the archive is another one or nothing was built.
    """
    page = cache / f"{PACKAGE}-{version}.html"
    if page.exists():
        return page
    for program in ("npm", "node"):
        if shutil.which(program) is None:
            raise MissingPartError(f"{program} is not installed: apt install nodejs npm")
    draft = cache / "draft"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    _call(["npm", "pack", "--silent", f"{PACKAGE}@{version}"], draft)
    archive = draft / f"{PACKAGE}-{version}.tgz"
    digest = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    if digest != SHA512:
        raise UserError(
            f"{archive} is not the package that this study names; its sha512 is {digest}"
        )
    with tarfile.open(archive) as packed:
        packed.extractall(draft, filter="data")
    build = ["node", "package/tiddlywiki.js", "package/editions/empty"]
    _call([*build, "--output", "built", "--build", "index"], draft)
    (draft / "built" / "index.html").replace(page)
    shutil.rmtree(draft)
    return page


def instance(cache: Path, seed: int) -> str:
    """Return the name of the page of an instance in the cache, without `.html`; made where it is not there."""
    name = f"wiki-{seed}"
    path = cache / f"{name}.html"
    if not path.exists():
        text = fetched(cache).read_text(encoding="utf-8")
        store = json.dumps([*notes_of(seed)]).replace("<", "\\u003c")
        added = f'<script class="tiddlywiki-tiddler-store" type="application/json">{store}</script>'
        head, found, rest = text.partition("</head>")
        body, opened, after = rest.partition('<script class="tiddlywiki-tiddler-store"')
        if not found or not opened:
            raise UserError(f"{fetched(cache)} has no store of notes; its format is another one")
        first, closed, last = after.partition("</script>")
        harness = HARNESS % json.dumps(INSTRUCTION)
        partial = path.with_suffix(".tmp")
        partial.write_text(
            f"{head}{harness}{found}{body}{opened}{first}{closed}{added}{last}", encoding="utf-8"
        )
        partial.replace(path)
    return name


def notes_of(seed: int) -> list[dict[str, str]]:
    """Return the notes and settings of an instance, each with its fields as TiddlyWiki names them."""
    rng = Random(f"wiki/{seed}")
    tags = rng.sample(_TAGS, 4)
    subjects = rng.sample(_SUBJECTS, 12)
    titles = [f"{subject} {rng.choice(_KINDS)}" for subject in subjects]
    found = []
    for at, title in enumerate(titles):
        links = rng.sample([each for each in titles if each != title], rng.randint(0, 2))
        lines = [
            *rng.sample(_SENTENCES, rng.randint(1, 3)),
            *(f"See [[{each}]]." for each in links),
        ]
        made = f"2024010{rng.randint(1, 7)}{rng.randint(8, 18):02d}{at:02d}00000"
        found.append(
            {
                "title": title,
                "text": "\n\n".join(lines),
                "tags": " ".join(rng.sample(tags, rng.randint(0, 2))),
                "created": made,
                "modified": made,
            }
        )
    shown = rng.sample(titles, 2)
    settings = {
        **_SETTINGS,
        "$:/SiteTitle": f"{rng.choice(subjects)} book",
        "$:/SiteSubtitle": rng.choice(_SENTENCES),
        "$:/DefaultTiddlers": " ".join(f"[[{each}]]" for each in shown),
        "$:/palette": f"$:/palettes/{rng.choice(_PALETTES)}",
    }
    sheet = {"title": "$:/narrow", "text": _STYLE, "tags": "$:/tags/Stylesheet", "type": "text/css"}
    found += [{"title": title, "text": text} for title, text in settings.items()]
    return [*found, sheet]


def _call(command: list[str], folder: Path) -> None:
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, timeout=DEADLINE_S
    )
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).rpartition("\n")[2]
        raise UserError(f"{' '.join(command)} ended with {done.returncode}: {said}")
