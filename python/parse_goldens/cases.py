"""The cases of all formats: the same calls and the same mistakes in the syntax of each format."""

import json

from formats import Raw

WEATHER = ("get_weather", {"city": "Hangzhou", "unit": "celsius"})
PARIS = ("get_weather", {"city": "Paris"})
NESTED = (
    "set_values",
    {
        "options": {"depth": 2, "inner": {"on": True}},
        "tags": ["a", "b"],
        "numbers": [1, [2, 3]],
        "rows": [{"id": 1}, {"id": 2, "more": {}}],
        "anything": [],
    },
)
STRINGS = {
    "newlines": "one\ntwo\r\n\n\tthree\n",
    "quotes": "say \"hi\", it's 'fine' `now`",
    "backslashes": 'C:\\new\\table \\" \\u00e9 \\',
    "unicode": "é 杭州 😀 e\u0301 \u2028 \u00a0",
    "brackets": "} ] ) > { [ ( < }} ]] {} [] () </",
    "json": '{"name": "now", "arguments": {}}',
    "html": "<b>bold</b> &amp; <br/>",
    "spaces": "  padded  ",
    "empty": "",
    "code": 'if a < b:\n    print(f"{a}, {b}")  # <tool_call>\n',
    "number": "123",
    "comma": "a, b; c: d = e",
}
# Values as text, for each parameter of `set_values`.
TYPED_VALUES = {
    "count": [
        "5",
        "5.0",
        " 7 ",
        "abc",
        "1_000",
        "+3",
        "-0",
        "007",
        "true",
        "",
        "123456789012345678901234567890",
        "٣",
        "null",
    ],
    "ratio": [
        "1",
        "1.0",
        "-2.5e3",
        "1e2",
        "0.1",
        "1,5",
        "0x10",
        "12345678901234567890.5",
        "1e22",
        ".5",
        "5.",
        "1e-7",
    ],
    "enabled": ["true", "True", "TRUE", "1", "0", "false", "yes", " true ", ""],
    "note": ["123", "true", "null", '{"a": 1}', " padded ", "1.0", '"quoted"'],
    "nothing": ["null", "None", "5"],
    "tags": [
        '["a", "b"]',
        "a, b",
        '"a"',
        '[1, "x", null]',
        "['a']",
        '["a"',
        "",
        '{"a": 1}',
        " [1] ",
    ],
    "numbers": ['[1, "2", 3.0]', '["x"]', "5"],
    "rows": ['[{"id": "1"}, {"id": 2}]', '{"id": "1"}'],
    "options": [
        '{"depth": "2", "name": 5}',
        "{'depth': 2}",
        "null",
        "[1]",
        "{}",
        '{"inner": {"on": "true"}}',
        '{"depth":2}',
    ],
    "limit": ["null", "NULL", "None", "5", "x"],
    "label": ["null", "text", "5"],
    "either": ["true", "maybe", "1"],
    "both": ["1.5", "x"],
    "level": ["2", "4", "x"],
    "color": ["red", "null", "blue"],
    "alias": ["12", "x"],
    "anything": ["1", "text", "true", "null", '{"a": 1}'],
    "pick": ["1", "x"],
    "not_declared": ["1", "text", '{"a": 1}'],
}
# Values that have no JSON form. Each is a case of its own, because some may fail and others not.
VALUES_WITHOUT_JSON = {
    "ratio": ["nan", "inf", "-Infinity", "1e999", "NaN"],
    "tags": ["[1e999]", "[NaN]"],
    "anything": ["NaN", "1e999"],
}
# Values whose types differ from the schema's.
MISTYPED_VALUES = {
    "count": 5.0,
    "ratio": 1,
    "enabled": 1,
    "note": 5,
    "tags": "a",
    "numbers": ["1", 2.5],
    "options": "x",
    "limit": None,
    "label": True,
    "level": "2",
    "not_declared": "7",
}
PLAIN_TEXTS = ["Hello, world.", "  padded \n", "two\n\nlines", "x", "\n", "é 杭州 😀"]
TEXTS_WITHOUT_CALLS = [
    "<tool",
    "<",
    "{",
    "[",
    "[1, 2]",
    "[a, b]",
    "call:",
    '{"a": 1}',
    '{"name": "now"}',
    "f(x)",
    "see </tool_call> there",
    "a < b > c",
    "the set {1, 2}",
    "</think> alone",
]


