"""What a frontend has to know of a model's processor before its first item."""

from typing import Any

import vllm
from vllm.multimodal.processing.processor import BaseMultiModalProcessor
from vllm.transformers_utils.processor import get_video_processor_cls_name

from .processor import Processor

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
    info = processor.vllm.info
    limits = {modality: limit for modality, limit in info.allowed_mm_limits.items() if limit != 0}
    for modality in limits:
        processor.vllm.get_dummy_mm_inputs({modality: 1})
    model = processor.model_class()
    return {
        "vllm": vllm.__version__,
        "limits": limits,
        "placeholders": {modality: model.get_placeholder_str(modality, 1) for modality in limits},
        "numbered_placeholders": any(
            model.get_placeholder_str(modality, 1) != model.get_placeholder_str(modality, 2) for modality in limits
        ),
        "video_processor": get_video_processor_cls_name(processor.config) if "video" in limits else None,
        "own_prompts": own_methods(processor.vllm),
    }


def own_methods(processor: BaseMultiModalProcessor) -> list[str]:
    """Those of ``OF_PROMPTS`` that the processor has of its own."""
    own = type(processor)
    return [name for name in OF_PROMPTS if getattr(own, name, None) is not getattr(BaseMultiModalProcessor, name, None)]
