#!/usr/bin/env python3
"""Golden parses for crates/chiasm-parse: what vLLM makes of whole answers, and how it holds models to their tool calls.

usage: make_parse_goldens.py MISTRAL_MODEL [OUTDIR]      default: crates/chiasm-parse/tests/goldens of this checkout

MISTRAL_MODEL is the tiny model with a tekken.json, as python/models/make_tiny_models.py writes it. Parsers are composed as the
server composes them, get a real request, and `parse` an answer at once. Their streaming is not asked: it gives other results.
Needs vLLM (the CPU build will do); no weights, no network.

A golden of parse.json is one answer: `tokens` (their texts), `text` (what the detokenizer gives of them, where it leaves special
tokens out), the request's `tools` by name (null: none), `chat_template_kwargs`, and where they are not the usual ones `tool_choice`
("auto"), `skip_special_tokens` (the parser's) and `prompt` (its end, told to the parser as the server does); then what `parse`
returned, or the type of what it raised. `content` and `tool_calls` are not yet what a response has: the server drops all calls but
those it was asked for. structural_tags.json has what `adjust_request` holds the answer to: `held_to` names the key that has it.
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

os.environ.update(VLLM_TARGET_DEVICE="cpu", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="CRITICAL")

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
ALONE = [("qwen3", "qwen3"), ("deepseek_r1", "deepseek_v3"), ("deepseek_v3", "deepseek_v3"), ("deepseek_v4", "deepseek_v32"),
         ("glm45", "glm45"), ("kimi_k2", "kimi_k2"), ("minimax_m2", "minimax_m2"), ("minimax_m2_append_think", "minimax_m2"),
         ("step3", "step3"), ("mistral", "mistral_v13"), ("mistral", "mistral_v11"), ("mistral", "mistral_hf_v13"),
         ("mistral", "mistral_hf_v3"), ("gemma4", "gemma4"), ("holo2", "deepseek_v3"), ("step5", "qwen3"), ("seed_oss", "seed_oss"),
         ("step3p5", "qwen3"), ("nemotron_v3", "qwen3"), ("ling3", "glm45")]
# How models open and close reasoning, by tokenizer; step3 has no format here.
TAGS = {format.tokenizer: format.think for format in [*FORMATS.values(), VARIANTS["seed_oss"]]}
# Whose arguments vLLM hands on whatever the schema says.
UNTYPED = ("hermes", "llama3_json", "llama4_pythonic", "pythonic", "mistral_old", "deepseek_v3", "deepseek_v31")


class Parsers:
    """Parsers as the server composes them, and requests as it takes them."""

    def __init__(self, tokenizers):
        self.tokenizers = tokenizers

    def request(self, tools, tool_choice, template, **more):
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": template} | more
        if tools is not None:
            body |= {"tools": copy.deepcopy(tool_lists.TOOLS[tools]), "tool_choice": tool_choice}
        return ChatCompletionRequest.model_validate(body)

    def parser(self, tokenizer, tool_parser, reasoning_parser, request):
        parser = ParserManager.get_parser(tool_parser, reasoning_parser, enable_auto_tools=True)
        template = request.build_chat_params(None, "auto").chat_template_kwargs
        # Which calls get the ids of Kimi depends on the model.
        model = SimpleNamespace(hf_config=SimpleNamespace(model_type=tokenizer)) if tokenizer == "kimi_k2" else None
        return parser(self.tokenizers[tokenizer], request.tools, chat_template_kwargs=template, model_config=model)

    def adjusted(self, tokenizer, parser, request):
        """The request as it is after the parser has seen it, under the conditions of OnlineRenderer.preprocess_chat."""
        tokenizer, kind = self.tokenizers[tokenizer], type(parser)
        grammar = is_mistral_tool_parser(kind.tool_parser_cls) and is_mistral_tokenizer(tokenizer) and tokenizer.supports_grammar
        if kind.reasoning_parser_cls is not None or request.tool_choice != "none" or grammar:
            return parser.adjust_request(request)
        return request

    def golden(self, tokenizer, tool_parser, reasoning_parser, case, text, *, tools="all", tool_choice="auto", template=None,
               prompt=None, skip_special=None):
        """One line of parse.json."""
        used = self.tokenizers[tokenizer]
        ids = tiny_tokenizers.encode(used, text)
        tokens = tiny_tokenizers.pieces(used, ids)
        assert "".join(tokens) == text, (tokenizer, text, tokens)
        tools = tools if tool_parser else None
        request = self.request(tools, tool_choice, template or {},
                               **({} if skip_special is None else {"skip_special_tokens": skip_special}))
        parser = self.parser(tokenizer, tool_parser, reasoning_parser, request)
        with contextlib.suppress(TypeError):  # of Mistral's grammars, see `asked_for`
            request = self.adjusted(tokenizer, parser, request)
        seen = tiny_tokenizers.shown(used, tokens, request.skip_special_tokens is not False)
        golden = {"tool_parser": tool_parser, "reasoning_parser": reasoning_parser, "tokenizer": tokenizer, "case": case,
                  "tools": tools, "chat_template_kwargs": template or {}}
        golden |= {"tool_choice": tool_choice} if tool_choice != "auto" else {}
        golden |= {"skip_special_tokens": skip_special} if skip_special is not None else {}
        golden |= {"prompt": prompt} if prompt is not None else {}
        golden |= {"tokens": tokens} | ({"text": seen} if seen != text else {})
        if prompt is not None:
            parser.set_prompt_token_ids(tiny_tokenizers.encode(used, prompt))
        return golden | parsed(parser, seen, request, ids, with_ids=tool_parser == "kimi_k2")


def parsed(parser, text, request, ids, with_ids):
    try:
        reasoning, content, calls = parser.parse(text, request, enable_auto_tools=True, model_output_token_ids=ids)
        if calls is not None:
            calls = [{"name": call.name, "arguments": call.arguments} | ({"id": call.id} if with_ids else {}) for call in calls]
        answer = {"reasoning": reasoning, "content": content, "tool_calls": calls}
        json.dumps(answer, ensure_ascii=False).encode()  # as the server does; fails for half a surrogate pair
        return answer
    except Exception as error:
        return {"raises": type(error).__name__}


def tool_goldens(parsers, name, format):
    """A tool parser alone."""
    ask = lambda case, text, **more: parsers.golden(format.tokenizer, format.tool_parser, None, case, text, **more)
    asked = [*cases.text_cases(format)]
    if name not in UNTYPED:
        asked += cases.typed_cases(format)
    if format.json:
        asked += cases.json_cases(format)
    asked += [(f"own-{at}", text) for at, text in enumerate(own_cases.OWN.get(name, []))]
    for case, text in asked:
        yield ask(case, text)
    one = format.calls(cases.WEATHER)
    foreign = parsers.tokenizers[format.tokenizer].all_special_tokens[0]
    yield ask("special-token", f"a{foreign}b {one}{foreign} c")
    yield ask("special-token-in-string", format.calls(("write_file", {"path": "a", "content": f"x{foreign}y"})))
    yield ask("special-tokens-shown", f"a{foreign}b {one}{foreign} c", skip_special=False)
    yield ask("markers-shown", f"{format.markers[0]}{one}", skip_special=False)
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice in ("none", "required", named):
        label = choice if choice in ("none", "required") else "named"
        for case, text in choice_texts(format, one):
            yield ask(f"{label}-{case}", text, tool_choice=choice)
    for case, text in [("one", one), ("text-around", f"Hm.\n{one}\nSo."), ("typed", format.calls(("set_values", {"count": "5"})))]:
        yield ask(f"no-tools-{case}", text, tools=None)
    yield ask("other-tools", format.calls(cases.WEATHER, ("now", {})), tools="one")
    for at, text in enumerate(["<think>\nhm\n</think>\n\nHello.", f"<think>hm</think>{one}", f"<think>hm{one}"]):
        yield ask(f"think-{at}", text.replace("<think>", format.think[0]).replace("</think>", format.think[1]))
    yield ask("thinking-off", f"{format.think[0]}hm{format.think[1]}{one}", template={"enable_thinking": False, "thinking": False})


def variant_goldens(parsers, format):
    """A tool parser that reads another one's format."""
    ask = lambda case, text: parsers.golden(format.tokenizer, format.tool_parser, None, case, text)
    for case, text in [*cases.text_cases(format), *cases.typed_cases(format)]:
        yield ask(case, text)


