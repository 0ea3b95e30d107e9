"""The syntax of tool calls in each format, for the same cases in all formats."""

import json
from dataclasses import dataclass, replace
from typing import Callable

# A placeholder in a call for its index among the calls.
NUMBER = "\0"


@dataclass(frozen=True)
class Format:
    """One syntax of tool calls.

    `call` formats one call from its name and arguments, `bare_call` one without arguments. `end`
    closes one call; `block_tags` enclose all calls. `markers` are the strings with a meaning to the
    parser.
    """

    tool_parser: str
    tokenizer: str
    call: Callable
    bare_call: Callable
    end: str
    markers: list
    block_tags: tuple = ("", "")
    separator: str = ""
    # A separator with additional white space.
    white_separator: str = "\n \n"
    # The part of a call that is JSON: "call" for an object with the name, "arguments", or "".
    json: str = ""
    # The format's own reasoning parsers, and the tags around the models' reasoning.
    reasoning: tuple = ()
    reasoning_tags: tuple = ("<think>", "</think>")
    # vLLM's other names of the same tool parser.
    aliases: tuple = ()

    def calls(self, *calls, separator=None):
        """Formats several calls (name, arguments) with the tags around them."""
        pieces = [
            self.bare_call(name) if arguments is None else self.call(name, arguments)
            for name, arguments in calls
        ]
        pieces = [piece.replace(NUMBER, str(at)) for at, piece in enumerate(pieces)]
        return (
            self.block_tags[0]
            + (self.separator if separator is None else separator).join(pieces)
            + self.block_tags[1]
        )


def as_json(value):
    """Returns the value as JSON like models write it; a string is JSON already."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def as_text(value):
    """Returns the value between tags: a string unchanged, everything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def hermes(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {as_json(arguments)}}}\n</tool_call>'


def llama(name, arguments):
    return f'{{"name": "{name}", "parameters": {as_json(arguments)}}}'


def pythonic(name, arguments):
    given = (
        f"{key}={value if isinstance(value, Raw) else repr(value)}"
        for key, value in arguments.items()
    )
    return f"{name}({', '.join(given)})"


class Raw(str):
    """Text that is used for an argument unchanged."""


def qwen3_coder(name, arguments):
    given = "".join(
        f"<parameter={key}>\n{as_text(value)}\n</parameter>\n" for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{given}</function>\n</tool_call>"


def gemma4_value(value):
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma4_value(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(gemma4_value, value)) + "]"
    return json.dumps(value)


def gemma4(name, arguments):
    return f"<|tool_call>call:{name}{gemma4_value(arguments)}<tool_call|>"


def functiongemma(name, arguments):
    given = ",".join(f"{key}:<escape>{as_text(value)}<escape>" for key, value in arguments.items())
    return f"<start_function_call>call:{name}{{{given}}}<end_function_call>"


def deepseek_v3(name, arguments):
    return (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{as_json(arguments)}\n"
        "```<｜tool▁call▁end｜>"
    )


def deepseek_v31(name, arguments):
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{as_json(arguments)}<｜tool▁call▁end｜>"


def dsml(name, arguments):
    given = "".join(
        f'<｜DSML｜parameter name="{key}" string="{"true" if type(value) is str else "false"}">'
        f"{as_text(value)}</｜DSML｜parameter>\n"
        for key, value in arguments.items()
    )
    return f'<｜DSML｜invoke name="{name}">\n{given}</｜DSML｜invoke>'


def kimi_k2(name, arguments):
    return (
        f"<|tool_call_begin|>functions.{name}:{NUMBER}<|tool_call_argument_begin|>"
        f"{as_json(arguments)}<|tool_call_end|>"
    )


def glm45(name, arguments):
    given = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{as_text(value)}</arg_value>\n"
        for key, value in arguments.items()
    )
    return f"<tool_call>{name}\n{given}</tool_call>"


def minimax_m2(name, arguments):
    given = "".join(
        f'<parameter name="{key}">{as_text(value)}</parameter>\n'
        for key, value in arguments.items()
    )
    return f'<invoke name="{name}">\n{given}</invoke>'


