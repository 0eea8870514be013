"""Files and rows: what outlives a process.

Slots, their index and the cold store; every write is durable or as if it had never been. No tensor
library, no policy and no process belongs here: what is to be kept or deleted is decided above.
"""
