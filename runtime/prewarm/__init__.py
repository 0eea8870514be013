"""Prompts that are computed before they are asked for: configured, announced or foreseen.

Asks the supervisor like any client. Knows no protocol, and not how a worker computes.
"""
