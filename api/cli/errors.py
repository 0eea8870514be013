"""What goes wrong with a command, whoever runs it. Nothing is imported here that takes long."""

from __future__ import annotations

from runtime.errors import HearthError


class NoServer(HearthError):
    """Nothing answers a command where the settings say that the server is."""

    code = "no_server"


class Misused(HearthError):
    """The command line says too little, or what cannot be said together."""

    code = "misused"
