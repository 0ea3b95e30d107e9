"""The part of the table for vLLM's own processor, which runs beside Chiasm's frontend."""

from kinds import Code, Group, Values

INPUTS = "multimodal/inputs.py"
MEDIA = "multimodal/media/connector.py"
PROCESSOR = "multimodal/processing/processor.py"
OPENCV = "multimodal/video_decoders/opencv.py"
AUDIO = "multimodal/media/audio.py"
QWEN2_AUDIO = "model_executor/models/qwen2_audio.py"
QWEN3_OMNI = "model_executor/models/qwen3_omni_moe_thinker.py"
OMNI = "model_executor/models/qwen2_5_omni_thinker.py"
CHAT = "entrypoints/openai/chat_completion/protocol.py"
HELPER = "python/chiasm_processor/chiasm_processor"

PROCESSORS = (
    Group(
        "vLLM's processor: items",
        "the tensors of a media file, with vLLM's flags",
        (f"{HELPER}/processor.py", f"{HELPER}/fields.py"),
        (
            Code(
                "engine/arg_utils.py", "EngineArgs.create_model_config", "EngineArgs.from_cli_args"
            ),
            Code("utils/argparse_utils.py", "FlexibleArgumentParser.parse_args"),
            Code("multimodal/registry.py", "MultiModalRegistry.create_processor"),
            Code(
                MEDIA,
                "MediaConnector.__init__",
                "MediaConnector.load_from_url",
                "MediaConnector.fetch_image",
            ),
            Code(MEDIA, "MediaConnector.fetch_video", "MediaConnector.fetch_audio"),
            Code(MEDIA, "merge_media_io_kwargs"),
            Code(
                "multimodal/media/video.py", "VideoMediaIO.merge_kwargs", "VideoMediaIO.load_base64"
            ),
            Code("transformers_utils/processor.py", "get_video_processor_cls_name"),
            Code(PROCESSOR, "BaseMultiModalProcessor._cached_apply_hf_processor"),
            Code(INPUTS, "MultiModalBatchedField", "MultiModalFlatField", "MultiModalSharedField"),
        ),
    ),
    Group(
        "vLLM's processor: frames",
        "the frames of a part of a video, decoded as those of the whole video",
        (f"{HELPER}/frames.py", "crates/chiasm-processor/src/frames.rs"),
        (
            Code(
                OPENCV,
                "OpenCVVideoBackendMixin.get_cv2_video_api",
                "OpenCVVideoBackendMixin.open_video_capture",
            ),
            Code(OPENCV, "OpenCVVideoBackendMixin._read_frames_no_recovery"),
            Code("multimodal/video_decoders/base.py", "check_frame_pixel_limit"),
        ),
    ),
    Group(
        "vLLM's processor: prompts",
        "the expansion of processed items in a prompt",
        (
            f"{HELPER}/processor.py",
            f"{HELPER}/updates.py",
            "crates/chiasm-pipeline/src/processor_items/expansion.rs",
        ),
        (
            Code(
                PROCESSOR,
                "BaseMultiModalProcessor.apply",
                "BaseMultiModalProcessor._maybe_apply_prompt_updates",
            ),
            Code(PROCESSOR, "BaseMultiModalProcessor._apply_prompt_updates"),
            Code(PROCESSOR, "BaseMultiModalProcessor._apply_token_matches"),
            Code(PROCESSOR, "BaseMultiModalProcessor._find_mm_placeholders"),
            Code(PROCESSOR, "ResolvedPromptUpdate", "PromptUpdateDetails", "PromptIndexTargets.*"),
            Code("multimodal/cache/base.py", "BaseMultiModalProcessorCache.*"),
        ),
    ),
    Group(
        "vLLM's processor: conversations",
        "the models whose conversations are rendered by code",
        (f"{HELPER}/conversation.py", "crates/chiasm/src/vllm_processor.rs"),
        (
            Code("tokenizers/registry.py", "resolve_tokenizer_args", "tokenizer_args_from_config"),
            Code("tokenizers/registry.py", "cached_tokenizer_from_config"),
            Code("transformers_utils/config.py", "get_config"),
            Code("transformers_utils/repo_utils.py", "is_mistral_model_repo"),
            Values("renderers/registry.py", "_VLLM_RENDERERS"),
            Code(
                "renderers/base.py",
                "BaseRenderer.__init__",
                "BaseRenderer._tokenize_singleton_prompt",
            ),
            Code(
                "renderers/params.py",
                "ChatParams.with_defaults",
                "ChatParams.get_apply_chat_template_kwargs",
            ),
            Code(
                CHAT,
                "ChatCompletionRequest.build_chat_params",
                "ChatCompletionRequest.build_tok_params",
            ),
            Code(
                "renderers/online_renderer.py",
                "OnlineRenderer.preprocess_chat",
                "OnlineRenderer.render_chat",
            ),
            Code(
                "renderers/mistral.py",
                "MistralRenderer.render_messages",
                "safe_apply_chat_template",
            ),
            Code(
                "tokenizers/mistral.py",
                "MistralTokenizer.apply_chat_template",
                "validate_request_params",
            ),
            Code("tokenizers/mistral.py", "maybe_serialize_tool_calls", "truncate_tool_call_ids"),
            Values("renderers/kimi_k3.py", "_K3_MEDIA_IO_DEFAULTS"),
        ),
    ),
    Group(
        "vLLM's processor: recordings",
        "the lengths and tokens of recordings, without decoding them",
        (
            f"{HELPER}/audio.py",
            "crates/chiasm-audio/src/loader.rs",
            "crates/chiasm-audio/src/model.rs",
        ),
        (
            Code(AUDIO, "load_audio", "load_audio_soundfile", "load_audio_pyav"),
            Code(AUDIO, "load_audio_torchcodec"),
            Code("multimodal/audio.py", "resample_audio_torchaudio", "AudioResampler.resample"),
            Code("multimodal/audio.py", "normalize_audio"),
            Code("multimodal/parse.py", "MultiModalDataParser._parse_audio_data"),
            Code(QWEN2_AUDIO, "_get_feat_extract_output_lengths"),
            Code(
                QWEN2_AUDIO,
                "Qwen2AudioMultiModalProcessor._get_hf_mm_inputs",
                "Qwen2AudioMultiModalProcessor._get_prompt_updates",
            ),
            Code(
                OMNI,
                "Qwen2_5OmniThinkerMultiModalProcessor._get_prompt_updates",
                "Qwen2_5OmniThinkerMultiModalProcessor._maybe_apply_prompt_updates",
            ),
            Code(OMNI, "Qwen2_5OmniThinkerMultiModalProcessor._postprocess_hf_mm_data"),
            Code(
                QWEN3_OMNI,
                "_get_feat_extract_output_lengths",
                "Qwen3OmniMoeThinkerMultiModalProcessor._get_hf_mm_inputs",
                "Qwen3OmniMoeThinkerMultiModalProcessor._postprocess_hf_mm_data",
            ),
            Code(
                QWEN3_OMNI,
                "Qwen3OmniMoeThinkerMultiModalProcessor._get_prompt_updates",
                "Qwen3OmniMoeThinkerMultiModalProcessor._maybe_apply_prompt_updates",
            ),
        ),
    ),
    Group(
        "vLLM's processor: greeting",
        "the properties of the processor that the frontend needs",
        (f"{HELPER}/greeting.py", "crates/chiasm-pipeline/src/processor_items.rs"),
        (
            Code("multimodal/encoder_budget.py", "get_mm_max_toks_per_item"),
            Code("v1/core/encoder_cache_manager.py", "compute_mm_encoder_budget"),
            Code(PROCESSOR, "BaseMultiModalProcessor.get_dummy_inputs"),
            Code("model_executor/models/interfaces.py", "SupportsMultiModal.get_placeholder_str"),
            Values("renderers/chat_utils/chat_message.py", "MM_PARSER_MAP"),
        ),
    ),
)
