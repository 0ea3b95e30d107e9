"""vLLM's constraints for answers with calls, by parser and request.

A constraint is a structural tag, a JSON schema or a grammar.
"""

import json

NAMED = {"type": "function", "function": {"name": "get_weather"}}
# (tools, choice): the named function must be among the tools.
REQUESTS = [
    ("plain", "auto"),
    ("plain", "required"),
    ("plain", NAMED),
    ("strict", "auto"),
    ("strict", "required"),
    ("strict", NAMED),
    ("one", "auto"),
    ("one", "required"),
    ("all", "auto"),
    ("all", "required"),
    ("values", "auto"),
    ("values", "required"),
    ("defs", "auto"),
    ("defs", "required"),
    ("plain", "none"),
]


def rows(parsers, formats):
    """Returns the constraints of all formats and requests."""
    results = []
    for format in formats.values():
        if any(
            row["tool_parser"] == format.tool_parser and row["tokenizer"] == format.tokenizer
            for row in results
        ):
            continue
        for tools, choice in REQUESTS:
            for parallel in (True, False):
                results.append(constraint(parsers, format, tools, choice, parallel))
    return results


def constraint(parsers, format, tools, choice, parallel):
    """Returns the constraint that a parser sets for one request, or the type of its exception."""
    row = {
        "tool_parser": format.tool_parser,
        "tokenizer": format.tokenizer,
        "tools": tools,
        "tool_choice": choice,
        "parallel_tool_calls": parallel,
    }
    try:
        request = parsers.request(tools, choice, {}, parallel_tool_calls=parallel)
        parser = parsers.parser(format.tokenizer, format.tool_parser, None, request)
        request = parsers.adjust_request(format.tokenizer, parser, request)
    except Exception as error:
        return row | {"raises": type(error).__name__}
    row["skip_special_tokens"] = request.skip_special_tokens
    outputs = request.structured_outputs
    if outputs is None:
        return row | {"held_to": None}
    constraints = {
        kind: getattr(outputs, kind)
        for kind in ("structural_tag", "json", "grammar")
        if getattr(outputs, kind) is not None
    }
    ((kind, value),) = constraints.items()
    return row | {"held_to": kind, kind: json.loads(value) if kind == "structural_tag" else value}
