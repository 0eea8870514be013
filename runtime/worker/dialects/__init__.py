"""How models write reasoning and tool calls, and how a call is read and forced."""
