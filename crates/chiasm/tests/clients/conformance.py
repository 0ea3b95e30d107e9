"""Validates the answers, chunks and events of all APIs.

usage: conformance.py TEXT_URL CALLING_URL REASONING_URL PICTURE

Uses the models of the official SDKs and of Open Responses. The arguments are the base URLs of
servers whose engines answer with text, call weather(city="Paris"), and reason before they answer.
"""

import base64
import functools
import json
import sys

import httpx
import openresponses_types
from anthropic.types import ErrorResponse, Message, MessageTokensCount, RawMessageStreamEvent
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.shared import ErrorObject
from pydantic import TypeAdapter, ValidationError

text_url, calling_url, reasoning_url, picture = sys.argv[1:]
client = httpx.Client(timeout=60, trust_env=False)
image = "data:image/jpeg;base64," + base64.b64encode(open(picture, "rb").read()).decode()
parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
mismatches = []
checked = 0
adapter = functools.cache(TypeAdapter)


def check(case, model, value):
    """Validates a value and records its differences from the model."""
    global checked
    checked += 1
    try:
        adapter(model).validate_python(value)
    except ValidationError as error:
        for mismatch in error.errors():
            mismatches.append(f"{case}: {'.'.join(map(str, mismatch['loc']))}: {mismatch['msg']}")


def post(url, path, body, status=200):
    answer = client.post(url + path, json={"model": "m", **body})
    assert answer.status_code == status, (path, body, answer.status_code, answer.text)
    return answer


def events(answer):
    """Parses the events of a stream. The type of a named event must equal its name."""
    parsed = []
    for text in answer.text.removesuffix("\n\n").split("\n\n"):
        name, _, data = text.rpartition("data: ")
        if data != "[DONE]":
            event = json.loads(data)
            assert not name or name == f"event: {event['type']}\n", text
            parsed.append(event)
    return parsed


def check_both(case, url, path, body, whole, part):
    """Validates an answer and all chunks of its stream. Returns the answer and the chunks."""
    answer = post(url, path, body).json()
    check(case, whole, answer)
    parts = events(post(url, path, {**body, "stream": True}))
    for event in parts:
        check(f"{case}, streamed: {event.get('type')}", part, event)
    return answer, parts


# Chats and completions.
chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 100}
tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
for name, url, more in [
    ("text", text_url, {}),
    ("logprobs", text_url, {"logprobs": True, "top_logprobs": 3}),
    ("choices", text_url, {"n": 2, "temperature": 1}),
    ("cut off", text_url, {"max_tokens": 2}),
    (
        "image",
        text_url,
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": image}}]}
            ]
        },
    ),
    ("call", calling_url, {"tools": tools}),
    (
        "named call",
        calling_url,
        {"tools": tools, "tool_choice": {"type": "function", "function": {"name": "weather"}}},
    ),
    ("reasoning", reasoning_url, {}),
]:
    check_both(
        f"chat, {name}",
        url,
        "/chat/completions",
        {**chat, **more},
        ChatCompletion,
        ChatCompletionChunk,
    )
counting = {
    **chat,
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}
for chunk in events(post(text_url, "/chat/completions", counting)):
    check("chat, usage in chunks", ChatCompletionChunk, chunk)

completion = {"prompt": "hi", "max_tokens": 4}
for name, more in [
    ("text", {}),
    ("logprobs", {"logprobs": 2}),
    ("prompts", {"prompt": ["a", "b"], "n": 2}),
]:
    check(
        f"completion, {name}",
        Completion,
        post(text_url, "/completions", {**completion, **more}).json(),
    )
    open_choices = set()
    for chunk in events(post(text_url, "/completions", {**completion, **more, "stream": True})):
        # Before its end, a choice has the finish reason null, as in OpenAI's API. The SDK uses the
        # model of whole answers.
        for choice in chunk["choices"]:
            if choice["finish_reason"] is None:
                open_choices.add(choice["index"])
                choice["finish_reason"] = "stop"
            else:
                open_choices.discard(choice["index"])
        check(f"completion, {name}, streamed", Completion, chunk)
    assert not open_choices, (name, open_choices)
echoed = post(text_url, "/completions", {**completion, "logprobs": 2, "echo": True}).json()
# The first token has no log probability: OpenAI sends null, which its model does not allow.
for values in (
    echoed["choices"][0]["logprobs"][field] for field in ("token_logprobs", "top_logprobs")
):
    assert values.pop(0) is None, echoed
check("completion, echo", Completion, echoed)

for model in client.get(text_url + "/models").json()["data"]:
    check("models", Model, model)
check("model", Model, client.get(text_url + "/models/m").json())
for path, body in [
    ("/chat/completions", chat),
    ("/completions", completion),
    ("/responses", {"input": "x"}),
]:
    refused = post(text_url, path, {**body, "temperature": "hot"}, status=400)
    check(f"refused by {path}", ErrorObject, refused.json()["error"])

