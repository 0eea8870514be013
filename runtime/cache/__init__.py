"""The server's side of KV on disk: the store it owns, what workers write and are told.

`service` is what others start and ask; `inventory` looks and deletes. Rows and files are changed
through `store` only. Knows neither mlx nor which model runs where.
"""
