"""Anthropic's protocol: messages, token counts and models."""
