"""A browser under control: one Chromium, whose pages draw and pass time only on command.

process    the Chromium process: found, started, used through a pipe, ended with its profile
cdp        the Chrome DevTools Protocol over that pipe
inputs     GUI actions as protocol commands
shared     a browser that is replaced when it has died
activity   what a page has under way, and what it reports beside its screen
tab        one page: its time, frames, stillness, input, screenshots and events
guard.js   what every document gets before its own scripts, so that episodes repeat
visit      the browser side of one episode: storage, network, downloads and windows of its own
accessibility  a page as a tree of nodes for an explorer, with what Chromium says of roles, names and places
gui        what an environment plays in: a browser of its own, and a visit for each episode
"""
