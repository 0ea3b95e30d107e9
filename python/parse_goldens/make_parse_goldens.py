#!/usr/bin/env python3
"""Writes goldens for crates/chiasm-parse: vLLM's results for whole answers, and its constraints.

usage: make_parse_goldens.py MISTRAL_MODEL [OUTDIR]

MISTRAL_MODEL is the tiny model with a tekken.json from python/models/make_tiny_models.py. The
default for OUTDIR is crates/chiasm-parse/tests/goldens of this checkout. The script composes
parsers as the server does, gives them a real request, and calls `parse` with a whole answer.
Streaming is not recorded, because it gives other results. Needs vLLM, but no GPU, no weights and no
network.

A golden in parse.json is one answer:

- `tokens`: the texts of the tokens
- `text`: the detokenizer's output, if that drops special tokens
- `tools`: the name of the request's tools, or null
- `chat_template_kwargs`
- `tool_choice`, if not "auto"
- `skip_special_tokens`, if not the parser's
- `prompt`: the end of the prompt, if the parser gets it, as in the server
- the result of `parse`, or the type of its exception

`content` and `tool_calls` differ from a response's: the server drops calls that were not requested.
structural_tags.json has the constraints that `adjust_request` sets; `held_to` is the key that has
the constraint.
"""

import contextlib
import copy
import json
import logging
import os
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

os.environ.update(
    VLLM_TARGET_DEVICE="cpu",
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="CRITICAL",
)

import tokenizers
import transformers
import vllm
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser.parser_manager import ParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.utils.mistral import is_mistral_tokenizer, is_mistral_tool_parser

import cases
import own_cases
import reasoning_cases
import structural_tags
import tiny_tokenizers
import tool_lists
from formats import FORMATS, VARIANTS

# Reasoning parsers with no tool parser, and their tokenizers.
REASONING_PARSERS = [
    ("qwen3", "qwen3"),
    ("deepseek_r1", "deepseek_v3"),
    ("deepseek_v3", "deepseek_v3"),
    ("deepseek_v4", "deepseek_v32"),
    ("glm45", "glm45"),
    ("kimi_k2", "kimi_k2"),
    ("minimax_m2", "minimax_m2"),
    ("minimax_m2_append_think", "minimax_m2"),
    ("step3", "step3"),
    ("mistral", "mistral_v13"),
    ("mistral", "mistral_v11"),
    ("mistral", "mistral_hf_v13"),
    ("mistral", "mistral_hf_v3"),
    ("gemma4", "gemma4"),
    ("holo2", "deepseek_v3"),
    ("step5", "qwen3"),
    ("seed_oss", "seed_oss"),
    ("step3p5", "qwen3"),
    ("nemotron_v3", "qwen3"),
    ("ling3", "glm45"),
]
# The tags around reasoning, by tokenizer; step3 has no format here.
REASONING_TAGS = {
    format.tokenizer: format.reasoning_tags for format in [*FORMATS.values(), VARIANTS["seed_oss"]]
}
# Formats whose arguments vLLM passes on regardless of the schema.
UNTYPED_FORMATS = (
    "hermes",
    "llama3_json",
    "llama4_pythonic",
    "pythonic",
    "mistral_old",
    "deepseek_v3",
    "deepseek_v31",
)


