"""The greeting: a processor's properties that a frontend needs before the first item."""

from importlib.util import find_spec
from typing import Any

import vllm
from vllm.multimodal.encoder_budget import get_mm_max_toks_per_item
from vllm.multimodal.processing.processor import BaseMultiModalProcessor
from vllm.transformers_utils.processor import get_video_processor_cls_name

from .audio import describe_audio
from .processor import UNTIMED, Processor

# The prompt length for which warm-up items are made. Longer videos would take too long.
WARM_UP_TOKENS = 2048
# The number of items per modality whose placeholder texts are compared. Some models number them.
MAX_NUMBERED_PLACEHOLDERS = 64
# The packages that read audio files: the usual formats, and audio in video containers. They are
# not dependencies of vLLM.
AUDIO_PACKAGES = ("soundfile", "av")

# The methods that write items in prompts. A processor that overrides one of them writes items in
# its own way, so only its own code can expand a prompt.
PROMPT_METHODS = (
    "apply",
    "_maybe_apply_prompt_updates",
    "_apply_prompt_updates",
    "_apply_token_matches",
    "_apply_token_matches_with_placeholders",
    "_postprocess_prompt",
    "_recompute_cached_prompt_update",
    "_find_mm_placeholders",
)


def build_greeting(processor: Processor) -> dict[str, Any]:
    """Returns the greeting.

    Processes one item of each modality, so that everything that is loaded lazily is loaded before
    children are forked and locked.
    """
    own = processor.vllm_processor
    supported = own.info.allowed_mm_limits.items() if own else ()
    limits = {modality: limit for modality, limit in supported if limit != 0}
    for modality in limits:
        own.apply(own.get_dummy_inputs(WARM_UP_TOKENS, {modality: 1}, {}), UNTIMED)
    # Engines reserve space for one item of each modality together.
    one_of_each = dict.fromkeys(limits, 1)
    return {
        "vllm": vllm.__version__,
        "limits": limits,
        "max_tokens": dict(get_mm_max_toks_per_item(own, one_of_each, None)) if own else {},
        "placeholders": {
            modality: placeholder_texts(processor.model_class(), modality) for modality in limits
        },
        "video_processor": (
            get_video_processor_cls_name(processor.config) if "video" in limits else None
        ),
        "audio": describe_audio(processor) if "audio" in limits else None,
        "own_prompts": overridden_prompt_methods(own) if own else [],
        "renderer": processor.conversations.renderer_mode,
        "writes_conversations": processor.conversations.renders_by_code,
        "missing": [
            name for name in AUDIO_PACKAGES if "audio" in limits and find_spec(name) is None
        ],
    }


def placeholder_texts(model: Any, modality: str) -> list[str]:
    """Returns the texts that stand for the first items of a modality in a conversation.

    Returns a single text if it is the same for all items, and none if no text is written.
    """
    texts = [
        model.get_placeholder_str(modality, number + 1)
        for number in range(MAX_NUMBERED_PLACEHOLDERS)
    ]
    written = [text for text in texts if text]
    return written if len(set(written)) > 1 else written[:1]


def overridden_prompt_methods(processor: BaseMultiModalProcessor) -> list[str]:
    """Returns the names in ``PROMPT_METHODS`` that the processor's class overrides."""
    own = type(processor)
    base = BaseMultiModalProcessor
    return [
        name for name in PROMPT_METHODS if getattr(own, name, None) is not getattr(base, name, None)
    ]
