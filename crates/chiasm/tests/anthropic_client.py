"""Tests a Chiasm frontend with the `anthropic` package. Run by real_vllm.

usage: anthropic_client.py BASE_URL MODEL PICTURE, with the URL without /v1

Covers plain and streamed messages, images, tools, token counts and refusals.
"""

import base64
import sys

import anthropic

base_url, model, picture = sys.argv[1:]
client = anthropic.Anthropic(base_url=base_url, api_key="unused", max_retries=0)

data = base64.b64encode(open(picture, "rb").read()).decode()
image = {"type": "image", "source": {"type": "base64", "media_type": "image/jpeg", "data": data}}
messages = [
    {"role": "user", "content": [image, {"type": "text", "text": "describe this image briefly."}]}
]

whole = client.messages.create(
    model=model, messages=messages, system="be brief", max_tokens=12, extra_body={"temperature": 0}
)
assert whole.role == "assistant" and whole.type == "message", whole
assert whole.usage.output_tokens == 12 or whole.stop_reason == "end_turn", whole
text = "".join(block.text for block in whole.content)

count = client.messages.count_tokens(model=model, messages=messages, system="be brief")


def prompt_tokens(usage):
    return usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens


assert count.input_tokens == prompt_tokens(whole.usage), (count, whole)

with client.messages.stream(
    model=model, messages=messages, system="be brief", max_tokens=12, extra_body={"temperature": 0}
) as stream:
    streamed = "".join(stream.text_stream)
    final = stream.get_final_message()
assert [block.text for block in final.content] == [streamed], final
assert final.stop_reason == whole.stop_reason, (final, whole)
assert final.usage.cache_read_input_tokens > 0, final
assert streamed == text, (streamed, text)

tools = [
    {"name": "look", "description": "Looks.", "input_schema": {"type": "object", "properties": {}}}
]
history = [
    *messages,
    {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}],
    },
    {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": [image]}],
    },
]
answer = client.messages.create(
    model=model, messages=history, max_tokens=8, tools=tools, tool_choice={"type": "none"}
)
assert prompt_tokens(answer.usage) > count.input_tokens, answer

stopped = client.messages.create(
    model=model, messages=[{"role": "user", "content": "x"}], max_tokens=1
)
assert stopped.stop_reason == "max_tokens", stopped

try:
    client.messages.create(model=model, messages=messages, max_tokens=5, extra_body={"n": 2})
except anthropic.BadRequestError as error:
    assert (
        error.body["error"]["type"] == "invalid_request_error"
        and "'n'" in error.body["error"]["message"]
    ), error
else:
    raise AssertionError("an unknown field must be refused")

try:
    client.messages.create(model="other", messages=messages, max_tokens=5)
except anthropic.NotFoundError as error:
    assert error.body["error"]["type"] == "not_found_error", error
else:
    raise AssertionError("an unknown model must be refused")

print("ok")