class Parsers:
    """Creates parsers and requests as the server does."""

    def __init__(self, tokenizers):
        self.tokenizers = tokenizers

    def request(self, tools, tool_choice, template, **more):
        body = {
            "model": "m",
            "messages": [{"role": "user", "content": "hi"}],
            "chat_template_kwargs": template,
        } | more
        if tools is not None:
            body |= {"tools": copy.deepcopy(tool_lists.TOOLS[tools]), "tool_choice": tool_choice}
        return ChatCompletionRequest.model_validate(body)

    def parser(self, tokenizer, tool_parser, reasoning_parser, request):
        parser = ParserManager.get_parser(tool_parser, reasoning_parser, enable_auto_tools=True)
        template = request.build_chat_params(None, "auto").chat_template_kwargs
        # Ids of calls in Kimi's form depend on the model.
        model = (
            SimpleNamespace(hf_config=SimpleNamespace(model_type=tokenizer))
            if tokenizer == "kimi_k2"
            else None
        )
        return parser(
            self.tokenizers[tokenizer],
            request.tools,
            chat_template_kwargs=template,
            model_config=model,
        )

    def adjust_request(self, tokenizer, parser, request):
        """Returns the request after the parser's changes.

        The parser changes it under the conditions of OnlineRenderer.preprocess_chat.
        """
        tokenizer = self.tokenizers[tokenizer]
        kind = type(parser)
        grammar = (
            is_mistral_tool_parser(kind.tool_parser_cls)
            and is_mistral_tokenizer(tokenizer)
            and tokenizer.supports_grammar
        )
        if kind.reasoning_parser_cls is not None or request.tool_choice != "none" or grammar:
            return parser.adjust_request(request)
        return request

    def golden(
        self,
        tokenizer,
        tool_parser,
        reasoning_parser,
        case,
        text,
        *,
        tools="all",
        tool_choice="auto",
        template=None,
        prompt=None,
        skip_special=None,
    ):
        """Returns one line of parse.json."""
        encoder = self.tokenizers[tokenizer]
        ids = tiny_tokenizers.encode(encoder, text)
        tokens = tiny_tokenizers.token_texts(encoder, ids)
        assert "".join(tokens) == text, (tokenizer, text, tokens)
        tools = tools if tool_parser else None
        request = self.request(
            tools,
            tool_choice,
            template or {},
            **({} if skip_special is None else {"skip_special_tokens": skip_special}),
        )
        parser = self.parser(tokenizer, tool_parser, reasoning_parser, request)
        # From Mistral's grammars: see `skip_special_tokens_rows`.
        with contextlib.suppress(TypeError):
            request = self.adjust_request(tokenizer, parser, request)
        detokenized = tiny_tokenizers.detokenize(
            encoder, tokens, request.skip_special_tokens is not False
        )
        golden = {
            "tool_parser": tool_parser,
            "reasoning_parser": reasoning_parser,
            "tokenizer": tokenizer,
            "case": case,
            "tools": tools,
            "chat_template_kwargs": template or {},
        }
        golden |= {"tool_choice": tool_choice} if tool_choice != "auto" else {}
        golden |= {"skip_special_tokens": skip_special} if skip_special is not None else {}
        golden |= {"prompt": prompt} if prompt is not None else {}
        golden |= {"tokens": tokens} | ({"text": detokenized} if detokenized != text else {})
        if prompt is not None:
            parser.set_prompt_token_ids(tiny_tokenizers.encode(encoder, prompt))
        return golden | parse_answer(
            parser, detokenized, request, ids, with_ids=tool_parser == "kimi_k2"
        )


def parse_answer(parser, text, request, ids, with_ids):
    """Returns the result of `parse`, or the type of its exception."""
    try:
        reasoning, content, calls = parser.parse(
            text, request, enable_auto_tools=True, model_output_token_ids=ids
        )
        if calls is not None:
            calls = [
                {"name": call.name, "arguments": call.arguments}
                | ({"id": call.id} if with_ids else {})
                for call in calls
            ]
        answer = {"reasoning": reasoning, "content": content, "tool_calls": calls}
        # As the server does; fails for half a surrogate pair.
        json.dumps(answer, ensure_ascii=False).encode()
        return answer
    except Exception as error:
        return {"raises": type(error).__name__}


