"""MiniWoB++ tasks in headless Chromium.

env       MiniwobEnv, which implements the GuiEnv contract, and the suite `miniwob`
tasks     the ids, limits and thresholds of the tasks
browser   the pages of the browsers of a process, over envs/tools/browser/
page.js   the clock, random numbers and drawing of a page, under the environment's control
oracle    the next action of a solution (oracle*.js), and the page as nodes (elements.js)
"""
