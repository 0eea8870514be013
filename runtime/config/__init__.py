"""Settings: where they come from, what they may be, and what they are called.

`settings` is the one way in, `reference` what the documentation is made from. Knows no files of
models, no processes and no HTTP.
"""
