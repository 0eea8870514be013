"""What is done to a conversation before the model reads it. Pure: no mlx, threads, files or SQL."""
