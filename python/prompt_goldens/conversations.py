"""Chat requests that exercise the different ways of rendering, as bodies from an OpenAI client."""

# An image of 1 x 1 pixel: the number of image tokens is not tested here.
PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwA"
    "DhgGAWjR9awAAAABJRU5E"
    "rkJggg=="
)
IMAGE = {"type": "image_url", "image_url": {"url": PIXEL}}


def text(value):
    return {"type": "text", "text": value}


def user(*content):
    return {
        "role": "user",
        "content": content[0]
        if len(content) == 1 and isinstance(content[0], str)
        else list(content),
    }


def system(content):
    return {"role": "system", "content": content}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


def call(name, arguments, id="call_1"):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


ODD_TEXT = "\t naïve café — 北京 👩‍👩‍👧 \u00a0\u2003 e\u0301 \x1c\x1f end \n"
TOOL_CONVERSATION = [
    system("You may call tools."),
    user("Weather in Köln?"),
    assistant(
        None,
        tool_calls=[
            call(
                "weather",
                (
                    '{"city": "K\\u00f6ln", "days": 2, "f": 1.0, "x": 1e-7, "n": null, "l": '
                    '[true, {"a": "\\"<&>\'"}]}'
                ),
            )
        ],
    ),
    {"role": "tool", "tool_call_id": "call_1", "content": "cloudy"},
    user("And tomorrow?"),
]


def function(name, description=None, parameters=None, **more):
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters, **more},
    }


WEATHER = function(
    "weather",
    "Tells the weather — naïvely.",
    {
        "type": "object",
        "required": ["city"],
        "additionalProperties": False,
        "$schema": "x",
        "properties": {
            "city": {"type": "string", "description": 'Köln, "北京" & <so> on\'s'},
            "days": {
                "type": ["integer", "null"],
                "default": 1,
                "minimum": 0.5,
                "enum": [1, 2.0, 1e-7, None, True],
            },
            "more": {
                "type": "object",
                "properties": {
                    "a": {"anyOf": [{"type": "array", "items": {"type": "number"}}, {}]}
                },
            },
        },
    },
)
ALL_TOOLS = [WEATHER, function("now"), function("ping", "", {}, strict=True)]

