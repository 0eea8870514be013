"""The part of Ollama's protocol that clients need who speak no other."""
