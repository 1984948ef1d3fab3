"""`dart rollout`: a stateless service that answers screens with the policy's completions.

worker      the process: loads the engine, answers ActRequest, follows what data announces
sync        permit, receive, take, report: new weights while the old ones serve
"""
