"""Parts that environments behind a server share: addresses, access, screenshots in replies.

servers   several addresses, which slots share; a server that is down or full is tried again
images    screenshots in JSON: base64, data URLs, lists of numbers

The environment process calls each environment in its own thread or process (dart_cli/env), so that replies
are read and decoded there and no event loop waits. Servers are not trusted: redirects are refused, replies
have a size limit, and an unexpected reply is an EnvError, which makes the episode invalid and never a
failure.
"""
