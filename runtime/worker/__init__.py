"""The worker process: one loaded model, its engine, and no knowledge of SQL or the web."""
