"""An adb for tests: a device that is a folder. Installed by `install(folder)`.

`adb shell SCRIPT` is run by a real shell, as on a device, whose PATH holds `input`, `settings` and
the like: small programs that keep their state in the folder. `input text` reads %s as a blank and
fails on text that is not ASCII, as Android's does (frameworks/base, InputShellCommand.sendText).
"""

from __future__ import annotations

import sys
from pathlib import Path

ADB = r"""
import os, pathlib, subprocess, sys, time
here = pathlib.Path(__file__).resolve().parent
args = sys.argv[1:]
with open(here / "log", "a") as log:
    log.write(repr(args) + "\n")
serial = "emulator-5554"
if args[:1] == ["-s"]:
    serial, args = args[1], args[2:]
devices = (here / "devices").read_text().split()
if serial not in devices:
    sys.exit(f"* daemon started successfully\nadb: device '{serial}' not found")
if (here / "hangs").exists():
    subprocess.Popen(["sleep", "600"])
    time.sleep(600)
if args == ["exec-out", "screencap", "-p"]:
    sys.stdout.buffer.write((here / "screen").read_bytes())
elif args[0] == "shell":
    path = f"{here / 'bin'}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "DEVICE": str(here)}
    sys.exit(subprocess.run(["sh", "-c", " ".join(args[1:])], env=env).returncode)
elif args[:4] == ["emu", "avd", "snapshot", "load"]:
    (here / "typed").unlink(missing_ok=True)
    print("OK")
else:
    sys.exit(f"adb: unknown command {args[0]}")
"""

INPUT = r"""
import os, pathlib, sys
here = pathlib.Path(os.environ["DEVICE"])
kind, *args = sys.argv[1:]
with open(here / "inputs", "a") as log:
    log.write(" ".join([kind, *args]) + "\n")
def typed(text):
    with open(here / "typed", "a") as out:
        out.write(text)
if kind == "text":
    (text,) = args
    out, escaped = [], False
    for character in text:
        if escaped and character == "s":
            out[-1] = " "
        else:
            out.append(character)
        escaped = character == "%"
    if not text.isascii():
        sys.exit("java.lang.NullPointerException: Attempt to get length of null array")
    typed("".join(out))
elif (kind, args) == ("keyevent", ["66"]):
    typed("\n")
elif (kind, args) == ("keyevent", ["61"]):
    typed("\t")
"""

SETTINGS = r"""
file="$DEVICE/setting-$2-$3"
if [ "$1" = put ]; then printf %s "$4" > "$file"; else cat "$file" 2>/dev/null || echo null; fi
"""

AM = r"""
import base64, os, pathlib, sys
here = pathlib.Path(os.environ["DEVICE"])
if sys.argv[1:4] == ["broadcast", "-a", "ADB_INPUT_B64"]:
    with open(here / "typed", "a") as out:
        out.write(base64.b64decode(sys.argv[6]).decode())
"""

GETPROP = """
[ -e "$DEVICE/booting" ] || echo 1
"""


def install(folder: Path) -> str:
    """Write the programs into `folder`; the path of adb."""
    shell = "#!/bin/sh\n"
    # Its path may have spaces, which a first line cannot hold: a shell starts it, to Python a string.
    python = f"""{shell}'''exec' '{sys.executable}' -S "$0" "$@"\n' '''\n"""
    programs = {"input": python + INPUT, "am": python + AM}
    programs |= {"settings": shell + SETTINGS, "getprop": shell + GETPROP}
    programs |= dict.fromkeys(("wm", "cmd", "monkey", "dumpsys"), shell)
    programs = {f"bin/{name}": text for name, text in programs.items()} | {"adb": python + ADB}
    (folder / "bin").mkdir(parents=True)
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (folder / "devices").write_text("emulator-5554 R58M")
    return str(folder / "adb")
