"""The page at `/`: its files, what it shows, and what it may ask for."""
