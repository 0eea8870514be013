"""LangChain's standard tests through chat completions."""

from __future__ import annotations

from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI

from tests.clients.langchain_standard import GREEDY, StandardTests


class TestChatCompletions(StandardTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return GREEDY | {"base_url": f"{self.server.url}/v1"}
