"""Cancels requests of the `openai` package: a stream halfway, and by timeouts a stream without tokens and a whole answer.

usage: openai_leaves.py BASE_URL: a server whose answers take minutes
"""

import sys
import time

import openai

client = openai.OpenAI(base_url=sys.argv[1], api_key="unused", max_retries=0)
# The engine needs some seconds for this prompt.
short, long = [[{"role": "user", "content": "a b " * times}] for times in (1, 500)]
endless = {"model": "m", "max_tokens": 6000, "extra_body": {"ignore_eos": True}}

with client.chat.completions.create(messages=short, stream=True, **endless) as stream:
    pieces = [chunk.choices[0].delta.content for chunk, _ in zip(stream, range(4))]
assert any(pieces), pieces

for messages, stream in [(long, True), (short, False)]:
    began = time.monotonic()
    try:
        for _ in client.with_options(timeout=1).chat.completions.create(messages=messages, stream=stream, **endless):
            raise AssertionError("it must take longer")
    except openai.APITimeoutError:
        took = time.monotonic() - began
        assert took < 5, took
    else:
        raise AssertionError("it must take longer")
print("ok")
