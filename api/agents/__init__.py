"""Agents: named, server-side histories that outlive models, restarts and kills.

`service` opens it all; a `turn` is an answer like any other to the rest of `api`. Histories are
asked and answered in OpenAI's forms. Rows are changed in `store/history` only.
"""
