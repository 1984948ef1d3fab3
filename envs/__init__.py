"""Environments: real GUIs behind one contract.

base          the contract: tasks, observations, verdicts, GuiEnv
contract      what methods must take and return, as errors say it
actions       typed GUI actions, in pixels of the screenshot; their table for the documentation
inputs        mouse and keyboard as events: one state machine, one table of key names
elements      what an explorer needs: elements on a screen, which screens are one; cells where there is no tree
registry      suites by name, and the environments that play them; tasks by pattern
own_code      suites and codecs of a user's own, by name
atspi_tree    an accessibility tree as nodes for an explorer
screenshots   image encodings, screenshots as observations, and the texts beside them
textfiles     text files as other programs write them: encodings, line ends
taskfile      task files in OSWorld's JSON schema, and how they are judged
options       options of suites, checked by their types; guests and devices shared out to slots
queueing      waits for what environments share, in which the deadline of a call stands still
child_program a program in another interpreter, asked over its pipes
process_tree  a process with all processes that it started

embedded      suites `mini`, `composed`, `recall`, `desk` and `apps`: a widget toolkit drawn with Pillow
desktop       suite `desktop`: real applications on a virtual display
browsergym    suite `browsergym`: BrowserGym's tasks, in an interpreter of its own
miniwob       suite `miniwob`: MiniWoB++ in headless Chromium
osworld       suite `osworld`: OSWorld's guests, in containers or already running
android       suite `android`: devices over adb (experimental)
openenv       suite `openenv:PROFILE`: environments behind OpenEnv servers
remote        what environments behind a server share: addresses, replies, screenshots
explored      suite `explored:FOLDER`: tasks that were made of an exploration
served        suite `served:FILE.toml`: tasks that agents of other programs play
gym           suite `gym:ENV_ID`: environments of gymnasium, by hooks of a user's own
"""
