"""MiniWoB++ tasks in headless Chromium.

env       MiniwobEnv, which implements the GuiEnv contract, and the suite `miniwob`
tasks     the ids, limits and thresholds of the tasks
browser   the browsers of a process, and their pages
cdp       the Chrome DevTools Protocol over a pipe; the Chromium process is in envs/tools/chromium.py
inputs    GUI actions as protocol commands
page.js   the clock, random numbers and drawing of a page, under the environment's control
oracle    the next action of a solution (oracle*.js), and the page as nodes (elements.js)
"""
