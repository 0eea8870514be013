"""From token ids to an answer: how models write reasoning and tool calls, and what forces them.

`detokenizer` makes text and `parser` chunks of it; `constraint` says which tokens may follow. A
dialect is data in `dialect`. Knows no protocol and no cache.
"""
