"""What vLLM holds an answer to so that it has calls: a structural tag, a JSON schema or a grammar, by parser and request."""
import json

NAMED = {"type": "function", "function": {"name": "get_weather"}}
# (tools, choice): the named function has to be among the tools.
REQUESTS = [("plain", "auto"), ("plain", "required"), ("plain", NAMED), ("strict", "auto"), ("strict", "required"),
            ("strict", NAMED),
            ("one", "auto"), ("one", "required"), ("all", "auto"), ("all", "required"), ("values", "auto"), ("values", "required"),
            ("defs", "auto"), ("defs", "required"), ("plain", "none")]


def rows(parsers, formats):
    out = []
    for format in formats.values():
        if any(row["tool_parser"] == format.tool_parser and row["tokenizer"] == format.tokenizer for row in out):
            continue
        for tools, choice in REQUESTS:
            for parallel in (True, False):
                out.append(constraint(parsers, format, tools, choice, parallel))
    return out


def constraint(parsers, format, tools, choice, parallel):
    row = {"tool_parser": format.tool_parser, "tokenizer": format.tokenizer, "tools": tools, "tool_choice": choice,
           "parallel_tool_calls": parallel}
    try:
        request = parsers.request(tools, choice, {}, parallel_tool_calls=parallel)
        parser = parsers.parser(format.tokenizer, format.tool_parser, None, request)
        request = parsers.adjusted(format.tokenizer, parser, request)
    except Exception as error:
        return row | {"raises": type(error).__name__}
    row["skip_special_tokens"] = request.skip_special_tokens
    held = request.structured_outputs
    if held is None:
        return row | {"held_to": None}
    given = {kind: getattr(held, kind) for kind in ("structural_tag", "json", "grammar") if getattr(held, kind) is not None}
    (kind, value), = given.items()
    return row | {"held_to": kind, kind: json.loads(value) if kind == "structural_tag" else value}
