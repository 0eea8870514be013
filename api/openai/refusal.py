"""How a field that cannot be served is refused."""

from api.refusal import refuse

__all__ = ["refuse"]
