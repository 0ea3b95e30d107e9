"""Tests the Responses API of a Chiasm frontend with the `openai` package. Run by real_vllm.

usage: openai_responses.py BASE_URL PICTURE

Covers whole and streamed answers, conversations with calls, structured outputs, and refusals.
"""

import base64
import sys

import openai

base_url, picture = sys.argv[1:]
client = openai.OpenAI(base_url=base_url, api_key="unused", max_retries=0)

model = client.models.list().data[0].id
data_uri = "data:image/jpeg;base64," + base64.b64encode(open(picture, "rb").read()).decode()
question = {
    "role": "user",
    "content": [
        {"type": "input_image", "image_url": data_uri, "detail": "auto"},
        {"type": "input_text", "text": "describe this image briefly."},
    ],
}
request = {
    "model": model,
    "input": [question],
    "instructions": "be kind",
    "max_output_tokens": 12,
    "temperature": 0,
}

whole = client.responses.create(**request, metadata={"a": "b"})
assert whole.status in ("completed", "incomplete") and whole.object == "response", whole
assert whole.output_text and whole.metadata == {"a": "b"} and whole.instructions == "be kind", whole
assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens, whole.usage
if whole.status == "incomplete":
    assert whole.incomplete_details.reason == "max_output_tokens", whole

# `stream()` raises on an incomplete answer, so this one ends at a stop string.
stop = whole.output_text[1:4]
short = {**request, "max_output_tokens": 4096, "extra_body": {"stop": stop}}
with client.responses.stream(**short) as stream:
    events = list(stream)
    final = stream.get_final_response()
assert final.status == "completed" and final.output_text == whole.output_text.split(stop)[0], (
    final,
    whole,
)
kinds = [event.type for event in events]
assert (
    kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
), kinds
assert [event.sequence_number for event in events] == list(range(len(events))), events

text = ""
for event in client.responses.create(**request, stream=True):
    if event.type == "response.output_text.delta":
        text += event.delta
    last = event
assert text == whole.output_text, (text, whole.output_text)
assert last.response.output_text == text and last.response.status == whole.status, last
details = last.response.usage.input_tokens_details
assert details.cached_tokens > 0 and details.cache_write_tokens >= 0, last.response.usage

# Earlier output items are sent back unchanged, with calls and their results.
tools = [
    {
        "type": "function",
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object"},
        "strict": True,
    }
]
history = [
    question,
    *[item.model_dump() for item in whole.output],
    {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "call_1", "output": "a sunrise"},
    {"role": "user", "content": "and now?"},
]
again = client.responses.create(**{**request, "input": history}, tools=tools, tool_choice="none")
assert again.usage.input_tokens > whole.usage.input_tokens, again.usage
assert again.tools[0].name == "look" and again.tool_choice == "none", again

schema = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}
text_format = {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}}
structured = client.responses.create(
    model=model, input="answer", text=text_format, max_output_tokens=64, temperature=0
)
assert structured.text.format.type == "json_schema" and structured.output_text, structured

for refused, field in [
    ({"previous_response_id": whole.id}, "previous_response_id"),
    ({"background": True}, "background"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
]:
    try:
        client.responses.create(**{**request, **refused})
    except openai.BadRequestError as error:
        assert error.param == field, error
    else:
        raise AssertionError(f"{field} must be refused")

try:
    client.responses.retrieve(whole.id)
except openai.NotFoundError as error:
    assert error.code == "response_not_found", error
else:
    raise AssertionError("no response is kept")

print("ok")
