"""The worker process: one loaded model and its engine, started as `python -m runtime.worker`.

No other room imports it: the server speaks to it in the frames of `runtime/wire.py`. One thread
runs mlx. No SQL and no web; its rooms are what comes before the model and after it.
"""
