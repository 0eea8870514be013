"""Prefixes that are computed before they are asked for, learned or configured.

Asks the supervisor like any client; `prefixes` decides purely what is worth it. Knows no protocol,
and not how a worker computes.
"""
