#!/usr/bin/env python3
"""Lists the architectures with images, videos or audio that vLLM registers, and their properties.

usage: registered.py

Prints JSON, which ``xtask/src/models_page/facts.rs`` reads. Imports every model's module, which
takes half a minute and needs no GPU. A module that cannot be imported is listed with the reason.
Needs ``chiasm_processor`` on the path, and uses its code to examine processors.
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
from chiasm_processor.greeting import overridden_prompt_methods
from limits import Limit, limits_of
from refusals import needs_mistral, tokenizer_modes, writes_conversations
from vllm.config import model as model_config
from vllm.model_executor.models import registry
from vllm.model_executor.models.interfaces import supports_multimodal, supports_transcription
from vllm.model_executor.models.interfaces_base import is_pooling_model, is_text_generation_model
from vllm.multimodal.processing import EncDecMultiModalProcessor

# The registry's table of models with media.
MEDIA_TABLE = "_MULTIMODAL_MODELS"
# The tables of text models, which also contain some models with media.
TEXT_TABLES = (
    "_TEXT_GENERATION_MODELS",
    "_TRANSFORMERS_SUPPORTED_MODELS",
    "_TRANSFORMERS_BACKEND_MODELS",
)
POOLING_TABLES = (
    "_EMBEDDING_MODELS",
    "_LATE_INTERACTION_MODELS",
    "_REWARD_MODELS",
    "_TOKEN_CLASSIFICATION_MODELS",
    "_SEQUENCE_CLASSIFICATION_MODELS",
)
# The base class of models that take media.
MEDIA_BASE = "SupportsMultiModal"


@dataclass
class Architecture:
    """An architecture: a row of the page."""

    name: str
    # Empty if a model's files decide on the modalities.
    modalities: dict[str, Limit] = field(default_factory=dict)
    # The methods of its processor that override how items are written in prompts; None if a model's
    # files choose the processor.
    own_prompts: list[str] | None = field(default_factory=list)
    # True if items are inserted into the prompt instead of replacing their markers.
    inserts: bool = False
    # True if vLLM's code writes conversations instead of the model's chat template.
    written: bool = False
    refused: str | None = None
    # The reason why nothing is known about the architecture.
    unknown: str | None = None


def architectures() -> Iterator[Architecture]:
    media_models = getattr(registry, MEDIA_TABLE)
    modes = tokenizer_modes(model_config)
    tables = (getattr(registry, table) for table in TEXT_TABLES + POOLING_TABLES)
    names = dict.fromkeys([*media_models, *(name for table in tables for name in table)])
    for name in sorted(names, key=str.lower):
        registered = registry.ModelRegistry.models[name]
        try:
            model = registered.load_model_cls()
        except Exception as error:
            if name in media_models or has_media_base(
                registered.module_name, registered.class_name
            ):
                refused = _refused_by_name(name, modes)
                yield Architecture(name, refused=refused, unknown=short_reason(error))
            continue
        if name in media_models or supports_multimodal(model):
            architecture = _describe(name, model, _refused_by_name(name, modes))
            architecture.written |= name in modes and writes_conversations(modes[name])
            yield architecture


def has_media_base(module: str, name: str) -> bool:
    """Returns True if the source of a class has the base class of models that take media.

    If ``module`` is a package, the class may be in any of its modules.
    """
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        return False
    file = Path(spec.origin)
    files = file.parent.rglob("*.py") if spec.submodule_search_locations else [file]
    bases = re.compile(rf"^class {re.escape(name)}\(([^)]*)\)", re.MULTILINE)
    matches = (match for path in files for match in bases.finditer(path.read_text()))
    return any(MEDIA_BASE in match[1] for match in matches)


def short_reason(error: Exception) -> str:
    """Returns the first sentence of an error, without paths."""
    sentence = (str(error).splitlines() or [""])[0].partition(". ")[0]
    words = f"{type(error).__name__}: {sentence}".split()
    without_paths = (word for word in words if not word.strip("'\"(").startswith("/"))
    return " ".join(without_paths).rstrip(".")


def _describe(name: str, model: Any, refused: str | None) -> Architecture:
    factories = getattr(model, "_processor_factory", None)
    if factories is None:
        unknown = "for this platform its class has no processor"
        return Architecture(name, refused=refused, unknown=unknown)
    try:
        limits = limits_of(_made_class(factories.info))
    except Exception as error:
        return Architecture(name, refused=refused, unknown=short_reason(error))
    processor: Any = factories.processor if isinstance(factories.processor, type) else None
    inserts = False
    if processor is not None:
        inserts = "PromptInsertion(" in inspect.getsource(processor._get_prompt_updates)
    return Architecture(
        name,
        modalities=limits,
        own_prompts=overridden_prompt_methods(object.__new__(processor)) if processor else None,
        inserts=inserts,
        written=processor is not None and needs_mistral(processor),
        refused=_refused(model, processor, limits) or refused,
    )


def _made_class(factory: Any) -> type:
    """Returns the class of a factory's objects.

    A factory is this class, or a function whose return annotation is a common base class.
    """
    made = factory if isinstance(factory, type) else get_type_hints(factory)["return"]
    return get_origin(made) or made


def _refused(model: Any, processor: type | None, limits: dict[str, Limit]) -> str | None:
    """Returns a reason by its name in ``facts.rs``; None if the architecture is not refused."""
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
    """Returns a reason that is evident without the model's class; None if there is none."""
    generates = any(name in getattr(registry, table) for table in (MEDIA_TABLE, *TEXT_TABLES))
    if not generates:
        return "pooling"
    return "own_tokenizer" if name in modes and not writes_conversations(modes[name]) else None


def main() -> None:
    # The output of vLLM's imports must not mix with the JSON.
    with redirect_stdout(sys.stderr):
        described = [asdict(architecture) for architecture in architectures()]
    version = vllm.__version__.partition("+")[0]
    json.dump({"vllm": version, "architectures": described}, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
