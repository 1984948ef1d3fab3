"""`dart rollout`: a stateless worker that answers screens with the policy's completions.

worker      the process: it loads the engine, answers ActRequests, and follows the data service
sync        takes new weights while the old ones serve: permit, receive, load, report
"""
