"""Tests the package `litellm` with simulated engines through OpenAI's and Anthropic's APIs: whole, streamed, with an image,
with tools.

usage: litellm_client.py SEES CALLS PICTURE: servers whose engines describe the request, and call weather("Paris")
"""

import base64
import json
import re
import sys

import litellm

sees, calls, picture = sys.argv[1:]
data_uri = "data:image/jpeg;base64," + base64.b64encode(open(picture, "rb").read()).decode()
image = {"type": "image_url", "image_url": {"url": data_uri}}
question = [{"role": "user", "content": "What is the weather in Paris?"}]
seen = [{"role": "user", "content": [image, {"type": "text", "text": "What is in this picture?"}]}]
parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
tool = {"type": "function", "function": {"name": "weather", "description": "Tells the weather.", "parameters": parameters}}


def ask(provider, url, messages, **more):
    # Anthropic's clients add /v1 themselves.
    base = url.removesuffix("/v1") if provider == "anthropic" else url
    key = {"api_key": "unused", "max_retries": 0, "timeout": 60}
    return litellm.completion(model=f"{provider}/m", api_base=base, messages=messages, max_tokens=100, **key, **more)


def check_seen(answer, items):
    """Checks that the engine's description of the image and the prompt agrees with the usage."""
    text = answer.choices[0].message.content
    cached, prompt = map(int, re.fullmatch(rf"{items}; (\d+) of (\d+) prompt tokens were cached", text).groups())
    assert answer.choices[0].finish_reason == "stop", answer
    assert answer.usage.prompt_tokens == prompt and answer.usage.completion_tokens > 5, (answer.usage, text)
    assert answer.usage.prompt_tokens_details.cached_tokens == cached, (answer.usage, text)


def check_called(answer):
    [call] = answer.choices[0].message.tool_calls
    assert call.function.name == "weather" and json.loads(call.function.arguments) == {"city": "Paris"}, answer
    assert answer.choices[0].finish_reason == "tool_calls", answer


def streamed(provider, url, messages, **more):
    chunks = list(ask(provider, url, messages, stream=True, **more))
    assert len(chunks) > 3, chunks
    return litellm.stream_chunk_builder(chunks, messages=messages)


for provider in ["openai", "hosted_vllm", "anthropic"]:
    # OpenAI's API reports a stream's usage on request, Anthropic's always.
    usage = {} if provider == "anthropic" else {"stream_options": {"include_usage": True}}
    check_seen(ask(provider, sees, seen), r"1 image 280x224 \(80 tokens, \w+\)")
    check_seen(streamed(provider, sees, question, **usage), "no images")
    said = ask(provider, calls, question, tools=[tool])
    check_called(said)
    check_called(streamed(provider, calls, question, tools=[tool]))
    call = said.choices[0].message.tool_calls[0]
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    again = ask(provider, calls, [*question, said.choices[0].message, result], tools=[tool])
    assert again.usage.prompt_tokens > said.usage.prompt_tokens, again

print("ok")
