"""A model on several ranks: the leader, those that follow, and their shards.

The leader is a worker like any other and sends `records` of what it computes; followers compute
the same and answer nobody.
"""
