"""The part of the table for vLLM's frontend, which Chiasm replaces: messages, requests, texts."""

from kinds import Code, Fields, Flags, Group, Keys, Values

HF = "renderers/hf.py"
MESSAGES = "renderers/chat_utils/chat_message.py"
CHAT = "entrypoints/openai/chat_completion/protocol.py"
COMPLETION = "entrypoints/openai/completion/protocol.py"

FRONTEND = (
    Group(
        "OpenAI requests",
        "the fields, their defaults, and their conversion for the engine",
        (
            "crates/chiasm-api/src/openai/sampling.rs",
            "crates/chiasm-request/src/defaults.rs",
            "crates/chiasm-pipeline/src/sampling.rs",
            "crates/chiasm-api/src/openai/request.rs",
        ),
        (
            Fields(CHAT, "ChatCompletionRequest"),
            Code(
                CHAT,
                "ChatCompletionRequest.to_sampling_params",
                "ChatCompletionRequest.build_chat_params",
            ),
            Code(CHAT, "ChatCompletionRequest.build_tok_params"),
            Fields(COMPLETION, "CompletionRequest"),
            Code(COMPLETION, "CompletionRequest.to_sampling_params"),
            Code(
                "config/model.py",
                "ModelConfig.try_get_generation_config",
                "ModelConfig.get_diff_sampling_param",
            ),
            Code(
                "sampling_params.py",
                "SamplingParams.from_optional",
                "SamplingParams.update_from_generation_config",
            ),
            Code(
                "v1/engine/input_processor.py",
                "InputProcessor.process_inputs",
                "InputProcessor._validate_params",
            ),
            Code(
                "v1/engine/input_processor.py",
                "InputProcessor.apply_watermarking",
                "InputProcessor.assign_request_id",
            ),
            Code("renderers/params.py", "TokenizeParams.*"),
            Code("entrypoints/serve/utils/api_utils.py", "get_max_tokens"),
            Code("v1/watermarking/gpu_sampler.py", "GPUWatermarkSampler.add_request"),
            Flags(("--watermark-config",)),
        ),
    ),
    Group(
        "prompts",
        "the messages, the chat templates and their arguments",
        (
            "crates/chiasm-prompt/src/template.rs",
            "crates/chiasm-prompt/src/template/conversation.rs",
            "crates/chiasm-prompt/src/template/content_format.rs",
            "crates/chiasm-prompt/src/template/developer.rs",
            "crates/chiasm-prompt/src/template/source.rs",
        ),
        (
            Code(
                HF,
                "resolve_chat_template",
                "_try_get_processor_chat_template",
                "_detect_content_format",
            ),
            Code(
                HF,
                "_is_var_access",
                "_is_attr_access",
                "_attr_dotted_name",
                "_is_var_or_elems_access",
            ),
            Code(HF, "_iter_nodes_assign_content_item"),
            Code(
                HF,
                "_iter_nodes_assign_messages_item",
                "_iter_nodes_assign_var_or_elems",
                "_try_extract_ast",
            ),
            Code(
                HF, "_resolve_chat_template_content_format", "resolve_chat_template_content_format"
            ),
            Code(
                HF,
                "_detect_developer_role_support",
                "_convert_developer_to_system",
                "_consolidate_system_messages",
            ),
            Code(HF, "resolve_chat_template_kwargs", "safe_apply_chat_template"),
            Code(
                "renderers/params.py",
                "merge_kwargs",
                "recursively_merge_kwargs",
                "map_reasoning_effort",
                "ChatParams.*",
            ),
            Code(
                MESSAGES,
                "parse_chat_messages",
                "_postprocess_messages",
                "_get_interleaved_text_prompt",
            ),
            Code(MESSAGES, "parse_chat_message_content was _parse_chat_message_content"),
            Code(MESSAGES, "parse_chat_message_content_part was _parse_chat_message_content_part"),
            Code(
                MESSAGES, "parse_chat_message_content_parts was _parse_chat_message_content_parts"
            ),
            Code(
                MESSAGES,
                "parse_chat_message_content_mm_part was _parse_chat_message_content_mm_part",
            ),
            Code(MESSAGES, "_strip_claude_code_billing_header", "_collect_extra_fields"),
            Values(MESSAGES, "PART_TYPES_TO_SKIP_NONE_CONTENT", "TEXT_PART_TYPES", "MM_PARSER_MAP"),
            Values(MESSAGES, "_CLAUDE_CODE_BILLING_HEADER"),
            Values("renderers/chat_utils/content_parser.py", "MODALITY_PLACEHOLDERS_MAP"),
            Code(MESSAGES, "get_full_multimodal_text_prompt was _get_full_multimodal_text_prompt"),
        ),
    ),
    Group(
        "texts",
        "detokenization and stop strings",
        ("crates/chiasm-prompt/src/detokenize.rs", "crates/chiasm-prompt/src/stop.rs"),
        (
            Code("v1/engine/detokenizer.py", "check_stop_strings", "FastIncrementalDetokenizer.*"),
            Code("v1/engine/detokenizer.py", "BaseIncrementalDetokenizer.*"),
            Code("v1/engine/logprobs.py", "LogprobsProcessor.*"),
        ),
    ),
    Group(
        "tool parsers",
        "the values of --tool-call-parser",
        ("docs/versions.md",),
        (Keys("tool_parsers/__init__.py", "_TOOL_PARSERS_TO_REGISTER"),),
    ),
    Group(
        "reasoning parsers",
        "the values of --reasoning-parser",
        ("docs/versions.md",),
        (Keys("reasoning/__init__.py", "_REASONING_PARSERS_TO_REGISTER"),),
    ),
)
