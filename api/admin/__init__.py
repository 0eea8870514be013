"""`/admin` and `/health`: models, cache, history and crashes, for operators.

Handlers only: what they ask for is done by the runtime's rooms. Nothing here is a protocol that
clients of models speak.
"""
