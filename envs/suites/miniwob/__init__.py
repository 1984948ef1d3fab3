"""MiniWoB++ tasks in headless Chromium.

env       MiniwobEnv, which keeps the GuiEnv contract, and suite `miniwob`
tasks     ids, limits and thresholds
browser   the browsers of a process, and their pages
cdp       the Chrome DevTools Protocol over a pipe
process   the Chromium process
inputs    GUI actions as protocol commands
page.js   clock, random numbers and drawing of a page, under our control
oracle    the next action of a solution, by the solvers of oracle*.js; the page as nodes, read by elements.js
"""
