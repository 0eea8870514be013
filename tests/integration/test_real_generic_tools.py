"""Tools of real small models that never learned any; they are not downloaded.

`HEARTH_REAL_MODELS` names a directory with models in Hugging Face's form, such as
SmolLM2-135M-Instruct and Gemma 3 270M: `HEARTH_REAL_MODELS=DIR pytest -m soak THIS_FILE`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.running_server import CHAT, running

DIRECTORY = os.environ.get("HEARTH_REAL_MODELS", "")
FOLDERS = sorted(Path(DIRECTORY).glob("*/config.json")) if DIRECTORY else []
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Zurich", "Oslo"]}},
        "required": ["city"],
    },
}
NUM_TURNS = 3


@pytest.mark.soak
@pytest.mark.skipif(not FOLDERS, reason="HEARTH_REAL_MODELS names no directory with models")
@pytest.mark.parametrize("config", FOLDERS, ids=lambda path: path.parent.name)
def test_a_model_without_tools_calls_them_turn_after_turn(config: Path, tmp_path: Path) -> None:
    name = config.parent.name
    settings = f'models_dir = "{config.parent.parent}"\ndefault_model = "{name}"\n'
    messages: list[Any] = [{"role": "system", "content": "You help with the weather."}]
    known = 0
    with running(tmp_path, config=settings) as server:
        for city in ("Paris", "Oslo", "Zurich")[:NUM_TURNS]:
            messages.append({"role": "user", "content": f"What is the weather in {city}?"})
            for choice in ("required", "auto"):
                body = {
                    "model": name,
                    "messages": messages,
                    "tools": [{"type": "function", "function": WEATHER}],
                    "tool_choice": choice,
                    "max_tokens": 60,
                    "temperature": 0,
                }
                response = server.post(CHAT, body)
                assert response.status_code == 200, response.text
                answer = response.json()
                usage, said = answer["usage"], answer["choices"][0]["message"]
                num_cached = usage["prompt_tokens_details"]["cached_tokens"]
                rules = {one["rule"] for one in answer["hearth"]["prompt"]}
                assert num_cached >= known, answer["hearth"]
                assert "healed_turn" in rules or len(messages) == 2
                messages.append(said)
                calls = said.get("tool_calls") or []
                assert calls or choice == "auto"
                for call in calls:
                    assert json.loads(call["function"]["arguments"]).keys() >= {"city"}
                    result = {"role": "tool", "tool_call_id": call["id"], "content": "sunny, 21 C"}
                    messages.append(result)
                # How much more is cached depends on the layers and on how the model ends turns.
                known = num_cached
        card = server.get(f"/v1/models/{name}").json()
        assert card["tools"] == "generic"
    print(json.dumps(messages, indent=1))  # noqa: T201
