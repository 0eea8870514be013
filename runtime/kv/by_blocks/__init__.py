"""KV of one model by blocks: in memory, and as slots that both processes see."""
