"""What all protocols share: connections, who asks, limits, errors, answers as they stream.

`gate` is how handlers reach the supervisor and the KV; `guard` decides who may ask. Knows no
protocol: how an error or a chunk looks is told to it.
"""
