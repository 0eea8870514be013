"""OpenAI's Responses: its items, events, tools and what is stored of them.

`convert` turns items into messages and `events` chunks into events; `service` makes responses in
the background, `archive` keeps them. Uses the tools and schemas of `api/openai`.
"""