TEXT_REQUESTS = {
    "hello": dict(messages=[user("Hello!")]),
    "system": dict(messages=[system("You are terse."), user("Hello!")]),
    "system as parts": dict(messages=[system([text("You are"), text("terse.")]), user("Hello!")]),
    "turns": dict(messages=[user("Hi"), assistant("Hello."), user("How are you?")]),
    "parts": dict(messages=[user(text("one"), text("two"), text(""), text("three"))]),
    "empty text": dict(messages=[user("")]),
    "empty parts": dict(messages=[user()]),
    "odd characters": dict(
        messages=[system(ODD_TEXT), user(ODD_TEXT), assistant(ODD_TEXT), user(ODD_TEXT + "!")]
    ),
    "only white space": dict(messages=[user(" \n\t "), assistant("  x  "), user("\x1c\x1d\x85")]),
    "jinja in text": dict(messages=[user("{{ 7 * 7 }} {% if x %} {# no #}")]),
    "special tokens in text": dict(messages=[user("a <|im_end|> <|eot_id|> </s> <s> b")]),
    "line ends": dict(messages=[user("a\r\nb\rc\n\nd\n")]),
    "name": dict(messages=[{"role": "user", "name": "ann", "content": "I am Ann."}]),
    "no generation prompt": dict(
        messages=[user("Hi"), assistant("Bye")], add_generation_prompt=False
    ),
    "continue": dict(
        messages=[user("Count"), assistant("one, two,")],
        add_generation_prompt=False,
        continue_final_message=True,
    ),
    "continue with a space": dict(
        messages=[user("Count"), assistant("one, two, ")],
        add_generation_prompt=False,
        continue_final_message=True,
    ),
    "continue parts": dict(
        messages=[user("Count"), assistant([text("one,"), text("two,")])],
        add_generation_prompt=False,
        continue_final_message=True,
    ),
    "continue nothing": dict(
        messages=[user("Count"), assistant(None)],
        add_generation_prompt=False,
        continue_final_message=True,
    ),
    "billing header": dict(
        messages=[system("x-anthropic-billing-header: cch=1\nYou are terse."), user("Hi")]
    ),
    "billing header alone": dict(
        messages=[system("x-anthropic-billing-header: cch=1"), user("Hi")]
    ),
    "thinking off": dict(messages=[user("Hi")], chat_template_kwargs={"enable_thinking": False}),
    "thinking on": dict(messages=[user("Hi")], chat_template_kwargs={"enable_thinking": True}),
    "thinking null": dict(messages=[user("Hi")], chat_template_kwargs={"enable_thinking": None}),
    "kwargs nobody asks for": dict(
        messages=[user("Hi")], chat_template_kwargs={"a": [1], "range": 3, "namespace": 1}
    ),
    "kwargs set the date": dict(
        messages=[user("Hi")], chat_template_kwargs={"date_string": "1 Jan 2000"}
    ),
    "kwargs set a token": dict(messages=[user("Hi")], chat_template_kwargs={"bos_token": "BOS"}),
    "kwargs may not open the prompt": dict(
        messages=[user("Hi")], chat_template_kwargs={"add_generation_prompt": False}
    ),
    "thought": dict(
        messages=[
            user("Hi"),
            assistant("<think>\nhm\n</think>\n\nHello"),
            user("Again"),
            assistant("<think>\nso\n</think>\nYes"),
        ],
        add_generation_prompt=False,
    ),
    "tools": dict(messages=TOOL_CONVERSATION),
    "functions": dict(
        messages=[system("You are terse."), user("Weather in Köln?")], tools=ALL_TOOLS
    ),
    "functions without a system message": dict(
        messages=[user("Weather in Köln?")], tools=[WEATHER]
    ),
    "functions and calls": dict(messages=TOOL_CONVERSATION, tools=ALL_TOOLS),
    "functions without thinking": dict(
        messages=[user("Hi")], tools=ALL_TOOLS, chat_template_kwargs={"enable_thinking": False}
    ),
    "functions that are not to be called": dict(
        messages=[user("Hi")], tools=ALL_TOOLS, tool_choice="none"
    ),
    "two calls": dict(
        messages=[
            user("Both?"),
            assistant("Sure.", tool_calls=[call("a", "{}"), call("b", '{"k": [1, 2]}', "call_2")]),
            {"role": "tool", "tool_call_id": "call_1", "content": "A"},
            {"role": "tool", "tool_call_id": "call_2", "content": [text("B"), text("C")]},
        ]
    ),
    "call arguments that are no object": dict(
        messages=[
            user("Go"),
            assistant("", tool_calls=[call("a", "[1]")]),
            {"role": "tool", "tool_call_id": "call_1", "content": "A"},
            assistant("", tool_calls=[call("a", "oops")]),
            {"role": "tool", "tool_call_id": "call_1", "content": "A"},
            assistant("", tool_calls=[call("a", "")]),
            {"role": "tool", "tool_call_id": "call_1", "content": "A"},
        ]
    ),
    "odd calls": dict(
        messages=[
            user("Go"),
            assistant(
                "",
                tool_calls=[
                    {
                        "type": "function",
                        "index": 0,
                        "function": {
                            "description": "d",
                            "arguments": '{"a": 1, "b": 2, "a": 3}',
                            "name": "f",
                        },
                        "id": "x",
                    }
                ],
            ),
        ]
    ),
    "call without type": dict(
        messages=[
            user("Go"),
            assistant("", tool_calls=[{"id": "x", "function": {"name": "f", "arguments": "{}"}}]),
        ]
    ),
    "call without id": dict(
        messages=[
            user("Go"),
            assistant(
                "", tool_calls=[{"type": "function", "function": {"name": "f", "arguments": "{}"}}]
            ),
        ]
    ),
    "call arguments as an object": dict(
        messages=[user("Go"), assistant("", tool_calls=[call("f", {"k": 1})])]
    ),
    "call without arguments": dict(
        messages=[
            user("Go"),
            assistant("", tool_calls=[{"id": "x", "type": "function", "function": {"name": "f"}}]),
        ]
    ),
    "calls of a user": dict(
        messages=[
            {"role": "user", "content": "Go", "tool_calls": [call("f", "{}")], "tool_call_id": "y"}
        ]
    ),
    "tool without id": dict(messages=[user("Go"), {"role": "tool", "content": "A"}]),
    "system last": dict(messages=[user("Go"), system("Now.")]),
    "no calls": dict(messages=[user("Go"), assistant("No.", tool_calls=[]), user("Fine")]),
    "tool content empty": dict(
        messages=[
            user("Go"),
            assistant("", tool_calls=[call("a", "{}")]),
            {"role": "tool", "tool_call_id": "call_1", "content": []},
        ]
    ),
    "developer": dict(messages=[{"role": "developer", "content": "Be kind."}, user("Hi")]),
    "developer later": dict(
        messages=[
            system([text("a"), text("b")]),
            user("Hi"),
            {"role": "developer", "content": "Be kind."},
            system(""),
            user("Hi again"),
        ]
    ),
    "assistant first": dict(messages=[assistant("I begin."), user("Odd.")]),
    "languages of parts": dict(
        messages=[
            user(
                text("Hi") | {"source_lang_code": "en", "target_lang_code": "de"},
                text("there") | {"glossary": {"z": [1, None], "a": "ü"}, "source_lang_code": "en"},
                text("!"),
            )
        ]
    ),
    "role of a template": dict(
        messages=[
            {"role": "document", "content": "A bear."},
            {"role": "document", "content": [text("A"), text("bee.")]},
            user("Who?"),
        ]
    ),
}

