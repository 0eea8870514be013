"""What is told of the server: log, metrics, traces.

All rooms of `api` may use it, and it imports none of them. What a client said, or proves who it is
with, never gets into the log; `redact` sees to that.
"""
