"""`dart rollout`: a stateless service that answers screens with the policy's completions."""
