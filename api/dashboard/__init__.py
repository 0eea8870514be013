"""The page at `/`: its files, what it shows, and what it may ask for.

Shows what `api/admin` and `api/observe` know: counts, sizes, times and names, nothing that anybody
said. Nothing is loaded from anywhere else.
"""
