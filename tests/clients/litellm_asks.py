"""Run by LiteLLM's own Python: asks a server by all three protocols and prints what it saw."""

import json
import sys

import litellm  # pyright: ignore[reportMissingImports]

URL, MODEL = sys.argv[1:]
QUESTION = [{"role": "user", "content": "What is the weather in Zurich?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
ROUTES = {
    "chat": {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1"},
    "messages": {"model": f"anthropic/{MODEL}", "api_base": URL},
}
SHARED = {"messages": QUESTION, "api_key": "unused", "max_tokens": 60, "temperature": 0}


def asked(route):
    request = SHARED | {"num_retries": 0} | ROUTES[route]
    whole = litellm.completion(**request)
    stream = litellm.completion(stream=True, stream_options={"include_usage": True}, **request)
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    called = litellm.completion(tools=[TOOL], tool_choice="required", **request)
    call = called.choices[0].message.tool_calls[0].function
    return {
        "same": (whole.choices[0].message.content or "") == text,
        "ends": [
            c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason
        ],
        "usage": whole.usage.prompt_tokens,
        "call": call.name,
        "arguments": json.loads(call.arguments),
    }


found = {route: asked(route) for route in ROUTES}
answer = litellm.responses(
    model=f"openai/{MODEL}",
    api_base=f"{URL}/v1",
    api_key="unused",
    input="Say hello.",
    max_output_tokens=40,
)
found["responses"] = {"status": answer.status, "kinds": [item.type for item in answer.output]}
sys.stdout.write(json.dumps(found))
