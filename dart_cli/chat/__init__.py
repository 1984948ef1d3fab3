"""Models behind the OpenAI chat API: one request, and requests that are repeated after a failure.

server   a model at an address; checks of the address and the key; one request, which blocks
asking   a request within its deadline, and again after a failure, with pauses

The judge and the teacher are asked through it.
"""
