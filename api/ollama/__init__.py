"""The part of Ollama's protocol that clients need who speak no other.

`convert` turns a request into the runtime's types and `stream` chunks into lines; the smallest of
the protocols, and the one to look at first. Knows no other protocol.
"""
