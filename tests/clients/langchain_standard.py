"""LangChain's own standard tests of a chat model, as every protocol of ours takes them.

What `hearth-tiny` is none for (pictures, sound, documents) stays undeclared, which the suite skips.
"""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_tests.integration_tests import ChatModelIntegrationTests

from tests.clients.conftest import MODEL, OTHER_NAME
from tests.running_server import RunningServer

GREEDY: dict[str, Any] = {
    "model": MODEL,
    "api_key": "unused",
    "max_retries": 0,
    "temperature": 0,
    "stream_usage": True,
}


class StandardTests(ChatModelIntegrationTests):
    """The suite against one server for each class that takes it."""

    server: RunningServer

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def serve(cls, tiny_server: RunningServer) -> None:
        cls.server = tiny_server

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_model_override(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        return OTHER_NAME

    @pytest.mark.xfail(
        reason="hearth-tiny writes JSON, but cannot follow members that are described in prose",
        strict=True,
    )
    def test_json_mode(self, model: BaseChatModel) -> None:
        super().test_json_mode(model)