def choice_texts(format, one):
    """Answers to requests that force calls: in the model's format, and as the JSON that vLLM asks for where it has no grammar."""
    yield "call", one
    yield "text", "Hello, world."
    yield "text-call", f"Hm. {one}"
    yield "empty", ""
    yield "white", " \n"
    yield "array", '[{"name": "get_weather", "parameters": {"city": "Paris"}}, {"name": "now", "parameters": {}}]'
    yield "array-arguments", '[{"name": "get_weather", "arguments": {"city": "Paris"}}]'
    yield "array-white", '\n[ {"parameters": {"city": "é"},\n "name": "get_weather"} ] '
    yield "array-cut", '[{"name": "get_weather", "parameters": {"city": "Par'
    yield "object", '{"city": "Paris", "ratio":1.0}'


def reasoning_goldens(parsers, name, tokenizer, format):
    """A reasoning parser, alone or before the tool parser of `format`."""
    tool_parser = format.tool_parser if format else None
    start, end = format.think if format else TAGS.get(tokenizer, ("<think>", "</think>"))
    ask = lambda case, text, **more: parsers.golden(tokenizer, tool_parser, name, case, text, **more)
    asked = dict(reasoning_cases.text_cases(start, end))
    if format:
        asked |= dict(reasoning_cases.call_cases(format, start, end))
    for case, text in asked.items():
        yield ask(case, text)
    foreign = parsers.tokenizers[tokenizer].all_special_tokens[0]
    yield ask("special-token", f"{start}a{foreign}b{end}c{foreign}d")
    for at, template in enumerate(reasoning_cases.TEMPLATES):
        for case in reasoning_cases.AGAIN:
            if case in asked:
                yield ask(f"{case}-template-{at}", asked[case], template=template)
    for prompt, text in reasoning_cases.prompts(tokenizer, start, end):
        for case in reasoning_cases.PROMPTED:
            if case in asked:
                yield ask(f"{case}-prompt-{prompt}", asked[case], prompt=text)
    if format:
        yield ask("think-call-choice-none", asked["think-call"], tool_choice="none")
        yield ask("think-call-choice-required", asked["think-call"], tool_choice="required")
        yield ask("think-array-choice-required", f'{start}hm{end}[{{"name": "now", "parameters": {{}}}}]', tool_choice="required")
        yield ask("unclosed-choice-required", f"{start}hm", tool_choice="required")


