"""Files and rows: what outlives a process. No tensor library and no policy belongs here."""
