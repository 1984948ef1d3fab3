"""A browser under control: one Chromium, whose pages draw and pass time only on command.

process    the Chromium process: found, started, used through a pipe, ended with its profile
cdp        the Chrome DevTools Protocol over that pipe
inputs     GUI actions as protocol commands
shared     a browser that is replaced when it has died
"""
