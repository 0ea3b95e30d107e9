"""Tests the package `langchain-openai` with simulated engines.

usage: langchain_client.py DESCRIBING_URL CALLING_URL JSON_URL PICTURE

Covers whole and streamed answers, images, tools and structured output. The engines of the three
servers describe the request, call a function, and answer with JSON.
"""

import base64
import re
import sys

from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

describing_url, calling_url, json_url, picture = sys.argv[1:]
QUESTION = "What is the weather in Paris?"
CALL = {"name": "weather", "args": {"city": "Paris"}}


def chat(url):
    return ChatOpenAI(model="m", base_url=url, api_key="unused", max_retries=0, timeout=60)


def check_seen(message, items):
    """Checks that the engine's description of the image and the prompt agrees with the usage."""
    words = rf"{items}; (\d+) of (\d+) prompt tokens were cached"
    cached, prompt = map(int, re.fullmatch(words, message.content).groups())
    usage = message.usage_metadata
    assert usage["input_tokens"] == prompt and usage["output_tokens"] > 5, message
    assert usage["input_token_details"]["cache_read"] == cached, message
    assert message.response_metadata["finish_reason"] == "stop", message


@tool
def weather(city: str) -> str:
    """Tells the weather."""
    return "sunny in " + city


data_uri = "data:image/jpeg;base64," + base64.b64encode(open(picture, "rb").read()).decode()
content = [
    {"type": "image_url", "image_url": {"url": data_uri}},
    {"type": "text", "text": "What is in this picture?"},
]
check_seen(
    chat(describing_url).invoke([HumanMessage(content=content)]),
    r"1 image 280x224 \(80 tokens, \w+\)",
)

chunks = list(chat(describing_url).stream(QUESTION, stream_usage=True))
assert len(chunks) > 5, chunks
whole = chunks[0]
for chunk in chunks[1:]:
    whole += chunk
check_seen(whole, "no images")

bound = chat(calling_url).bind_tools([weather])
reply = bound.invoke(QUESTION)
assert [{key: call[key] for key in CALL} for call in reply.tool_calls] == [
    CALL
] and not reply.invalid_tool_calls, reply
assert reply.content == "" and reply.response_metadata["finish_reason"] == "tool_calls", reply
history = [
    HumanMessage(content=QUESTION),
    reply,
    *(weather.invoke(call) for call in reply.tool_calls),
]
assert history[-1].content == "sunny in Paris", history
again = bound.invoke(history)
assert again.usage_metadata["input_tokens"] > reply.usage_metadata["input_tokens"], again
streamed = None
for chunk in bound.stream(QUESTION):
    streamed = chunk if streamed is None else streamed + chunk
assert [{key: call[key] for key in CALL} for call in streamed.tool_calls] == [CALL], streamed
for choice in ["any", "weather"]:
    forced = chat(calling_url).bind_tools([weather], tool_choice=choice).invoke(QUESTION)
    assert [call["name"] for call in forced.tool_calls] == ["weather"], forced

# The function has the name of the class.
Weather = type("weather", (BaseModel,), {"__doc__": "Where.", "__annotations__": {"city": str}})
for url, method in [
    (json_url, "json_schema"),
    (json_url, "json_mode"),
    (calling_url, "function_calling"),
]:
    place = (
        chat(url).with_structured_output(Weather, method=method).invoke("A place as JSON, please.")
    )
    assert place.city == "Paris", (method, place)

completed = OpenAI(model="m", base_url=describing_url, api_key="unused", max_retries=0).invoke(
    "the quick brown fox"
)
assert "prompt tokens were cached" in completed, completed
print("ok")