# Messages.
messages = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2000}
tools = [{"name": "weather", "input_schema": parameters}]
for name, url, more in [
    ("text", text_url, {}),
    ("cut off", text_url, {"max_tokens": 2}),
    ("stop sequence", text_url, {"stop_sequences": ["tokens"]}),
    ("call", calling_url, {"tools": tools}),
    ("thinking", reasoning_url, {}),
    # A model without reasoning accepts a thinking budget and ignores it.
    ("budget", text_url, {"thinking": {"type": "enabled", "budget_tokens": 1024}}),
]:
    check_both(
        f"messages, {name}", url, "/messages", {**messages, **more}, Message, RawMessageStreamEvent
    )
counting = {"messages": messages["messages"]}
check("token count", MessageTokensCount, post(text_url, "/messages/count_tokens", counting).json())
check(
    "refused message",
    ErrorResponse,
    post(text_url, "/messages", {**messages, "max_tokens": 0}, status=400).json(),
)

# Responses, validated with the models of OpenAI and of Open Responses.
open_events = {}
for name in dir(openresponses_types):
    if name.endswith("StreamingEvent"):
        model = getattr(openresponses_types, name)
        [kind] = model.model_fields["type"].annotation
        open_events[kind.value] = model
# OpenAI's names of events that have other names in Open Responses (`response.reasoning.delta`).
OPENAI_ONLY = {"response.reasoning_text.delta", "response.reasoning_text.done"}


def check_open(case, model, value):
    """Validates with Open Responses.

    Its package only allows null for the schema of a format, where OpenAI has an object.
    """
    resource = value.get("response", value)
    if resource.get("object") == "response" and resource["text"]["format"]["type"] == "json_schema":
        resource["text"]["format"]["schema"] = None
    check(f"Open Responses: {case}", model, value)


def message(role, *content):
    return {"type": "message", "role": role, "content": list(content)}


tools = [{"type": "function", "name": "weather", "parameters": parameters}]
custom = {"type": "custom", "name": "sh"}
schema = {"type": "json_schema", "schema": parameters}
user = message("user", {"type": "input_text", "text": "hi"})
call_item = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"}
result = {"type": "function_call_output", "call_id": "c", "output": "sunny"}
all_fields = {
    "instructions": "be short",
    "metadata": {"a": "b"},
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "temperature": 0.3,
    "top_p": 0.9,
    "max_output_tokens": 50,
    "max_tool_calls": 3,
    "user": "u",
    "safety_identifier": "s",
    "prompt_cache_key": "k",
    "truncation": "auto",
    "store": False,
    "service_tier": "default",
    "reasoning": {"effort": "low"},
    "text": {"verbosity": "medium"},
    "tools": [tools[0], {**tools[0], "name": "other", "description": "d", "strict": True}],
    "tool_choice": "none",
    "parallel_tool_calls": False,
}
for name, url, more in [
    ("text", text_url, {}),
    ("cut off", text_url, {"max_output_tokens": 2}),
    ("image", text_url, {"input": [message("user", {"type": "input_image", "image_url": image})]}),
    (
        "turns",
        text_url,
        {"input": [user, message("assistant", {"type": "output_text", "text": "hello"}), user]},
    ),
    ("result of a call", text_url, {"input": [user, call_item, result], "tools": tools}),
    ("everything", text_url, all_fields),
    ("json object", text_url, {"text": {"format": {"type": "json_object"}}}),
    ("schema", text_url, {"text": {"format": schema}}),
    ("call", calling_url, {"tools": tools}),
    (
        "named call",
        calling_url,
        {"tools": tools, "tool_choice": {"type": "function", "name": "weather"}},
    ),
    ("reasoning", reasoning_url, {"reasoning": {"effort": "low", "summary": "auto"}}),
    ("logprobs", reasoning_url, {"include": ["message.output_text.logprobs"], "top_logprobs": 2}),
]:
    body = {"input": "hi", **more}
    whole, parts = check_both(
        f"responses, {name}", url, "/responses", body, Response, ResponseStreamEvent
    )
    check_open(name, openresponses_types.ResponseResource, whole)
    for event in parts:
        if event["type"] not in OPENAI_ONLY:
            check_open(f"{name}, streamed: {event['type']}", open_events[event["type"]], event)
    texts = [
        part for item in whole["output"] if item["type"] == "message" for part in item["content"]
    ]
    for text in texts if name == "logprobs" else []:
        assert "".join(token["token"] for token in text["logprobs"]) == text["text"], text
        assert all(len(token["top_logprobs"]) == 2 for token in text["logprobs"]), text
# Tools that Open Responses does not have.
for name, tools in [
    ("custom tool", [custom]),
    ("namespace", [{"type": "namespace", "name": "n", "description": "d", "tools": [custom]}]),
]:
    body = {"input": "hi", "tools": tools}
    check_both(f"responses, {name}", text_url, "/responses", body, Response, ResponseStreamEvent)

assert not mismatches, "\n".join(dict.fromkeys(mismatches))
print(f"{checked} answers, chunks and events")
