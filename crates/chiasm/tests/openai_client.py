"""Tests a Chiasm frontend with the `openai` package. Run by real_vllm.

usage: openai_client.py BASE_URL PICTURE

Covers plain and streamed answers, images and refusals.
"""

import base64
import sys

import openai

base_url, picture = sys.argv[1:]
client = openai.OpenAI(base_url=base_url, api_key="unused", max_retries=0)

model = client.models.list().data[0].id
data_uri = "data:image/jpeg;base64," + base64.b64encode(open(picture, "rb").read()).decode()
messages = [
    {
        "role": "user",
        "content": [
            {"type": "image_url", "image_url": {"url": data_uri}},
            {"type": "text", "text": "describe this image briefly."},
        ],
    }
]

whole = client.chat.completions.create(model=model, messages=messages, max_tokens=12, temperature=0)
assert whole.choices[0].message.role == "assistant"
assert whole.usage.completion_tokens == 12 or whole.choices[0].finish_reason == "stop", whole
text = whole.choices[0].message.content

stream = client.chat.completions.create(
    model=model,
    messages=messages,
    max_tokens=12,
    temperature=0,
    stream=True,
    stream_options={"include_usage": True},
)
chunks = list(stream)
streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
assert streamed == text, (streamed, text)
usage = chunks[-1].usage
assert usage.prompt_tokens == whole.usage.prompt_tokens
assert usage.prompt_tokens_details.cached_tokens > 0, usage

with_logprobs = client.chat.completions.create(
    model=model, messages=messages, max_tokens=3, temperature=0, logprobs=True, top_logprobs=2
)
content = with_logprobs.choices[0].logprobs.content
assert len(content) == 3 and all(len(token.top_logprobs) == 2 for token in content), content

completion = client.completions.create(
    model=model, prompt="the quick brown fox", max_tokens=5, temperature=0
)
assert completion.usage.completion_tokens >= 1, completion

several = client.chat.completions.create(model=model, messages=messages, max_tokens=3, n=2, seed=7)
assert [choice.index for choice in several.choices] == [0, 1]

try:
    client.chat.completions.create(model=model, messages=messages, response_format={"type": "yaml"})
except openai.BadRequestError as error:
    assert error.param == "response_format.type", error
else:
    raise AssertionError("an unknown format must be refused")

try:
    client.chat.completions.create(model="other", messages=messages)
except openai.NotFoundError as error:
    assert error.code == "model_not_found", error
else:
    raise AssertionError("an unknown model must be refused")

print("ok")
