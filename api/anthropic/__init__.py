"""Anthropic's protocol: messages, token counts and models.

`convert` turns a request into the runtime's types and `stream` chunks into events; `schemas` is all
that either side may send. Knows no other protocol.
"""