IMAGE_REQUESTS = {
    "image": dict(messages=[user(IMAGE, text("What is this?"))]),
    "image last": dict(messages=[user(text("What is this?"), IMAGE)]),
    "image alone": dict(messages=[user(IMAGE)]),
    "images between texts": dict(
        messages=[user(text("Compare"), IMAGE, text("and"), IMAGE, text("!"))]
    ),
    "images over turns": dict(
        messages=[
            system("See."),
            user(IMAGE, text("One")),
            assistant("ok"),
            user(text("Two"), IMAGE, IMAGE),
        ]
    ),
    "image ids": dict(
        messages=[user(IMAGE, text("a"), IMAGE)], chat_template_kwargs={"add_vision_id": True}
    ),
    "image and functions": dict(messages=[user(IMAGE, text("What is this?"))], tools=ALL_TOOLS),
    "language of an image": dict(
        messages=[user(IMAGE | {"source_lang_code": "en"}, text("Translate it."))]
    ),
    "placeholder in the text": dict(messages=[user(text("<image> here"), IMAGE)]),
    "too many placeholders in the text": dict(messages=[user(text("<image><image>"), IMAGE)]),
    "image in a tool's answer": dict(
        messages=[
            user("Go"),
            assistant("", tool_calls=[call("a", "{}")]),
            {"role": "tool", "tool_call_id": "call_1", "content": [text("B"), IMAGE]},
        ]
    ),
}

# Prompts of plain completions: the tokenizer's post-processor adds special tokens.
COMPLETIONS = [
    "",
    "Hello",
    " leading space",
    "the quick brown fox\n\n",
    ODD_TEXT,
    "a <|im_end|></s> b",
    "<added> x<added>y <extra> z<unknown>",
    "don't   stop!!  1234567",
    "\u200d\ufe0f ﬁ ½",
    "I'm HE'LL we'Re\r\n\r\n  x\t\ty  \n z\u3000 \u00a0e\u0301٣4Ⅷ..!?\n\n",
    "ÅA\u030a 한글 नमस्ते ไทย",
]
