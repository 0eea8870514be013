"""Agents: named, server-side histories that outlive models, restarts and kills."""
