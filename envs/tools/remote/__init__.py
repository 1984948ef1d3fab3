"""What environments behind a server share: addresses, access, replies, screenshots.

servers   several addresses, shared out to slots; a server that is down or full is tried again
images    screenshots in JSON: base64, data URLs, lists of numbers

Environments are called in a thread or process of their own (dart_cli/env), so replies are read and decoded
there and no event loop waits. Servers are not trusted: redirects are refused, replies are bounded, and
whatever is not what was asked for is an EnvError, which makes an episode invalid and never a failure.
"""
