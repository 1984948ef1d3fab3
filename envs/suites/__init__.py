"""The suites that ship with dart; none imports another (a contract in pyproject.toml).

embedded      suites `mini`, `composed`, `recall`, `desk` and `apps`: a widget toolkit drawn with Pillow
desktop       suite `desktop`: real applications on a virtual display
browsergym    suite `browsergym`: BrowserGym's tasks, in a separate interpreter
miniwob       suite `miniwob`: MiniWoB++ in headless Chromium
cuagym        suite `cuagym:FOLDER`: CUA-Gym's mocks and bundles, from the user's folder
mobilegym     suite `mobilegym:FOLDER`: MobileGym's phone and judges, from the user's folder
osworld       suite `osworld`: OSWorld's guests, in containers or already running
android       suite `android`: devices over adb (experimental)
openenv       suite `openenv:PROFILE`: environments behind OpenEnv servers
explored      suite `explored:FOLDER`: tasks made from an exploration
served        suite `served:FILE.toml`: tasks that agents of other programs play
gym           suite `gym:ENV_ID`: environments of gymnasium, with hooks that a user writes
"""
