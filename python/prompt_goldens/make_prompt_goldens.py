#!/usr/bin/env python3
"""Writes golden prompts and texts for crates/chiasm-prompt, from vLLM's and transformers' own code.

usage: make_prompt_goldens.py [OUTDIR]

The default is crates/chiasm-prompt/tests/goldens of this checkout. Chat requests go through vLLM's
request class, its HfRenderer (content format, conversation, template), its tokenization and its
image processing. Small templates go through transformers' renderer only. Needs vLLM, but no GPU, no
weights and no network.
"""

import itertools
import json
import os
import shutil
import sys
from datetime import datetime
from pathlib import Path

os.environ.update(
    VLLM_TARGET_DEVICE="cpu",
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="ERROR",
)

import jinja2
import tokenizers
import transformers
import transformers.utils.chat_template_utils as hf_templates
import vllm
from vllm.config import ModelConfig, VllmConfig
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.renderers import hf as vllm_hf
from vllm.renderers.params import TokenizeParams
from vllm.renderers.registry import renderer_from_config

import conversations
import detection
import detokenization
import semantics
import tiny_models

# The models whose answers are decoded: one for each kind of tokenizer.
MODELS_WITH_ANSWERS = ("qwen2_vl", "llama2")
FIXED_NOW = datetime(2024, 7, 26, 13, 5, 9)


class FixedClock(datetime):
    """The clock of the templates: it always returns FIXED_NOW."""

    @classmethod
    def now(cls, tz=None):
        return FIXED_NOW


def render_chat(renderer, model_config, body):
    """Returns the prompt of one request, or vLLM's error."""
    try:
        request = ChatCompletionRequest.model_validate(dict(body, model="m"))
        tools = request.tools and [tool.model_dump() for tool in request.tools]
        params = request.build_chat_params(None, "auto").with_defaults(
            {"tools": tools, "tokenize": False}
        )
        _, prompt = renderer.render_messages(request.messages, params)
        tokens = renderer.tokenize_prompt(prompt, request.build_tok_params(model_config))
    except Exception as error:  # any refusal by vLLM
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    result = {"prompt": prompt["prompt"], "tokens": tokens["prompt_token_ids"]}
    if "multi_modal_data" in tokens:
        try:
            expanded = renderer.process_for_engine(tokens, 0.0)
        except AssertionError as error:  # a template that drops the image
            return dict(result, expansion_error=str(error).splitlines()[0])
        result["expanded"] = [
            [id, len(list(run))] for id, run in itertools.groupby(expanded["prompt_token_ids"])
        ]
        ranges = expanded["mm_placeholders"]["image"]
        assert all(place.is_embed is None for place in ranges)
        result["placeholders"] = [[place.offset, place.length] for place in ranges]
    return result


def model_goldens(path):
    """Returns all goldens of one model directory."""
    model_config = ModelConfig(model=str(path), dtype="float32", enforce_eager=True)
    renderer = renderer_from_config(VllmConfig(model_config=model_config))
    tokenizer = renderer.get_tokenizer()
    has_images = model_config.is_multimodal_model
    bodies = conversations.TEXT_REQUESTS | (conversations.IMAGE_REQUESTS if has_images else {})
    plain = TokenizeParams(max_total_tokens=8192, add_special_tokens=True)
    placeholder = model_class(model_config).get_placeholder_str("image", 1) if has_images else ""
    return {
        "content_format": vllm_hf.resolve_chat_template_content_format(
            None, None, "auto", tokenizer, model_config=model_config
        ),
        "image_text": placeholder,
        "eos_token_id": tokenizer.eos_token_id,
        "special_ids": sorted(
            id for id, token in tokenizer.added_tokens_decoder.items() if token.special
        ),
        "vocab_size": len(tokenizer),
        "chats": [
            dict(name=name, **render_chat(renderer, model_config, body))
            for name, body in bodies.items()
        ],
        "completions": [
            dict(
                text=text,
                tokens=renderer.tokenize_prompt({"prompt": text}, plain)["prompt_token_ids"],
            )
            for text in conversations.COMPLETIONS
        ],
    } | (
        {"answers": detokenization.cases(tokenizer, seed=path.name)}
        if path.name in MODELS_WITH_ANSWERS
        else {}
    )


def model_class(model_config):
    from vllm.model_executor.models import ModelRegistry

    return ModelRegistry.resolve_model_cls(model_config.architectures, model_config)[0]


def semantics_goldens():
    """Returns the texts of the small templates, or their errors."""
    out = []
    for template in semantics.TEMPLATES:
        case = {"template": template}
        try:
            rendered, _ = hf_templates.render_jinja_template(
                [[{"role": "user", "content": "hi"}]],
                chat_template=template,
                add_generation_prompt=True,
                **semantics.VARIABLES,
            )
            case["text"] = rendered[0]
        except Exception as error:
            case["error"] = f"{type(error).__name__}: {error}"
        out.append(case)
    return {"variables": semantics.VARIABLES, "cases": out}


def write_json(path, value):
    """Writes JSON with one case per line, for readable diffs."""
    path.write_text(to_lines(value, depth=2).replace(conversations.PIXEL, "data:") + "\n")


def to_lines(value, depth):
    if depth and isinstance(value, dict):
        return (
            "{"
            + ",\n".join(
                f"{json.dumps(key)}: {to_lines(inner, depth - 1)}" for key, inner in value.items()
            )
            + "}"
        )
    if depth and isinstance(value, list):
        return "[" + ",\n".join(to_lines(inner, 0) for inner in value) + "]"
    return json.dumps(value, separators=(",", ":"))


def main():
    root = Path(__file__).resolve().parents[2]
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else root / "crates/chiasm-prompt/tests/goldens"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    hf_templates.datetime = FixedClock
    tiny_models.build(out / "models")
    for path in sorted((out / "models").iterdir()):
        write_json(out / f"{path.name}.json", model_goldens(path))
        print(path.name, flush=True)
    write_json(out / "requests.json", conversations.TEXT_REQUESTS | conversations.IMAGE_REQUESTS)
    write_json(out / "jinja.json", semantics_goldens())
    formats = [
        dict(template=t, format=vllm_hf._detect_content_format(t, default="string"))
        for t in detection.TEMPLATES
    ]
    write_json(out / "content_format.json", formats)
    write_json(
        out / "versions.json",
        {module.__name__: module.__version__ for module in (vllm, transformers, tokenizers)}
        | {
            "jinja2": jinja2.__version__,
            "python": sys.version.split()[0],
            "now": FIXED_NOW.isoformat(),
        },
    )


if __name__ == "__main__":
    main()