def text_cases(format):
    """Yields (name, text) of the answers that all formats have."""
    one = format.calls(WEATHER)
    yield "one", one
    yield "two", format.calls(WEATHER, PARIS)
    yield "three", format.calls(WEATHER, ("now", {}), PARIS)
    yield "same-twice", format.calls(PARIS, PARIS)
    yield "no-arguments", format.calls(("now", None))
    yield "no-arguments-then-call", format.calls(("ping", None), WEATHER)
    yield "empty-object", format.calls(("now", {}))
    yield "nested", format.calls(NESTED)
    for name, string in STRINGS.items():
        yield f"string-{name}", format.calls(("write_file", {"path": "a", "content": string}))
    for at, marker in enumerate(format.markers):
        yield (
            f"marker-in-string-{at}",
            format.calls(("write_file", {"path": "a", "content": f"a {marker} b"}), PARIS),
        )
    numbers = {"count": 1, "ratio": 1.0, "anything": -2500.0, "not_declared": 10**30, "both": 1e-7}
    yield "numbers", format.calls(("set_values", numbers))
    yield (
        "constants",
        format.calls(
            ("set_values", {"enabled": True, "limit": None, "anything": False, "label": None})
        ),
    )
    yield "other-types", format.calls(("set_values", MISTYPED_VALUES))
    yield "many-keys", format.calls(("set_values", {f"key_{at}": at for at in range(12)}))
    yield "undeclared-function", format.calls(("unknown", {"x": 1, "y": "2"}))
    yield "undeclared-then-declared", format.calls(("unknown", {"x": 1}), PARIS)
    yield from name_cases(format)
    yield from surrounded_cases(format, one)
    yield from plain_cases(format)
    yield from broken_cases(format, one)


def name_cases(format):
    """Yields calls with unusual names."""
    for at, name in enumerate(
        ["get-weather", "a.b.c", "get_weather ", "", "天气", "functions.get_weather", "get weather"]
    ):
        yield f"name-{at}", format.calls((name, {"city": "Paris"}))


def surrounded_cases(format, one):
    """Yields calls with text and white space around them."""
    yield "text-before", f"Let me look.\n\n{one}"
    yield "text-right-before", f"Let me look.{one}"
    yield "text-after", f"{one}\nThat is all."
    yield "text-right-after", f"{one}That is all."
    yield "text-around", f"  Let me look. {one} That is all. "
    yield "text-between", f"{one}\nand\n{format.calls(PARIS)}\nend"
    yield "blocks", one + format.calls(PARIS)
    yield "blocks-apart", f"{one}\n{format.calls(PARIS)}"
    yield "white-before", f"\n\n {one}"
    yield "white-after", f"{one}\n\n "
    yield "white-around", f"\n{one}\n"
    yield (
        "white-between",
        format.calls(WEATHER, PARIS, ("now", {}), separator=format.white_separator),
    )
    yield "nothing-between", format.calls(WEATHER, PARIS, separator="")


def plain_cases(format):
    """Yields texts without calls, some with markers."""
    yield "empty", ""
    for at, text in enumerate(PLAIN_TEXTS):
        yield f"plain-{at}", text
    for at, text in enumerate(TEXTS_WITHOUT_CALLS):
        yield f"no-call-{at}", text
    for at, marker in enumerate(format.markers):
        yield f"marker-{at}", f"I write {marker} here."
        yield f"marker-cut-{at}", f"I write {marker[:-1]}"


