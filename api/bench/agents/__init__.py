"""`hearth bench agents`: the traffic of many agents, replayed against one server after the other.

`traffic` makes it from a seed, `gate` lets turns through, `replay` plays it, `figures` computes.
"""
