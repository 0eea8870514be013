"""`make judge`: two real models through the whole of Hearth, beside mlx_lm; see docs/judge.md."""
