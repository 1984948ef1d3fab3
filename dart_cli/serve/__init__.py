"""`dart serve`: the policy as a chat endpoint for agents of other programs, whose episodes are trained on.

It takes the place of `dart env`: an agent, which needs no part of dart, opens a session (an episode), asks
for completions as from any OpenAI-compatible server, acts in its own environment, and submits a verdict.

    worker      the process of a run: connections, heartbeat, the server
    standalone  the endpoint of one model, without a run
    app         the routes of the endpoint, and who may use them: Host header, token, no pages of other sites
    requests    reads and checks the JSON of requests
    sampling    decides which settings of a request may differ from the run's
    sessions    the open sessions: leases from the data service, bounds, ends of sessions whose agent is gone
    session     one episode: each request is answered with a completion and becomes a step; then the verdict
    replies     writes completions and sessions as the JSON of an answer
    errors      turns errors into answers
"""