def broken_cases(format, one):
    """Yields incomplete and malformed calls."""
    for name, piece in [
        ("name", "get_wea"),
        ("after-name", "get_weather"),
        ("key", "cit"),
        ("after-key", "city"),
        ("value", "Hangz"),
        ("after-value", "Hangzhou"),
        ("second-key", "unit"),
        ("second-value", "celsius"),
    ]:
        if piece in one:
            yield f"cut-{name}", one[: one.index(piece) + len(piece)]
    for left in sorted(
        {
            1,
            2,
            5,
            len(format.end),
            len(format.end) + 1,
            len(format.end) + 2,
            len(format.block_tags[1]),
        }
        - {0}
    ):
        yield f"cut-last-{left}", one[:-left]
    first = format.markers[0]
    yield "cut-first-marker", one[: one.find(first) + len(first) - 1] if first in one else one[:3]
    yield "cut-after-first-marker", one[: one.find(first) + len(first)] if first in one else one[:1]
    yield "cut-text-before", f"Let me look.\n{one[: one.index('Hangz')]}"
    two = format.calls(WEATHER, PARIS)
    yield "cut-second", two[: two.index("Paris") + 2]
    yield "cut-second-begin", two[: two.rindex("get_weather")]
    if format.end:
        yield "no-end-then-call", two.replace(format.end, "", 1)
        yield "end-twice", one.replace(format.end, format.end * 2)
    yield "doubled-begin", one[: one.index("get_weather")] + one
    if format.block_tags[1]:
        yield "no-block", one.removeprefix(format.block_tags[0]).removesuffix(format.block_tags[1])
        yield "no-block-end", one.removesuffix(format.block_tags[1])
        yield "empty-block", "".join(format.block_tags)
        yield "text-in-block", f"{format.block_tags[0]} hm {format.block_tags[1]}after"


def typed_cases(format):
    """Yields values as text, which some formats convert to the schema's type."""
    for parameter, values in TYPED_VALUES.items():
        yield (
            f"typed-{parameter}",
            format.calls(*(("set_values", {parameter: Raw(value)}) for value in values)),
        )
    for parameter, values in VALUES_WITHOUT_JSON.items():
        for at, value in enumerate(values):
            yield f"odd-{parameter}-{at}", format.calls(("set_values", {parameter: Raw(value)}))