def goldens(parsers):
    for name, format in FORMATS.items():
        if name != "mistral_v11":  # differs in reasoning alone
            yield from tool_goldens(parsers, name, format)
    for format in VARIANTS.values():
        yield from variant_goldens(parsers, format)
    for name, tokenizer in ALONE:
        yield from reasoning_goldens(parsers, name, tokenizer, None)
    for format in FORMATS.values():
        for name in format.reasoning:
            yield from reasoning_goldens(parsers, name, format.tokenizer, format)


def asked_for(parsers):
    """What each pair of parsers makes of `skip_special_tokens`, which stays null, and so true, where they don't ask for a value."""
    pairs = [(format.tool_parser, None, format.tokenizer) for format in FORMATS.values()]
    pairs += [(None, name, tokenizer) for name, tokenizer in ALONE]
    pairs += [(format.tool_parser, name, format.tokenizer) for format in FORMATS.values() for name in format.reasoning]
    for tool_parser, reasoning_parser, tokenizer in pairs:
        row = {"tool_parser": tool_parser, "reasoning_parser": reasoning_parser, "tokenizer": tokenizer}
        for label, tools, choice in [("auto", "all", "auto"), ("none", "all", "none"), ("no_tools", None, None)]:
            request = parsers.request(tools if tool_parser else None, choice, {})
            parser = parsers.parser(tokenizer, tool_parser, reasoning_parser, request)
            try:
                row[label] = parsers.adjusted(tokenizer, parser, request).skip_special_tokens
            except TypeError as error:
                # vLLM 0.33 calls mistral_common's grammar factory otherwise than mistral_common 1.13.1 wants to be called.
                row[label] = {"raises": type(error).__name__}
        yield row


def write(path, head, rows):
    """One row a line, so that a change can be read."""
    parts = [f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in head.items()]
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
    described = {name: tiny_tokenizers.described(name, tokenizer) for name, tokenizer in parsers.tokenizers.items()}
    aliases = {alias: format.tool_parser for format in FORMATS.values() for alias in format.aliases}
    for alias, name in aliases.items():
        assert ToolParserManager.get_tool_parser(alias) is ToolParserManager.get_tool_parser(name), alias
    asked = list(goldens(parsers))
    names = [(row["tool_parser"], row["reasoning_parser"], row["tokenizer"], row["case"]) for row in asked]
    assert len(set(names)) == len(names), "the name of a case says which"
    write(out / "parse.json", {"versions": versions, "aliases": aliases, "tokenizers": described, "tools": tool_lists.TOOLS},
          {"skip_special_tokens": list(asked_for(parsers)), "goldens": asked})
    rows = structural_tags.rows(parsers, FORMATS | VARIANTS)
    write(out / "structural_tags.json",
          {"versions": versions | {"xgrammar": metadata.version("xgrammar")}, "tools": tool_lists.TOOLS},
          {"constraints": rows})


if __name__ == "__main__":
    main()
