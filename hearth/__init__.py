"""Hearth: a local LLM server that keeps models and their KV cache warm.

What lives here starts the application and nothing else; `hearth/__main__.py` says where that is.
"""
