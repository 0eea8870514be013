"""Models and their processes: what runs a request, on the server's side and in the worker."""
