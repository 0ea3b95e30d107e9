"""Tests the package `litellm` with simulated engines through OpenAI's and Anthropic's APIs.

usage: litellm_client.py DESCRIBING_URL CALLING_URL PICTURE

Covers whole and streamed answers, images and tools. The engines of the two servers describe the
request, and call weather("Paris").
"""

import base64
import json
import re
import sys

import litellm

describing_url, calling_url, picture = sys.argv[1:]
data_uri = "data:image/jpeg;base64," + base64.b64encode(open(picture, "rb").read()).decode()
image = {"type": "image_url", "image_url": {"url": data_uri}}
question = [{"role": "user", "content": "What is the weather in Paris?"}]
image_question = [
    {"role": "user", "content": [image, {"type": "text", "text": "What is in this picture?"}]}
]
parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
tool = {
    "type": "function",
    "function": {"name": "weather", "description": "Tells the weather.", "parameters": parameters},
}


def complete(provider, url, messages, **more):
    # Anthropic's clients append /v1.
    base = url.removesuffix("/v1") if provider == "anthropic" else url
    key = {"api_key": "unused", "max_retries": 0, "timeout": 60}
    return litellm.completion(
        model=f"{provider}/m", api_base=base, messages=messages, max_tokens=100, **key, **more
    )


def check_seen(answer, items):
    """Checks that the engine's description of the image and the prompt agrees with the usage."""
    text = answer.choices[0].message.content
    cached, prompt = map(
        int, re.fullmatch(rf"{items}; (\d+) of (\d+) prompt tokens were cached", text).groups()
    )
    assert answer.choices[0].finish_reason == "stop", answer
    assert answer.usage.prompt_tokens == prompt and answer.usage.completion_tokens > 5, (
        answer.usage,
        text,
    )
    assert answer.usage.prompt_tokens_details.cached_tokens == cached, (answer.usage, text)


def check_call(answer):
    [call] = answer.choices[0].message.tool_calls
    assert call.function.name == "weather" and json.loads(call.function.arguments) == {
        "city": "Paris"
    }, answer
    assert answer.choices[0].finish_reason == "tool_calls", answer


def streamed(provider, url, messages, **more):
    chunks = list(complete(provider, url, messages, stream=True, **more))
    assert len(chunks) > 3, chunks
    return litellm.stream_chunk_builder(chunks, messages=messages)


for provider in ["openai", "hosted_vllm", "anthropic"]:
    # OpenAI's API reports a stream's usage on request, Anthropic's always.
    usage = {} if provider == "anthropic" else {"stream_options": {"include_usage": True}}
    check_seen(
        complete(provider, describing_url, image_question), r"1 image 280x224 \(80 tokens, \w+\)"
    )
    check_seen(streamed(provider, describing_url, question, **usage), "no images")
    reply = complete(provider, calling_url, question, tools=[tool])
    check_call(reply)
    check_call(streamed(provider, calling_url, question, tools=[tool]))
    call = reply.choices[0].message.tool_calls[0]
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    again = complete(
        provider, calling_url, [*question, reply.choices[0].message, result], tools=[tool]
    )
    assert again.usage.prompt_tokens > reply.usage.prompt_tokens, again

print("ok")
