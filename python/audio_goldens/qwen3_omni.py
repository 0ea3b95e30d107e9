"""The processor of Qwen3-Omni, without weights: enough for vLLM's processor."""

import sys
from pathlib import Path

import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "models"))

from sizes import AUDIO, MEL_BANDS, TEXT, VISION_HIDDEN  # noqa: E402
from vocabulary import Vocabulary, byte_level  # noqa: E402

MEDIA_TOKENS = {
    "image_token": "<|image_pad|>",
    "audio_token": "<|audio_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *MEDIA_TOKENS.values()]


def vocabulary() -> Vocabulary:
    return Vocabulary(
        byte_level(SPECIAL_TOKENS),
        SPECIAL_TOKENS,
        None,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=MEDIA_TOKENS,
    )


def make(folder: Path) -> None:
    """Writes the configuration and the processor of a tiny model."""
    vocab = vocabulary()
    thinker = {
        "text_config": {
            **TEXT,
            "vocab_size": vocab.size,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 64,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [8, 12, 12],
                "mrope_interleaved": True,
            },
        },
        "audio_config": {**AUDIO, "n_window": 50, "output_dim": TEXT["hidden_size"]},
        "vision_config": {
            "depth": 2,
            "hidden_size": VISION_HIDDEN,
            "intermediate_size": 128,
            "num_heads": 2,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": TEXT["hidden_size"],
            "deepstack_visual_indexes": [0, 1],
        },
        "audio_token_id": vocab.ids["<|audio_pad|>"],
        "image_token_id": vocab.ids["<|image_pad|>"],
        "video_token_id": vocab.ids["<|video_pad|>"],
        "audio_start_token_id": vocab.ids["<|audio_start|>"],
        "audio_end_token_id": vocab.ids["<|audio_end|>"],
        "vision_start_token_id": vocab.ids["<|vision_start|>"],
        "vision_end_token_id": vocab.ids["<|vision_end|>"],
    }
    config = transformers.Qwen3OmniMoeConfig(
        thinker_config=thinker,
        enable_audio_output=False,
        architectures=["Qwen3OmniMoeForConditionalGeneration"],
    )
    processor = transformers.Qwen3OmniMoeProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(patch_size=16),
        video_processor=transformers.Qwen3VLVideoProcessor(),
        feature_extractor=transformers.WhisperFeatureExtractor(feature_size=MEL_BANDS),
        tokenizer=vocab.tokenizer,
        chat_template=None,
    )
    config.save_pretrained(folder)
    vocab.tokenizer.save_pretrained(folder)
    processor.save_pretrained(folder)
