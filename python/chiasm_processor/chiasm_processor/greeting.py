"""What a frontend has to know of a model's processor before its first item."""

from importlib.util import find_spec
from typing import Any

import vllm
from vllm.multimodal.encoder_budget import get_mm_max_toks_per_item
from vllm.multimodal.processing.processor import BaseMultiModalProcessor
from vllm.transformers_utils.processor import get_video_processor_cls_name

from .processor import UNTIMED, Processor

# Tokens of the prompt that a warm-up item is made for: long videos would take long.
OF_WARM_UP = 2048
# Items of a modality for which a model that numbers them is asked.
MOST_NUMBERED = 64
# What reads recordings: the usual formats, and those in containers of videos. vLLM does not bring them by itself.
FOR_AUDIO = ("soundfile", "av")

# Overriding one of these, a processor writes items in prompts in a way of its own, so that only its own code knows how.
OF_PROMPTS = (
    "apply",
    "_maybe_apply_prompt_updates",
    "_apply_prompt_updates",
    "_apply_token_matches",
    "_apply_token_matches_with_placeholders",
    "_postprocess_prompt",
    "_recompute_cached_prompt_update",
    "_find_mm_placeholders",
)


def greeting(processor: Processor) -> dict[str, Any]:
    """Runs each modality once, so that what is loaded late is there before children are forked and locked."""
    own = processor.vllm
    limits = {modality: limit for modality, limit in own.info.allowed_mm_limits.items() if limit != 0} if own else {}
    for modality in limits:
        own.apply(own.get_dummy_inputs(OF_WARM_UP, {modality: 1}, {}), UNTIMED)
    return {
        "vllm": vllm.__version__,
        "limits": limits,
        # What engines make room for: one item of each modality together.
        "max_tokens": dict(get_mm_max_toks_per_item(own, dict.fromkeys(limits, 1), None)) if own else {},
        "placeholders": {modality: placeholders(processor.model_class(), modality) for modality in limits},
        "video_processor": get_video_processor_cls_name(processor.config) if "video" in limits else None,
        "own_prompts": own_methods(own) if own else [],
        "renderer": processor.conversations.renderer_mode,
        "writes_conversations": processor.conversations.are_written_here,
        "missing": [name for name in FOR_AUDIO if "audio" in limits and find_spec(name) is None],
    }


def placeholders(model: Any, modality: str) -> list[str]:
    """How the first items of a modality are written in a conversation; one text if that goes for all, none if nothing is written."""
    texts = [model.get_placeholder_str(modality, number + 1) for number in range(MOST_NUMBERED)]
    written = [text for text in texts if text]
    return written if len(set(written)) > 1 else written[:1]


def own_methods(processor: BaseMultiModalProcessor) -> list[str]:
    """Those of ``OF_PROMPTS`` that the processor has of its own."""
    own = type(processor)
    return [name for name in OF_PROMPTS if getattr(own, name, None) is not getattr(BaseMultiModalProcessor, name, None)]