def mistral(name, arguments):
    return f"[TOOL_CALLS]{name}[ARGS]{as_json(arguments)}"


def mistral_old(name, arguments):
    return f'{{"name": "{name}", "arguments": {as_json(arguments)}}}'


def no_parameters(name):
    return f'{{"name": "{name}"}}'


def dsml_format(version, block, reasoning):
    markers = [
        f"<｜DSML｜{block}>",
        f"</｜DSML｜{block}>",
        '<｜DSML｜invoke name="',
        "</｜DSML｜invoke>",
        "<｜DSML｜parameter",
        "</｜DSML｜parameter>",
        '">',
    ]
    return Format(
        version,
        "deepseek_v32",
        dsml,
        lambda name: dsml(name, {}),
        "</｜DSML｜invoke>",
        markers,
        (f"<｜DSML｜{block}>\n", f"\n</｜DSML｜{block}>"),
        "\n",
        reasoning=reasoning,
    )


def mistral_format(tokenizer, reasoning_tags, reasoning=("mistral",)):
    return Format(
        "mistral",
        tokenizer,
        mistral,
        lambda name: mistral(name, ""),
        "",
        ["[TOOL_CALLS]", "[ARGS]"],
        white_separator="\n",
        json="arguments",
        reasoning=reasoning,
        reasoning_tags=reasoning_tags,
    )


BLOCK = ["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"]
CALL = ["<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"]
KIMI = [
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
]
FORMATS = {
    "hermes": Format(
        "hermes",
        "qwen3",
        hermes,
        lambda name: f"<tool_call>\n{no_parameters(name)}\n</tool_call>",
        "\n</tool_call>",
        ["<tool_call>", "</tool_call>"],
        separator="\n",
        json="call",
        reasoning=("qwen3",),
        aliases=("qwen3_json",),
    ),
    "qwen3_coder": Format(
        "qwen3_coder",
        "qwen3",
        qwen3_coder,
        lambda name: qwen3_coder(name, {}),
        "\n</tool_call>",
        [
            "<tool_call>",
            "</tool_call>",
            "<function=",
            "</function>",
            "<parameter=",
            "</parameter>",
            ">",
        ],
        separator="\n",
        reasoning=("qwen3",),
        aliases=("qwen3_xml",),
    ),
    "llama3_json": Format(
        "llama3_json",
        "llama3",
        llama,
        no_parameters,
        "}",
        ["<|python_tag|>", ";"],
        separator="; ",
        white_separator="\n",
        json="call",
        reasoning=("deepseek_r1",),
        aliases=("llama4_json",),
    ),
    "llama4_pythonic": Format(
        "llama4_pythonic",
        "llama4",
        pythonic,
        lambda name: f"{name}()",
        ")",
        ["<|python_start|>", "<|python_end|>", ")]"],
        ("[", "]"),
        ", ",
        ",\n ",
    ),
    "pythonic": Format(
        "pythonic",
        "llama4",
        pythonic,
        lambda name: f"{name}()",
        ")",
        [")]"],
        ("[", "]"),
        ", ",
        ",\n ",
    ),
    "mistral": mistral_format("mistral_v13", ("[THINK]", "[/THINK]")),
    "mistral_v11": mistral_format("mistral_v11", ("<think>", "</think>")),
    "mistral_hf": mistral_format("mistral_hf_v13", ("[THINK]", "[/THINK]"), ()),
    "mistral_old": Format(
        "mistral",
        "mistral_hf_v3",
        mistral_old,
        no_parameters,
        "}",
        ["[TOOL_CALLS]"],
        ("[TOOL_CALLS][", "]"),
        ", ",
        ",\n",
        json="call",
    ),
    "gemma4": Format(
        "gemma4",
        "gemma4",
        gemma4,
        lambda name: f"<|tool_call>call:{name}<tool_call|>",
        "<tool_call|>",
        ["<|tool_call>", "<tool_call|>", "call:", "<|channel>", "<channel|>"],
        reasoning=("gemma4",),
        reasoning_tags=("<|channel>thought\n", "<channel|>"),
    ),
    "functiongemma": Format(
        "functiongemma",
        "functiongemma",
        functiongemma,
        lambda name: functiongemma(name, {}),
        "<end_function_call>",
        ["<start_function_call>", "<end_function_call>", "<escape>"],
    ),
    "deepseek_v3": Format(
        "deepseek_v3",
        "deepseek_v3",
        deepseek_v3,
        lambda name: deepseek_v3(name, ""),
        "<｜tool▁call▁end｜>",
        [*BLOCK, *CALL, "\n```"],
        (BLOCK[0], BLOCK[1]),
        "\n",
        json="arguments",
        reasoning=("deepseek_r1",),
    ),
    "deepseek_v31": Format(
        "deepseek_v31",
        "deepseek_v3",
        deepseek_v31,
        lambda name: deepseek_v31(name, ""),
        "<｜tool▁call▁end｜>",
        [*BLOCK, *CALL],
        (BLOCK[0], BLOCK[1]),
        json="arguments",
        reasoning=("deepseek_v3",),
    ),
    "deepseek_v32": dsml_format("deepseek_v32", "function_calls", ("deepseek_v3",)),
    "deepseek_v4": dsml_format("deepseek_v4", "tool_calls", ("deepseek_v4",)),
    "kimi_k2": Format(
        "kimi_k2",
        "kimi_k2",
        kimi_k2,
        lambda name: kimi_k2(name, ""),
        "<|tool_call_end|>",
        KIMI,
        (KIMI[0], KIMI[1]),
        json="arguments",
        reasoning=("kimi_k2",),
    ),
    "glm45": Format(
        "glm45",
        "glm45",
        glm45,
        lambda name: glm45(name, {}),
        "\n</tool_call>",
        ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
        separator="\n",
        reasoning=("glm45",),
        aliases=("glm47",),
    ),
    "minimax_m2": Format(
        "minimax_m2",
        "minimax_m2",
        minimax_m2,
        lambda name: minimax_m2(name, {}),
        "</invoke>",
        [
            "<minimax:tool_call>",
            "</minimax:tool_call>",
            '<invoke name="',
            "</invoke>",
            "<parameter name=",
            "</parameter>",
        ],
        ("<minimax:tool_call>\n", "\n</minimax:tool_call>"),
        "\n",
        reasoning=("minimax_m2", "minimax_m2_append_think"),
    ),
}


