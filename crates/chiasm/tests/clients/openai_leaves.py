"""Cancels requests of the `openai` package.

usage: openai_leaves.py BASE_URL: a server whose answers take minutes

Closes a stream halfway; timeouts cancel a stream without tokens and a whole answer.
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
    start = time.monotonic()
    try:
        for _ in client.with_options(timeout=1).chat.completions.create(
            messages=messages, stream=stream, **endless
        ):
            raise AssertionError("the request must time out")
    except openai.APITimeoutError:
        elapsed = time.monotonic() - start
        assert elapsed < 5, elapsed
    else:
        raise AssertionError("the request must time out")
print("ok")
