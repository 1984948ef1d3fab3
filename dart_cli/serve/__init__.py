"""`dart serve`: the policy as a chat endpoint, for agents of other programs; what they play is trained on.

In the place of `dart env`: an agent that knows nothing of dart opens a session, which is an episode, asks
for completions as of any OpenAI-compatible server, acts in an environment of its own, and hands a verdict in.

    worker     the process of a run: connections, heartbeat, the server
    standalone the endpoint of one model, without a run
    app        addresses and answers of the endpoint; who may ask: Host header, token, no pages of other sites
    requests   the JSON of requests, read and checked
    sampling   which of a request's own settings may differ from the run's
    sessions   the open sessions: leases from data, bounds, ends of those that were left
    session    one episode: a completion for each request, handed to data as a step; its verdict
    replies    completions and sessions as the JSON of an answer
    errors     errors as answers
"""
