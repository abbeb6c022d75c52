"""The code that prefill and decode nodes share: pinned settings, engine start-up, observation, NIXL, registration.

Only node processes import this package; `engine`, `worker` and `connector` import vLLM.
"""
