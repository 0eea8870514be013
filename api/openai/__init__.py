"""OpenAI's protocol: chat completions, completions, embeddings and tokens.

`convert` turns a request into the runtime's types, `chat` streams the answer. Agents and Responses
use its schemas and tools; it knows neither of them, nor another protocol.
"""
