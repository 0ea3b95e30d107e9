#!/usr/bin/env python3
"""Asks vLLM which architectures with images, videos or audio it registers, and what its code says of each.

usage: registered.py

Prints JSON, as ``xtask/src/models_page/facts.rs`` reads it. Every model's module is imported, which takes half a minute and no GPU;
one that can't be imported is in the list with the reason. Needs ``chiasm_processor`` on the path: what it asks of a processor is
asked here too.
"""

import inspect
import json
import re
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_origin, get_type_hints

import vllm
from chiasm_processor.greeting import own_methods
from limits import Limit, limits_of
from refusals import needs_mistral, tokenizer_modes, writes_conversations
from vllm.config import model as model_config
from vllm.model_executor.models import registry
from vllm.model_executor.models.interfaces import supports_multimodal, supports_transcription
from vllm.model_executor.models.interfaces_base import is_pooling_model, is_text_generation_model
from vllm.multimodal.processing import EncDecMultiModalProcessor

# The registry's table of models with media, and those that have some among models for text.
OF_MEDIA = "_MULTIMODAL_MODELS"
MIXED = ("_TEXT_GENERATION_MODELS", "_TRANSFORMERS_SUPPORTED_MODELS", "_TRANSFORMERS_BACKEND_MODELS")
POOLING = (
    "_EMBEDDING_MODELS",
    "_LATE_INTERACTION_MODELS",
    "_REWARD_MODELS",
    "_TOKEN_CLASSIFICATION_MODELS",
    "_SEQUENCE_CLASSIFICATION_MODELS",
)
# The base of a model's class that says that it takes media.
BASE = "SupportsMultiModal"


@dataclass
class Architecture:
    """A row of the page."""

    name: str
    # Empty if only a model's files tell.
    modalities: dict[str, Limit] = field(default_factory=dict)
    # The methods with which its processor writes items in prompts in a way of its own; None if a model's files choose it.
    own_prompts: list[str] | None = field(default_factory=list)
    # Whether items are put beside something in the prompt instead of in the place of their markers.
    inserts: bool = False
    # Whether vLLM's code writes its conversations, and not the model's chat template.
    written: bool = False
    refused: str | None = None
    # Why nothing is known of it.
    unknown: str | None = None


def architectures() -> Iterator[Architecture]:
    of_media = getattr(registry, OF_MEDIA)
    modes = tokenizer_modes(model_config)
    names = dict.fromkeys([*of_media, *(name for table in MIXED + POOLING for name in getattr(registry, table))])
    for name in sorted(names, key=str.lower):
        registered = registry.ModelRegistry.models[name]
        try:
            model = registered.load_model_cls()
        except Exception as error:
            if name in of_media or says_media(registered.module_name, registered.class_name):
                yield Architecture(name, refused=_refused_by_name(name, modes), unknown=reason(error))
            continue
        if name in of_media or supports_multimodal(model):
            described = _described(name, model, _refused_by_name(name, modes))
            described.written |= name in modes and writes_conversations(modes[name])
            yield described


def says_media(module: str, name: str) -> bool:
    """Whether the source of a class says that it takes media; the class may be anywhere in a package."""
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        return False
    file = Path(spec.origin)
    files = file.parent.rglob("*.py") if spec.submodule_search_locations else [file]
    bases = re.compile(rf"^class {re.escape(name)}\(([^)]*)\)", re.MULTILINE)
    return any(BASE in found[1] for path in files for found in bases.finditer(path.read_text()))


def reason(error: Exception) -> str:
    """The first sentence, without paths."""
    sentence = (str(error).splitlines() or [""])[0].partition(". ")[0]
    words = f"{type(error).__name__}: {sentence}".split()
    return " ".join(word for word in words if not word.strip("'\"(").startswith("/")).rstrip(".")


def _described(name: str, model: Any, refused: str | None) -> Architecture:
    factories = getattr(model, "_processor_factory", None)
    if factories is None:
        return Architecture(name, refused=refused, unknown="for this platform its class has no processor")
    try:
        limits = limits_of(_class(factories.info))
    except Exception as error:
        return Architecture(name, refused=refused, unknown=reason(error))
    processor: Any = factories.processor if isinstance(factories.processor, type) else None
    return Architecture(
        name,
        modalities=limits,
        own_prompts=own_methods(object.__new__(processor)) if processor else None,
        inserts=processor is not None and "PromptInsertion(" in inspect.getsource(processor._get_prompt_updates),
        written=processor is not None and needs_mistral(processor),
        refused=_refused(model, processor, limits) or refused,
    )


def _class(factory: Any) -> type:
    """What a factory makes: it is a class, or a function that says which base all that it makes have."""
    made = factory if isinstance(factory, type) else get_type_hints(factory)["return"]
    return get_origin(made) or made


def _refused(model: Any, processor: type | None, limits: dict[str, Limit]) -> str | None:
    """The name of a reason, as ``facts.rs`` has them."""
    if processor and issubclass(processor, EncDecMultiModalProcessor):
        return "encoder_decoder"
    if is_pooling_model(model) or not is_text_generation_model(model):
        return "pooling"
    if supports_transcription(model) and model.supports_transcription_only:
        return "transcription"
    if processor and needs_mistral(processor) and "audio" in limits:
        return "mistral_audio"
    return None


def _refused_by_name(name: str, modes: dict[str, str]) -> str | None:
    """The same, where the class is not needed to tell."""
    generates = any(name in getattr(registry, table) for table in (OF_MEDIA, *MIXED))
    if not generates:
        return "pooling"
    return "own_tokenizer" if name in modes and not writes_conversations(modes[name]) else None


def main() -> None:
    # What vLLM prints on the way is not part of the answer.
    with redirect_stdout(sys.stderr):
        found = [asdict(architecture) for architecture in architectures()]
    json.dump({"vllm": vllm.__version__.partition("+")[0], "architectures": found}, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