def tool_goldens(parsers, name, format):
    """Yields the goldens of a tool parser without a reasoning parser."""
    golden = lambda case, text, **more: parsers.golden(
        format.tokenizer, format.tool_parser, None, case, text, **more
    )
    answers = [*cases.text_cases(format)]
    if name not in UNTYPED_FORMATS:
        answers += cases.typed_cases(format)
    if format.json:
        answers += cases.json_cases(format)
    answers += [(f"own-{at}", text) for at, text in enumerate(own_cases.OWN_CASES.get(name, []))]
    for case, text in answers:
        yield golden(case, text)
    one = format.calls(cases.WEATHER)
    special_token = parsers.tokenizers[format.tokenizer].all_special_tokens[0]
    yield golden("special-token", f"a{special_token}b {one}{special_token} c")
    yield golden(
        "special-token-in-string",
        format.calls(("write_file", {"path": "a", "content": f"x{special_token}y"})),
    )
    yield golden(
        "special-tokens-shown", f"a{special_token}b {one}{special_token} c", skip_special=False
    )
    yield golden("markers-shown", f"{format.markers[0]}{one}", skip_special=False)
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice in ("none", "required", named):
        label = choice if choice in ("none", "required") else "named"
        for case, text in choice_texts(format, one):
            yield golden(f"{label}-{case}", text, tool_choice=choice)
    for case, text in [
        ("one", one),
        ("text-around", f"Hm.\n{one}\nSo."),
        ("typed", format.calls(("set_values", {"count": "5"}))),
    ]:
        yield golden(f"no-tools-{case}", text, tools=None)
    yield golden("other-tools", format.calls(cases.WEATHER, ("now", {})), tools="one")
    for at, text in enumerate(
        ["<think>\nhm\n</think>\n\nHello.", f"<think>hm</think>{one}", f"<think>hm{one}"]
    ):
        yield golden(
            f"think-{at}",
            text.replace("<think>", format.reasoning_tags[0]).replace(
                "</think>", format.reasoning_tags[1]
            ),
        )
    yield golden(
        "thinking-off",
        f"{format.reasoning_tags[0]}hm{format.reasoning_tags[1]}{one}",
        template={"enable_thinking": False, "thinking": False},
    )


def variant_goldens(parsers, format):
    """Yields the goldens of a tool parser for another parser's format."""
    golden = lambda case, text: parsers.golden(
        format.tokenizer, format.tool_parser, None, case, text
    )
    for case, text in [*cases.text_cases(format), *cases.typed_cases(format)]:
        yield golden(case, text)


def choice_texts(format, one):
    """Yields answers to requests that force calls.

    They are in the model's format, and in the JSON that vLLM requires where it has no grammar.
    """
    yield "call", one
    yield "text", "Hello, world."
    yield "text-call", f"Hm. {one}"
    yield "empty", ""
    yield "white", " \n"
    yield (
        "array",
        (
            '[{"name": "get_weather", "parameters": {"city": "Paris"}}'
            ', {"name": "now", "parameters": {}}]'
        ),
    )
    yield "array-arguments", '[{"name": "get_weather", "arguments": {"city": "Paris"}}]'
    yield "array-white", '\n[ {"parameters": {"city": "é"},\n "name": "get_weather"} ] '
    yield "array-cut", '[{"name": "get_weather", "parameters": {"city": "Par'
    yield "object", '{"city": "Paris", "ratio":1.0}'


def reasoning_goldens(parsers, name, tokenizer, format):
    """Yields the goldens of a reasoning parser, alone or before the tool parser of `format`."""
    tool_parser = format.tool_parser if format else None
    start, end = (
        format.reasoning_tags if format else REASONING_TAGS.get(tokenizer, ("<think>", "</think>"))
    )
    golden = lambda case, text, **more: parsers.golden(
        tokenizer, tool_parser, name, case, text, **more
    )
    answers = dict(reasoning_cases.text_cases(start, end))
    if format:
        answers |= dict(reasoning_cases.call_cases(format, start, end))
    for case, text in answers.items():
        yield golden(case, text)
    special_token = parsers.tokenizers[tokenizer].all_special_tokens[0]
    yield golden("special-token", f"{start}a{special_token}b{end}c{special_token}d")
    for at, template in enumerate(reasoning_cases.TEMPLATES):
        for case in reasoning_cases.TEMPLATE_CASES:
            if case in answers:
                yield golden(f"{case}-template-{at}", answers[case], template=template)
    for prompt, text in reasoning_cases.prompts(tokenizer, start, end):
        for case in reasoning_cases.PROMPT_CASES:
            if case in answers:
                yield golden(f"{case}-prompt-{prompt}", answers[case], prompt=text)
    if format:
        yield golden("think-call-choice-none", answers["think-call"], tool_choice="none")
        yield golden("think-call-choice-required", answers["think-call"], tool_choice="required")
        yield golden(
            "think-array-choice-required",
            f'{start}hm{end}[{{"name": "now", "parameters": {{}}}}]',
            tool_choice="required",
        )
        yield golden("unclosed-choice-required", f"{start}hm", tool_choice="required")