def with_renamed_tags(format, tool_parser, tokenizer, old, new, **more):
    """Returns a format with other tags: names that begin with `old` begin with `new` instead."""
    rename = lambda text: text.replace(f"<{old}", f"<{new}").replace(f"</{old}", f"</{new}")
    return replace(
        format,
        tool_parser=tool_parser,
        tokenizer=tokenizer,
        call=lambda *call: rename(format.call(*call)),
        bare_call=lambda name: rename(format.bare_call(name)),
        end=rename(format.end),
        markers=[rename(marker) for marker in format.markers],
        reasoning=(),
        aliases=(),
        **more,
    )


# Separate parsers in vLLM for a format above, or for one with other tags. They get fewer cases.
VARIANTS = {
    "longcat": with_renamed_tags(
        FORMATS["hermes"], "longcat", "longcat", "tool_call", "longcat_tool_call"
    ),
    "seed_oss": with_renamed_tags(
        FORMATS["qwen3_coder"],
        "seed_oss",
        "seed_oss",
        "tool_call",
        "seed:tool_call",
        reasoning_tags=("<seed:think>", "</seed:think>"),
    ),
    "step3p5": replace(FORMATS["qwen3_coder"], tool_parser="step3p5", reasoning=(), aliases=()),
    "step5": replace(FORMATS["qwen3_coder"], tool_parser="step5", reasoning=(), aliases=()),
    "ling3": replace(FORMATS["glm45"], tool_parser="ling3", reasoning=(), aliases=()),
}
