"""Tests forced calls and a schema with the package `langchain-openai` and a real engine.

usage: langchain_forced.py BASE_URL

Run by real_vllm.
"""

import sys
from typing import Literal

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

# A random model would write white space wherever JSON allows it. These tokens are tab, line feed,
# carriage return and space.
no_white_space = {"197": -100, "198": -100, "201": -100, "220": -100}
chat = ChatOpenAI(
    model="m",
    base_url=sys.argv[1],
    api_key="unused",
    max_retries=0,
    temperature=0,
    max_tokens=120,
    logit_bias=no_white_space,
)
TEXT = "the quick brown fox jumps over the lazy dog"


@tool
def weather(city: Literal["Paris", "Hangzhou"]) -> str:
    """Tells the weather."""
    return "sunny in " + city


@tool
def light(state: Literal["on", "off"]) -> str:
    """Switches the light."""
    return "it is " + state


for choice, names in [("any", ["weather", "light"]), ("light", ["light"])]:
    bound = chat.bind_tools(
        [weather, light], tool_choice=choice, strict=True, parallel_tool_calls=False
    )
    whole = bound.invoke(TEXT)
    streamed = None
    for chunk in bound.stream(TEXT):
        streamed = chunk if streamed is None else streamed + chunk
    for reply in [whole, streamed]:
        [call] = reply.tool_calls
        assert call["name"] in names and not reply.invalid_tool_calls, reply
        assert (
            {"weather": weather, "light": light}[call["name"]].invoke(call["args"]).split()[-1]
        ), reply
    assert whole.tool_calls[0]["args"] == streamed.tool_calls[0]["args"], (whole, streamed)


class Shape(BaseModel):
    """A shape."""

    red: bool
    shape: Literal["circle", "square"]


for method in ["json_schema", "function_calling"]:
    shape = chat.with_structured_output(Shape, method=method, strict=True).invoke(TEXT)
    assert isinstance(shape, Shape), (method, shape)
print("ok")
