"""The definitions of vLLM that Chiasm relies on, and our files that do.

A new file of ours that relies on vLLM's Python needs rows here. ``kinds.py`` explains the rows.
Paths are those of the newest supported version.
"""

from kinds import Code, AllFlags, Fields, Flags, Group, Requirements, Values, Variables
from relied_on_frontend import FRONTEND
from relied_on_images import IMAGES
from relied_on_processor import PROCESSORS

ENGINE = "v1/engine/__init__.py"
CORE = "v1/engine/core.py"
UTILS = "v1/engine/utils.py"
SERIAL = "v1/serial_utils.py"
INPUTS = "multimodal/inputs.py"
EVENTS = "distributed/kv_events.py"
HASHES = "v1/core/kv_cache_utils.py"
CACHE = "multimodal/cache"
MANAGERS = "v1/core/single_type_kv_cache_manager.py"
CONNECTOR = "distributed/ec_transfer/ec_connector"

GROUPS = (
    Group(
        "wire: requests",
        "the messages of a frontend",
        ("crates/chiasm-engine/src/wire/request.rs", "crates/chiasm-engine/src/wire/version.rs"),
        (
            Fields(ENGINE, "EngineCoreRequestType", "EngineCoreRequest"),
            Code(
                CORE,
                "EngineCoreProc._handle_client_request",
                "EngineCoreProc.process_input_sockets",
            ),
            Code(
                CORE,
                "EngineCore.preprocess_add_request",
                "EngineCore.add_request",
                "EngineCore.abort_requests",
            ),
        ),
    ),
    Group(
        "wire: sampling parameters",
        (
            "their names and defaults, the checks while they are decoded, and the values that the "
            "engine derives from them"
        ),
        (
            "crates/chiasm-engine/src/wire/sampling.rs",
            "crates/chiasm-engine/src/client/validate.rs",
            "crates/chiasm-pipeline/src/sampling.rs",
            "crates/chiasm-sim-engine/src/sampling_rules.rs",
        ),
        (
            Fields("sampling_params.py", "SamplingParams", "RequestOutputKind"),
            Fields("sampling_params.py", "StructuredOutputsParams", "RepetitionDetectionParams"),
            Values("sampling_params.py", "_SAMPLING_EPS", "_MAX_TEMP"),
            Code(
                "sampling_params.py", "SamplingParams.__post_init__", "SamplingParams._verify_args"
            ),
            Code(
                "sampling_params.py",
                "SamplingParams._verify_greedy_sampling",
                "SamplingParams.num_logprobs",
            ),
            Code(
                "sampling_params.py",
                "SamplingParams.eos_token_id",
                "SamplingParams.all_stop_token_ids",
            ),
            Code("sampling_params.py", "SamplingParams.update_from_generation_config"),
            Code(
                "sampling_params.py",
                "SamplingParams._validate_logprobs",
                "SamplingParams._validate_logit_bias",
            ),
            Code("sampling_params.py", "SamplingParams._validate_allowed_token_ids"),
            Code("sampling_params.py", "SamplingParams._validate_stop_token_ids"),
            Code(
                "config/model.py",
                "ModelConfig.try_get_generation_config",
                "ModelConfig.get_diff_sampling_param",
            ),
            Code("v1/core/sched/utils.py", "check_stop"),
        ),
    ),
    Group(
        "adapters",
        "the identity of a LoRA adapter, how engines load it, and requests with an adapter",
        (
            "crates/chiasm-engine/src/wire/lora.rs",
            "crates/chiasm-engine/src/backend/adapters.rs",
            "crates/chiasm-sim-engine/src/loras.rs",
            "crates/chiasm/src/lora.rs",
        ),
        (
            Fields("lora/request.py", "LoRARequest"),
            Code(
                "lora/request.py",
                "LoRARequest.__post_init__",
                "LoRARequest.__eq__",
                "LoRARequest.__hash__",
            ),
            Code(CORE, "EngineCore.add_lora", "EngineCore.remove_lora", "EngineCore.list_loras"),
            Code("v1/executor/abstract.py", "Executor.add_lora", "Executor.remove_lora"),
            Code("lora/worker_manager.py", "WorkerLoRAManager._load_adapter"),
            Code(
                "lora/worker_manager.py",
                "LRUCacheWorkerLoRAManager._apply_adapters",
                "LRUCacheWorkerLoRAManager.add_adapter",
            ),
            Code("lora/utils.py", "get_adapter_absolute_path"),
            Code("exceptions.py", "LoRAAdapterNotFoundError.*"),
            Code(
                "v1/worker/lora_model_runner_mixin.py", "LoRAModelRunnerMixin._ensure_lora_enabled"
            ),
            Code("v1/worker/gpu/lora_utils.py", "LoraState.*"),
            Code(
                "v1/engine/input_processor.py",
                "InputProcessor._get_mm_identifier",
                "InputProcessor._validate_lora",
            ),
            Values("config/lora.py", "MaxLoRARanks"),
            Fields("config/lora.py", "LoRAConfig"),
            Fields(
                "entrypoints/serve/lora/protocol.py",
                "LoadLoRAAdapterRequest",
                "UnloadLoRAAdapterRequest",
            ),
            Fields("entrypoints/openai/models/protocol.py", "LoRAModulePath"),
            Code("entrypoints/openai/models/serving.py", "OpenAIServingModels.load_lora_adapter"),
            Code(
                "entrypoints/openai/models/serving.py", "OpenAIServingModels.show_available_models"
            ),
            Code("entrypoints/common/cli_args.py", "LoRAParserAction.*"),
        ),
    ),
    Group(
        "wire: media items",
        "the items of a request and how their tensors are batched",
        ("crates/chiasm-engine/src/wire/feature.rs", "crates/chiasm-types/src/placeholder.rs"),
        (
            Fields(
                INPUTS,
                "MultiModalFeatureSpec",
                "PlaceholderRange",
                "MultiModalFieldElem",
                "NestedTensors",
            ),
            Fields(
                INPUTS,
                "BaseMultiModalField",
                "MultiModalBatchedField",
                "MultiModalFlatField",
                "MultiModalSharedField",
            ),
            Code(INPUTS, "MultiModalFieldConfig.*", "MultiModalKwargsItem.*"),
            Code(INPUTS, "BaseMultiModalField.reduce_data", "MultiModalBatchedField._reduce_data"),
            Code(INPUTS, "MultiModalFlatField._reduce_data", "MultiModalSharedField._reduce_data"),
            Code(
                INPUTS, "PlaceholderRange.get_num_embeds", "PlaceholderRange.extract_embeds_range"
            ),
        ),
    ),
    Group(
        "wire: encoding",
        "the encoding of tensors and structs",
        (
            "crates/chiasm-engine/src/wire/tensor.rs",
            "crates/chiasm-engine/src/wire/codec.rs",
            "crates/chiasm-engine/src/wire/writer.rs",
            "crates/chiasm-engine/src/wire/version.rs",
        ),
        (
            Values(SERIAL, "CUSTOM_TYPE_PICKLE", "CUSTOM_TYPE_CLOUDPICKLE", "CUSTOM_TYPE_RAW_VIEW"),
            Code(
                SERIAL,
                "MsgpackEncoder.*",
                "MsgpackDecoder.*",
                "UtilityResult.*",
                "OOBTensorConsumer.*",
            ),
            Values(SERIAL, "OOBTensorProvider"),
            Variables(("VLLM_MSGPACK_ZERO_COPY_THRESHOLD", "VLLM_ALLOW_INSECURE_SERIALIZATION")),
        ),
    ),
    Group(
        "wire: outputs",
        "the messages of an engine",
        (
            "crates/chiasm-engine/src/wire/output.rs",
            "crates/chiasm-engine/src/wire/logprobs.rs",
            "crates/chiasm-engine/src/wire/stats.rs",
            "crates/chiasm-sim-engine/src/sequence.rs",
        ),
        (
            Fields(
                ENGINE, "EngineCoreOutputs", "EngineCoreOutput", "UtilityOutput", "FinishReason"
            ),
            Fields(ENGINE, "EngineCoreEvent", "EngineCoreEventType"),
            Fields("outputs.py", "RequestError"),
            Fields("v1/outputs.py", "LogprobsLists", "LogprobsTensors"),
            Fields(
                "v1/metrics/stats.py",
                "PrefillStats",
                "SchedulerStats",
                "PrefixCacheStats",
                "BaseCacheStats",
            ),
            Values(CORE, "EngineCoreProc.ENGINE_CORE_DEAD"),
            Code(CORE, "EngineCoreProc.process_output_sockets", "EngineCoreProc._send_engine_dead"),
            Code(
                CORE,
                "EngineCoreProc._handle_mm_cache_miss",
                "EngineCoreProc._handle_request_preproc_error",
            ),
            Code(
                CORE,
                "EngineCoreProc._handle_request_validation_error",
                "EngineCoreProc._reject_add_while_paused",
            ),
            Code(CORE, "EngineCoreProc._reject_add_in_shutdown", "EngineCoreProc._handle_shutdown"),
            Code(CORE, "EngineCoreProc._send_abort_outputs"),
        ),
    ),
    Group(
        "wire: method calls",
        "the methods that Chiasm calls, and their results",
        (
            "crates/chiasm-engine/src/client.rs",
            "crates/chiasm-engine/src/client/probe.rs",
            "crates/chiasm-engine/src/client/adoption.rs",
            "crates/chiasm-sim-engine/src/utility.rs",
        ),
        (
            Code(CORE, "EngineCore.reset_mm_cache", "EngineCore.is_scheduler_paused"),
            Code(
                CORE,
                "EngineCore.reset_prefix_cache",
                "EngineCore.reset_encoder_cache",
                "EngineCore.get_supported_tasks",
            ),
            Code(
                CORE,
                "EngineCoreProc._invoke_utility_method",
                "EngineCoreProc._convert_msgspec_args",
            ),
            Code(CORE, "EngineCoreProc._reject_utility_in_shutdown"),
        ),
    ),
    Group(
        "handshake",
        "the handshake of engine and frontend, and the settings that the engine reports",
        (
            "crates/chiasm-engine/src/wire/handshake.rs",
            "crates/chiasm-engine/src/client/handshake.rs",
            "crates/chiasm-engine/src/client/adoption.rs",
            "crates/chiasm-sim-engine/src/handshake.rs",
        ),
        (
            Fields(ENGINE, "EngineCoreReadyResponse"),
            Fields(UTILS, "EngineHandshakeMetadata", "EngineZmqAddresses"),
            Code(CORE, "EngineCoreProc.startup_handshake", "EngineCoreProc._perform_handshake"),
            Code(CORE, "EngineCoreProc._perform_handshakes", "EngineCoreProc._make_ready_response"),
            Code(CORE, "EngineCoreProc.__init__"),
            Values(CORE, "HANDSHAKE_TIMEOUT_MINS"),
            Code(UTILS, "wait_for_engine_startup"),
            Code("utils/network_utils.py", "make_zmq_socket"),
            Fields("config/kv_events.py", "KVEventsConfig"),
        ),
    ),
    Group(
        "flags",
        (
            "all flags of vllm serve: each is passed to engines, refused, or logged with an "
            "alternative (`every_vllm_flag_has_a_place`)"
        ),
        (
            "crates/chiasm-engine/src/launch/arguments.rs",
            "crates/chiasm-engine/src/launch/engine_flags.rs",
            "crates/chiasm-engine/src/launch/server_flags.rs",
        ),
        (AllFlags(),),
    ),
    Group(
        "start",
        "the headless engine, its flags and its environment",
        (
            "crates/chiasm-engine/src/launch/arguments.rs",
            "crates/chiasm-engine/src/launch/process.rs",
            "crates/chiasm/src/vllm_flags.rs",
            "xtask/src/vllm_env.rs",
        ),
        (
            Flags(
                (
                    "--headless",
                    "--data-parallel-address",
                    "--data-parallel-rpc-port",
                    "--data-parallel-size",
                )
            ),
            Flags(
                (
                    "--mm-processor-cache-type",
                    "--mm-processor-cache-gb",
                    "--kv-events-config",
                    "--enable-prefix-caching",
                )
            ),
            Flags(
                (
                    "--api-server-count",
                    "--mm-processor-kwargs",
                    "--media-io-kwargs",
                    "--mm-device-do-normalize",
                    "--config",
                )
            ),
            Flags(
                (
                    "--block-size",
                    "--max-model-len",
                    "--enforce-eager",
                    "--scheduling-policy",
                    "--generation-config",
                )
            ),
            Values(
                "engine/arg_utils.py",
                "EngineArgs.data_parallel_address",
                "EngineArgs.data_parallel_rpc_port",
            ),
            Values(
                "engine/arg_utils.py",
                "EngineArgs.data_parallel_size",
                "EngineArgs.enable_prefix_caching",
            ),
            Values(
                "engine/arg_utils.py",
                "EngineArgs.mm_processor_cache_type",
                "EngineArgs.mm_processor_cache_gb",
            ),
            Values(
                "engine/arg_utils.py",
                "EngineArgs.mm_device_do_normalize",
                "EngineArgs.kv_events_config",
            ),
            Code(
                "utils/argparse_utils.py",
                "FlexibleArgumentParser.parse_args",
                "FlexibleArgumentParser.load_config_file",
            ),
            Code("utils/argparse_utils.py", "FlexibleArgumentParser._pull_args_from_config"),
            Code("entrypoints/cli/serve.py", "run_headless", "ServeSubcommand.cmd"),
            Code(CORE, "EngineCoreProc.run_engine_core"),
            Variables(
                (
                    "VLLM_TARGET_DEVICE",
                    "VLLM_CPU_KVCACHE_SPACE",
                    "VLLM_CPU_OMP_THREADS_BIND",
                    "VLLM_NO_USAGE_STATS",
                )
            ),
            Variables(("VLLM_LOGGING_LEVEL", "VLLM_PLUGINS")),
        ),
    ),
    Group(
        "plugin",
        "the definitions that chiasm_vllm imports, wraps and replaces",
        (
            "python/chiasm_vllm/chiasm_vllm/engine_hooks.py",
            "python/chiasm_vllm/chiasm_vllm/provider.py",
        ),
        (
            Code("logger.py", "init_logger"),
            Code("plugins/__init__.py", "load_general_plugins", "load_plugins_by_group"),
            Code(
                CORE,
                "EngineCoreProc",
                "EngineCoreProc.process_input_sockets",
                "EngineCore.preprocess_add_request",
            ),
            Code(CORE, "EngineCoreProc._handle_request_preproc_error"),
            Code(
                SERIAL,
                "MsgpackDecoder.__init__",
                "MsgpackDecoder.decode",
                "MsgpackDecoder._decode_tensor",
            ),
            Code("v1/engine/tensor_ipc.py", "TensorIpcReceiver.__call__"),
        ),
    ),
    Group(
        "KV events",
        "the events that an engine publishes about its cache",
        (
            "crates/chiasm-kv/src/event.rs",
            "crates/chiasm-kv/src/event/decode.rs",
            "crates/chiasm-kv/src/subscriber/replay.rs",
            "crates/chiasm-sim-engine/src/kv_publisher.rs",
        ),
        (
            Fields(
                EVENTS,
                "EventBatch",
                "KVEventBatch",
                "KVCacheEvent",
                "BlockStored",
                "BlockRemoved",
                "AllBlocksCleared",
            ),
            Values(EVENTS, "MEDIUM_GPU", "MEDIUM_CPU", "MEDIUM_STORAGE"),
            Code(EVENTS, "ZmqEventPublisher.*", "EventPublisherFactory.create"),
            Code(
                "v1/core/block_pool.py",
                "BlockPool.cache_full_blocks",
                "BlockPool._build_block_stored_event",
            ),
            Code(
                "v1/core/block_pool.py",
                "BlockPool._emit_block_removed_events",
                "BlockPool.take_events",
            ),
            Code(HASHES, "to_event_extra_keys", "maybe_convert_block_hash"),
            Variables(("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES",)),
        ),
    ),
    Group(
        "block hashes",
        "the identity of a block in an engine",
        (
            "crates/chiasm-kv/src/block_key.rs",
            "crates/chiasm-kv/src/index.rs",
            "crates/chiasm-sim-engine/src/block_chain.rs",
            "crates/chiasm-engine-model/src/paged_cache.rs",
        ),
        (
            Code(
                HASHES,
                "generate_block_hash_extra_keys",
                "_gen_mm_extra_hash_keys",
                "_gen_lora_extra_hash_keys",
            ),
            Code(
                HASHES,
                "_gen_prompt_embeds_extra_hash_keys",
                "generate_lookahead_block_hash_extra_keys",
            ),
            Code(
                HASHES,
                "hash_block_tokens",
                "get_request_block_hasher",
                "init_none_hash",
                "resolve_kv_cache_block_sizes",
            ),
            Code(HASHES, "eagle_proof_margin", "partial_hash_hits_enabled"),
            Code("v1/core/kv_cache_manager.py", "KVCacheManager.get_computed_blocks"),
            Code(
                MANAGERS,
                "FullAttentionManager.*",
                "SlidingWindowManager.*",
                "MambaManager.find_longest_cache_hit",
            ),
            Fields("config/cache.py", "PrefixCachingHashAlgo"),
            Values(
                "config/cache.py",
                "CacheConfig.prefix_caching_hash_algo",
                "CacheConfig.enable_prefix_caching",
            ),
            Values("config/cache.py", "CacheConfig.block_size"),
            Code("config/cache.py", "CacheConfig._apply_block_size_default"),
        ),
    ),
    Group(
        "receiver cache",
        "the engine's cache of media items, which a mirror follows",
        ("crates/chiasm-engine/src/mirror.rs", "crates/chiasm-sim-engine/src/receiver_cache.rs"),
        (
            Code(f"{CACHE}/lru.py", "LruKeyReplicatedReceiverCache.*"),
            Code(
                f"{CACHE}/base.py",
                "BaseMultiModalReceiverCache.*",
                "MultiModalCache.*",
                "BaseMultiModalCache.*",
            ),
            Code(f"{CACHE}/base.py", "MultiModalCacheMissError.*"),
            Code(f"{CACHE}/factories.py", "engine_receiver_cache_from_config", "_get_cache_type"),
            Code("utils/cache.py", "LRUCache.*"),
            Values(
                "config/multimodal.py",
                "MultiModalConfig.mm_processor_cache_gb",
                "MultiModalConfig.mm_processor_cache_type",
            ),
        ),
    ),
    Group(
        "scheduler",
        "the tokens that an engine computes per step, and the contents of its caches",
        (
            "crates/chiasm-engine-model/src/batch.rs",
            "crates/chiasm-engine-model/src/paged_cache.rs",
            "crates/chiasm-engine-model/src/free_queue.rs",
            "crates/chiasm-engine-model/src/encoder_cache.rs",
        ),
        (
            Code(HASHES, "FreeKVCacheBlockQueue.*"),
            Code(
                "v1/core/block_pool.py",
                "BlockPool.get_cached_block",
                "BlockPool.get_new_blocks",
                "BlockPool.touch",
            ),
            Code(
                "v1/core/block_pool.py",
                "BlockPool.free_blocks",
                "BlockPool._maybe_evict_cached_block",
            ),
            Code("v1/core/block_pool.py", "BlockPool.reset_prefix_cache"),
            Code(
                "v1/core/encoder_cache_manager.py",
                "EncoderCacheManager.*",
                "compute_mm_encoder_budget",
            ),
            Code(
                "v1/core/sched/scheduler.py",
                "Scheduler.schedule",
                "Scheduler._try_schedule_encoder_inputs",
            ),
            Code(
                "v1/core/sched/scheduler.py",
                "Scheduler._preempt_request",
                "Scheduler.update_from_output",
            ),
            Code("v1/core/sched/scheduler.py", "Scheduler.make_stats"),
        ),
    ),
    Group(
        "embedding store",
        "vLLM's calls of a connector for encoder outputs",
        (
            "python/chiasm_vllm/chiasm_vllm/embedding_store.py",
            "python/chiasm_vllm/tests/test_embedding_store.py",
        ),
        (
            Code(f"{CONNECTOR}/base.py", "ECConnectorBase.*", "ECConnectorMetadata"),
            Code(
                f"{CONNECTOR}/factory.py",
                "ECConnectorFactory.create_connector",
                "ECConnectorFactory.get_connector_class",
            ),
            Fields("config/ec_transfer.py", "ECTransferConfig"),
            Code("v1/worker/ec_connector_model_runner_mixin.py", "ECConnectorModelRunnerMixin.*"),
            Code("v1/worker/gpu/ec_connector.py", "ActiveECConnector.*"),
            Code(
                "v1/core/sched/scheduler.py",
                "Scheduler._allocate_encoder_inputs",
                "Scheduler._ec_transfer_pending",
            ),
            Code("v1/core/sched/scheduler.py", "Scheduler._free_request"),
            Code("v1/outputs.py", "make_empty_encoder_model_runner_output"),
            Code("utils/gpu_sync_debug.py", "gpu_sync_allowed"),
            Code(
                "distributed/parallel_state.py", "get_tensor_model_parallel_rank", "get_pcp_group"
            ),
        ),
    ),
    *FRONTEND,
    *IMAGES,
    *PROCESSORS,
    Group(
        "requirements",
        "the wheel's packages whose results Chiasm reproduces",
        ("python/vllm_env/requirements.txt",),
        (
            Requirements(
                (
                    "transformers",
                    "tokenizers",
                    "mistral_common",
                    "Pillow",
                    "torch",
                    "torchvision",
                    "numpy",
                )
            ),
            Requirements(("msgspec", "pyzmq")),
        ),
    ),
)
