"""`hearth bench`: the same conversations with this server and with others, side by side.

`texts` makes conversations whose answers can be checked, `ask` streams one answer, `peers` starts
and stops servers as `recipes` say, `scenarios` asks, `figures` computes what a `report` says.
"""