# The JSON objects of a call, for formats with the name in the JSON. KEY is replaced by the format's
# name for the arguments.
CALL_OBJECTS = {
    "order": '{"KEY": {"city": "Paris"}, "name": "get_weather"}',
    "pretty": '{\n  "name": "get_weather",\n  "KEY": {\n    "city": "Paris"\n  }\n}',
    "tight": '{"name":"get_weather","KEY":{"city":"Paris"}}',
    "arguments": '{"name": "get_weather", "arguments": {"city": "Paris"}}',
    "parameters": '{"name": "get_weather", "parameters": {"city": "Paris"}}',
    "both-keys": (
        '{"name": "get_weather", "parameters": {"city": "Rome"}, "arguments": {"city": "Paris"}}'
    ),
    "extra-keys": (
        '{"id": 7, "type": "function", "name": "get_weather", "KEY": {"city": "Paris"}, '
        '"more": [{}]}'
    ),
    "no-name": '{"KEY": {"city": "Paris"}}',
    "name-number": '{"name": 5, "KEY": {"city": "Paris"}}',
    "name-null": '{"name": null, "KEY": {"city": "Paris"}}',
    "name-twice": '{"name": "now", "name": "get_weather", "KEY": {"city": "Paris"}}',
    "function-key": '{"function": {"name": "get_weather", "KEY": {"city": "Paris"}}}',
    "list": '[{"name": "get_weather", "KEY": {"city": "Paris"}}]',
    "string-body": '"get_weather"',
    "number-body": "5",
    "null-body": "null",
    "two-bodies": '{"name": "get_weather", "KEY": {"city": "Paris"}} {"name": "now", "KEY": {}}',
    "text-after-body": '{"name": "get_weather", "KEY": {"city": "Paris"}} so',
    "text-before-body": 'so {"name": "get_weather", "KEY": {"city": "Paris"}}',
    "nested-call": '{"name": "get_weather", "KEY": {"inner": {"name": "now", "KEY": {}}}}',
    "empty-body": "",
    "white-body": " \n ",
    "escaped-name": '{"name": "get\\u005fweather", "KEY": {"city": "Paris"}}',
}
# The arguments, for all formats with JSON.
ARGUMENTS = {
    "pretty": '{\n  "city": "Paris",\n\n  "unit":"celsius"\n}',
    "tight": '{"city":"Paris","unit":"celsius"}',
    "white": ' { "city" : "Paris" } ',
    "string": '"Paris"',
    "string-of-json": '"{\\"city\\": \\"Paris\\"}"',
    "list": '[{"city": "Paris"}]',
    "null": "null",
    "number": "5",
    "true": "true",
    "twice": '{"city": "Rome", "city": "Paris"}',
    "escapes": '{"city": "\\u676d\\u5dde \\u00e9 \\ud83d\\ude00 \\/ \\b\\f\\n\\t \\u0000 \\u007f"}',
    "lone-surrogate": '{"city": "\\ud800"}',
    "raw-newline": '{"city": "a\nb"}',
    "raw-tab": '{"city": "a\tb"}',
    "numbers": (
        '{"anything": -2.5e3, "ratio": 1E2, "count": 12345678901234567890123, "x": 0.1e-7, '
        '"y": -0, "z": -0.0, "w": 1e22}'
    ),
    "long-float": '{"ratio": 0.1000000000000000055511151231257827, "x": 123456789012345678901.5}',
    "huge": '{"ratio": 1e999}',
    "nan": '{"ratio": NaN, "x": [Infinity, -Infinity]}',
    "trailing-comma": '{"city": "Paris",}',
    "single-quotes": "{'city': 'Paris'}",
    "no-quotes": "{city: Paris}",
    "comment": '{"city": "Paris" /* there */}',
    "open-string": '{"city": "Paris}',
    "open-object": '{"city": "Paris"',
    "open-list": '{"tags": ["a"}',
    "surplus-brace": '{"city": "Paris"}}',
    "bad-escape": '{"city": "\\x"}',
    "short-escape": '{"city": "\\u12"}',
    "leading-zero": '{"count": 007}',
    "no-value": '{"city": }',
    "empty-key": '{"": 1}',
    "deep": '{"anything": ' + "[" * 40 + "]" * 40 + "}",
    "text": "Paris",
    "python": '{"enabled": True, "limit": None}',
}


def json_cases(format):
    """Yields valid and invalid JSON, for formats with JSON."""
    key = "parameters" if format.tool_parser == "llama3_json" else "arguments"
    whole = format.calls(("get_weather", "ARGUMENTS"))
    body = json.dumps({"name": "get_weather", key: 0})[:-2]
    for name, arguments in ARGUMENTS.items():
        function = (
            "set_values"
            if '"x"' in arguments or "anything" in arguments or "tags" in arguments
            else "get_weather"
        )
        yield (
            f"arguments-{name}",
            whole.replace("get_weather", function).replace("ARGUMENTS", arguments),
        )
        if name in ("open-string", "trailing-comma", "raw-newline"):
            yield f"arguments-{name}-then-call", format.calls(("get_weather", arguments), PARIS)
            yield f"arguments-{name}-after-call", format.calls(PARIS, ("get_weather", arguments))
    if format.json == "call":
        begin, end = whole.split(f"{body}ARGUMENTS}}")
        for name, text in CALL_OBJECTS.items():
            yield f"object-{name}", begin + text.replace("KEY", key) + end
