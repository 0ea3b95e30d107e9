"""The part of the table for images: the tensors and placeholders of each native family."""

from kinds import Code, Fields, Group, Keys, Values, Variables

CONTEXT = "multimodal/processing/context.py"
PROCESSOR = "multimodal/processing/processor.py"
MODELS = "model_executor/models"
FAMILIES = "crates/chiasm-vision/src/families"


def family(
    name: str,
    our_files: tuple[str, ...],
    file: str,
    model: str,
    *classes: str,
    more: tuple[Code | Values, ...] = (),
) -> Group:
    """Returns the group of one model file of vLLM: its processing classes and its model class."""
    path = f"{MODELS}/{file}.py"
    return Group(
        f"family: {name}",
        "sizes, tensors and placeholders of images",
        (f"{FAMILIES}/table.rs", *(f"{FAMILIES}/{file_name}" for file_name in our_files)),
        (
            Code(path, *(f"{name}.*" for name in classes)),
            Code(path, model, f"{model}.get_placeholder_str"),
            Values(path, f"{model}.supports_mm_device_do_normalize"),
            *more,
        ),
    )


IMAGES = (
    Group(
        "image files",
        "the decoding of image files",
        (
            "crates/chiasm-media/src/image/decode.rs",
            "crates/chiasm-media/src/image/exif.rs",
            "crates/chiasm-media/src/image/limits.rs",
            "crates/chiasm-media/src/data_uri.rs",
            "crates/chiasm/src/vllm_flags.rs",
        ),
        (
            Values("multimodal/image.py", "ALLOWED_IMAGE_FORMATS"),
            Code(
                "multimodal/image.py",
                "open_image",
                "normalize_image",
                "rgba_to_rgb",
                "_has_transparency",
            ),
            Code("multimodal/image.py", "convert_image_mode"),
            Code("multimodal/media/image.py", "ImageMediaIO.*"),
            Code("multimodal/media/base.py", "MediaIO.*"),
            Code(
                "multimodal/media/connector.py",
                "merge_media_io_kwargs",
                "MediaConnector._load_data_url",
            ),
            Code(
                "multimodal/media/connector.py",
                "MediaConnector.fetch_image",
                "MediaConnector.fetch_image_async",
            ),
            Code(
                "multimodal/media/connector.py",
                "MediaConnector.load_from_url_async",
                "MediaConnector._image_io",
            ),
            Variables(("VLLM_MAX_IMAGE_PIXELS",)),
        ),
    ),
    Group(
        "processor settings",
        "the precedence of mm_processor_kwargs, and where normalization takes place",
        (
            "crates/chiasm-vision/src/engine_kwargs.rs",
            f"{FAMILIES}/table.rs",
            f"{FAMILIES}/qwen_vl/kwargs.rs",
            "crates/chiasm/src/vllm_flags.rs",
        ),
        (
            Code(
                "config/multimodal.py",
                "MultiModalConfig.merge_mm_processor_kwargs",
                "_merge_mm_processor_kwargs",
            ),
            Code(
                "config/multimodal.py",
                "_merge_mm_processor_scope",
                "_recursively_merge_mm_processor_kwargs",
            ),
            Values(
                "config/multimodal.py",
                "MultiModalConfig.mm_device_do_normalize",
                "MultiModalConfig.mm_processor_kwargs",
            ),
            Code("config/model.py", "ModelConfig._resolve_mm_device_do_normalize"),
            Values(f"{MODELS}/interfaces.py", "SupportsMultiModal.supports_mm_device_do_normalize"),
            Code(
                "model_executor/layers/fusion/mm_input_norm.py",
                "build_mm_input_norm",
                "_load_norm_params",
            ),
            Code("model_executor/layers/fusion/mm_input_norm.py", "FusedMMInputNorm.*"),
            Code(
                CONTEXT,
                "_resolve_mm_processor_kwargs",
                "_merge_scoped_mm_processor_value",
                "InputProcessingContext.*",
            ),
            Code(CONTEXT, "BaseProcessingInfo.*"),
            Code(
                "transformers_utils/processor.py",
                "_merge_mm_kwargs",
                "get_processor",
                "get_processor_kwargs_keys",
            ),
            Code(
                "transformers_utils/processor.py",
                "get_processor_kwargs_type",
                "cached_processor_from_config",
            ),
            Code(
                "transformers_utils/processor.py",
                "get_image_processor",
                "cached_image_processor_from_config",
            ),
        ),
    ),
    Group(
        "prompt updates",
        "the search for placeholders in a prompt, and their replacement",
        ("crates/chiasm-prompt/src/expand.rs", "crates/chiasm-vision/src/image_prompt.rs"),
        (
            Fields(
                PROCESSOR,
                "PromptUpdateDetails",
                "PromptReplacement",
                "PromptInsertion",
                "UpdateMode",
            ),
            Code(
                PROCESSOR,
                "PromptUpdateDetails.*",
                "PromptUpdate.*",
                "PromptReplacement.*",
                "ResolvedPromptUpdate.*",
            ),
            Code(
                PROCESSOR,
                "iter_token_matches",
                "replace_token_matches",
                "_plan_prompt_updates",
                "_plan_prompt_updates_with",
            ),
            Code(
                PROCESSOR,
                "_compile_prompt_update_queues",
                "_find_queue_match",
                "_next_priority",
                "_apply_matches",
            ),
            Code(
                PROCESSOR,
                "apply_token_matches",
                "_apply_token_matches_with_placeholders",
                "_iter_placeholders",
            ),
            Code(
                PROCESSOR,
                "find_mm_placeholders",
                "PlaceholderFeaturesInfo.*",
                "BaseMultiModalProcessor.*",
            ),
            Code(
                "multimodal/parse.py",
                "ImageProcessorItems.*",
                "MultiModalDataParser._parse_image_data",
            ),
        ),
    ),
    Group(
        "families",
        "the models' files, and the properties of vision towers",
        (f"{FAMILIES}/table.rs", f"{FAMILIES}/tower.rs"),
        (
            Keys(
                f"{MODELS}/registry.py",
                "_MULTIMODAL_MODELS",
                (
                    "Qwen2VLForConditionalGeneration",
                    "Qwen2_5_VLForConditionalGeneration",
                    "Qwen3VLForConditionalGeneration",
                    "Qwen3VLMoeForConditionalGeneration",
                    "Qwen3_5ForConditionalGeneration",
                    "Qwen3_5MoeForConditionalGeneration",
                    "LlavaForConditionalGeneration",
                    "LlavaNextForConditionalGeneration",
                    "PixtralForConditionalGeneration",
                    "Mistral3ForConditionalGeneration",
                    "Gemma3ForConditionalGeneration",
                    "Llama4ForConditionalGeneration",
                    "InternVLForConditionalGeneration",
                    "InternVLChatModel",
                ),
            ),
            Code(
                f"{MODELS}/vision.py", "get_vision_encoder_info", "get_num_selected_vision_tokens"
            ),
            Code(f"{MODELS}/vision.py", "_get_vision_feature_selector"),
            Code(f"{MODELS}/clip.py", "CLIPEncoderInfo.*"),
            Code(f"{MODELS}/siglip.py", "SiglipEncoderInfo.*"),
            Code(f"{MODELS}/pixtral.py", "PixtralHFEncoderInfo.*"),
        ),
    ),
    family(
        "qwen2_vl",
        ("qwen_vl/mod.rs", "qwen_vl/kwargs.rs", "qwen_vl/largest.rs"),
        "qwen2_vl",
        "Qwen2VLForConditionalGeneration",
        "Qwen2VLProcessingInfo",
        "Qwen2VLMultiModalProcessor",
        "Qwen2VLMultiModalDataParser",
        more=(Code(f"{MODELS}/qwen2_vl.py", "_create_qwen2vl_field_factory"),),
    ),
    family(
        "qwen2_5_vl",
        ("qwen_vl/mod.rs",),
        "qwen2_5_vl",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen2_5_VLProcessingInfo",
        "Qwen2_5_VLMultiModalProcessor",
    ),
    family(
        "qwen3_vl",
        ("qwen_vl/mod.rs",),
        "qwen3_vl",
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLProcessingInfo",
        "Qwen3VLMultiModalProcessor",
        "Qwen3VLMultiModalDataParser",
    ),
    family(
        "qwen3_vl_moe",
        ("qwen_vl/mod.rs",),
        "qwen3_vl_moe",
        "Qwen3VLMoeForConditionalGeneration",
        "Qwen3VLMoeProcessingInfo",
    ),
    family(
        "qwen3_5",
        ("qwen_vl/mod.rs",),
        "qwen3_5",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5ProcessingInfo",
        "Qwen3_5MoeProcessingInfo",
        more=(Code(f"{MODELS}/qwen3_5.py", "Qwen3_5MoeForConditionalGeneration"),),
    ),
    family(
        "llava",
        ("llava.rs", "pixtral.rs"),
        "llava",
        "LlavaForConditionalGeneration",
        "BaseLlavaProcessingInfo",
        "LlavaProcessingInfo",
        "BaseLlavaMultiModalProcessor",
        "LlavaMultiModalProcessor",
        "PixtralHFProcessingInfo",
        "PixtralHFMultiModalProcessor",
        more=(
            Code(
                f"{MODELS}/llava.py",
                "_build_llava_or_pixtral_hf_info",
                "_build_llava_or_pixtral_hf_processor",
            ),
        ),
    ),
    family(
        "llava_next",
        ("llava_next.rs",),
        "llava_next",
        "LlavaNextForConditionalGeneration",
        "LlavaNextProcessingInfo",
        "BaseLlavaNextMultiModalProcessor",
        "LlavaNextMultiModalProcessor",
    ),
    family(
        "mistral3",
        ("pixtral.rs",),
        "mistral3",
        "Mistral3ForConditionalGeneration",
        "Mistral3HFEncoderInfo",
        "Mistral3ProcessingInfo",
        "Mistral3MultiModalProcessor",
    ),
    family(
        "gemma3",
        ("gemma3.rs",),
        "gemma3_mm",
        "Gemma3ForConditionalGeneration",
        "Gemma3ProcessingInfo",
        "Gemma3MultiModalProcessor",
    ),
    family(
        "llama4",
        ("llama4.rs", "tiled.rs"),
        "mllama4",
        "Llama4ForConditionalGeneration",
        "Mllama4ProcessingInfo",
        "Mllama4MultiModalProcessor",
    ),
    family(
        "internvl",
        ("internvl.rs", "tiled.rs"),
        "interns1",
        "InternS1ForConditionalGeneration",
        "InternS1ProcessingInfo",
        "InternS1MultiModalProcessor",
    ),
    family(
        "internvl_chat",
        ("internvl_chat.rs", "tiled.rs"),
        "internvl",
        "InternVLChatModel",
        "BaseInternVLProcessingInfo",
        "BaseInternVLMultiModalProcessor",
        "InternVLProcessingInfo",
        "InternVLMultiModalProcessor",
        more=(
            Values("transformers_utils/processors/internvl.py", "IMAGENET_MEAN", "IMAGENET_STD"),
            Code(
                "transformers_utils/processors/internvl.py",
                "build_transform",
                "find_closest_aspect_ratio",
                "get_internvl_target_ratios",
                "calculate_internvl_targets",
                "dynamic_preprocess_internvl",
                "image_to_pixel_values_internvl",
                "InternVLChatImageProcessor.* was InternVLImageProcessor",
                "InternVLChatProcessor.* was InternVLProcessor",
            ),
        ),
    ),
)