def goldens(parsers):
    for name, format in FORMATS.items():
        if name != "mistral_v11":  # differs in reasoning only
            yield from tool_goldens(parsers, name, format)
    for format in VARIANTS.values():
        yield from variant_goldens(parsers, format)
    for name, tokenizer in REASONING_PARSERS:
        yield from reasoning_goldens(parsers, name, tokenizer, None)
    for format in FORMATS.values():
        for name in format.reasoning:
            yield from reasoning_goldens(parsers, name, format.tokenizer, format)


def skip_special_tokens_rows(parsers):
    """Yields the `skip_special_tokens` that each pair of parsers sets.

    It stays null, which means true, if they do not set it.
    """
    pairs = [(format.tool_parser, None, format.tokenizer) for format in FORMATS.values()]
    pairs += [(None, name, tokenizer) for name, tokenizer in REASONING_PARSERS]
    pairs += [
        (format.tool_parser, name, format.tokenizer)
        for format in FORMATS.values()
        for name in format.reasoning
    ]
    for tool_parser, reasoning_parser, tokenizer in pairs:
        row = {
            "tool_parser": tool_parser,
            "reasoning_parser": reasoning_parser,
            "tokenizer": tokenizer,
        }
        for label, tools, choice in [
            ("auto", "all", "auto"),
            ("none", "all", "none"),
            ("no_tools", None, None),
        ]:
            request = parsers.request(tools if tool_parser else None, choice, {})
            parser = parsers.parser(tokenizer, tool_parser, reasoning_parser, request)
            try:
                row[label] = parsers.adjust_request(tokenizer, parser, request).skip_special_tokens
            except TypeError as error:
                # vLLM 0.33 calls mistral_common's grammar factory with arguments that
                # mistral_common 1.13.1 does not accept.
                row[label] = {"raises": type(error).__name__}
        yield row


def write_json(path, head, rows):
    """Writes JSON with one row per line, for readable diffs."""
    parts = [
        f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in head.items()
    ]
    for key, values in rows.items():
        lines = ",\n".join(json.dumps(value, ensure_ascii=False) for value in values)
        parts.append(f"{json.dumps(key)}: [\n{lines}\n]")
    path.write_text("{" + ",\n".join(parts) + "}\n")


def main():
    logging.disable(logging.CRITICAL)
    root = Path(__file__).resolve().parents[2]
    out = Path(sys.argv[2]) if len(sys.argv) > 2 else root / "crates/chiasm-parse/tests/goldens"
    out.mkdir(parents=True, exist_ok=True)
    parsers = Parsers(tiny_tokenizers.build(Path(sys.argv[1])))
    versions = {module.__name__: module.__version__ for module in (vllm, transformers, tokenizers)}
    descriptions = {
        name: tiny_tokenizers.describe(name, tokenizer)
        for name, tokenizer in parsers.tokenizers.items()
    }
    aliases = {alias: format.tool_parser for format in FORMATS.values() for alias in format.aliases}
    for alias, name in aliases.items():
        assert ToolParserManager.get_tool_parser(alias) is ToolParserManager.get_tool_parser(
            name
        ), alias
    answers = list(goldens(parsers))
    names = [
        (row["tool_parser"], row["reasoning_parser"], row["tokenizer"], row["case"])
        for row in answers
    ]
    assert len(set(names)) == len(names), "the names of the cases are not unique"
    write_json(
        out / "parse.json",
        {
            "versions": versions,
            "aliases": aliases,
            "tokenizers": descriptions,
            "tools": tool_lists.TOOLS,
        },
        {"skip_special_tokens": list(skip_special_tokens_rows(parsers)), "goldens": answers},
    )
    rows = structural_tags.rows(parsers, FORMATS | VARIANTS)
    write_json(
        out / "structural_tags.json",
        {
            "versions": versions | {"xgrammar": metadata.version("xgrammar")},
            "tools": tool_lists.TOOLS,
        },
        {"constraints": rows},
    )


if __name__ == "__main__":
    main()
