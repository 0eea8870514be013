"""LangChain's standard tests through Anthropic's Messages."""

from __future__ import annotations

from typing import Any

from langchain_anthropic import ChatAnthropic
from langchain_core.language_models import BaseChatModel

from tests.clients.langchain_standard import GREEDY, StandardTests


class TestMessages(StandardTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatAnthropic

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return GREEDY | {"base_url": self.server.url, "max_tokens": 300}

    @property
    def supports_json_mode(self) -> bool:
        """Anthropic's protocol has no such mode."""
        return False

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True
