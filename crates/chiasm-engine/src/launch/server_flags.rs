//! The flags of vLLM's API server. A headless engine accepts all of them, without any effect on
//! answers.

use super::spelling::{is_flag, is_flag_in_full};

/// A flag of vLLM's API server.
#[derive(Debug, PartialEq, Eq)]
pub struct ServerFlag {
    /// The flag; one that ends in `*` stands for all flags with that prefix.
    pub name: &'static str,
    /// The alternative.
    pub instead: &'static str,
    /// `true` if no engine is started with the flag, because the user may rely on its effect: an
    /// API key, for instance, would protect nothing.
    pub is_refused: bool,
}

const NO_SERVER: &str = "an engine has no server; if Chiasm has the flag (docs/from-vllm.md), give \
                         it before -- (in a file: beside vllm-args)";
const SAME_NAME: &str =
    "give it before -- (in a file: beside vllm-args), where it has the same name";
const DETECTED: &str = "Chiasm detects it, unless --tool-call-parser is given before -- (in a \
                        file: beside vllm-args)";
const CLIENT_CERTIFICATES: &str =
    "Chiasm checks no client certificates; let a proxy in front of it check them";
const UNSUPPORTED: &str = "Chiasm has no such flag (docs/from-vllm.md)";
const LOGGING: &str = "Chiasm logs by the variable CHIASM_LOG, and neither prompts nor answers";
const MODEL_FOLDER: &str = "Chiasm takes what is in the folder of MODEL";

const METRICS: &str = "Chiasm's metrics are its own (docs/metrics.md), and an engine prints none";
const TENSORS: &str = "Chiasm makes tensors itself, see its --cpu-threads and --processors";
const EMBEDDINGS: &str = "Chiasm takes no embeddings in requests";
const HIDDEN: &str = "Chiasm's answers do not show it";

const fn refused(name: &'static str) -> ServerFlag {
    refused_with(name, NO_SERVER)
}

const fn refused_with(name: &'static str, instead: &'static str) -> ServerFlag {
    ServerFlag { name, instead, is_refused: true }
}

const fn ignored(name: &'static str, instead: &'static str) -> ServerFlag {
    ServerFlag { name, instead, is_refused: false }
}

/// The server flags of vLLM 0.33: those of `entrypoints/common/cli_args.py`, and those of
/// `engine/arg_utils.py` that the server reads. Flags for features that Chiasm always has are not
/// listed.
const FLAGS: [ServerFlag; 89] = [
    refused("--host"),
    refused("--port"),
    refused("--uds"),
    refused("--api-key"),
    refused_with("--ssl-ca-certs", CLIENT_CERTIFICATES),
    refused_with("--ssl-cert-reqs", CLIENT_CERTIFICATES),
    refused("--ssl-*"),
    refused("--root-path"),
    refused("--allowed-origins"),
    refused("--allowed-methods"),
    refused("--allowed-headers"),
    refused("--allow-credentials"),
    refused("--chat-template"),
    refused("--chat-template-content-format"),
    refused("--default-chat-template-kwargs*"),
    refused("--exclude-tools-when-tool-choice-none"),
    refused("--enable-force-include-usage"),
    refused("--lora-modules"),
    refused("--allowed-local-media-path"),
    refused("--allowed-media-domains"),
    refused("--trust-request-mm-kwargs"),
    // Limits that protect a service. vLLM's API server enforces them (`v1/engine/async_llm.py`,
    // 0.32).
    refused_with(
        "--max-num-queued-reqs",
        "give Chiasm --max-requests; more requests in flight get 503",
    ),
    refused_with(
        "--max-num-queued-tokens",
        "give Chiasm --busy-pending-tokens, the limit of one engine",
    ),
    refused_with(
        "--interleave-mm-strings",
        "Chiasm puts placeholders before the text, as vLLM does without it",
    ),
    ignored("--tool-call-parser", SAME_NAME),
    // Engines use it to find the end of reasoning, the server to parse answers.
    ignored(
        "--reasoning-parser",
        "behind -- it is for engines only; give it before -- (in a file: beside vllm-args), and \
         Chiasm passes it on to engines",
    ),
    ignored("--reasoning-parser-plugin", UNSUPPORTED),
    ignored("--enable-auto-tool-choice", DETECTED),
    ignored("--served-model-name", SAME_NAME),
    ignored("--tokenizer", MODEL_FOLDER),
    ignored("--tokenizer-revision", MODEL_FOLDER),
    ignored("--generation-config", MODEL_FOLDER),
    ignored("--override-generation-config*", MODEL_FOLDER),
    ignored("--max-logprobs", "Chiasm answers with 20 at most, as vLLM by default"),
    ignored("--max-log-len", LOGGING),
    ignored("--enable-log-requests", LOGGING),
    ignored("--enable-log-outputs", LOGGING),
    ignored("--enable-log-deltas", LOGGING),
    ignored("--log-error-stack", LOGGING),
    ignored("--uvicorn-log-level", LOGGING),
    ignored("--disable-uvicorn-access-log", LOGGING),
    ignored("--disable-access-log-for-endpoints", LOGGING),
    ignored("--h11-max-*", "Chiasm's limits have other flags (docs/api.md)"),
    ignored("--trust-request-chat-template", UNSUPPORTED),
    ignored("--response-role", UNSUPPORTED),
    ignored("--return-tokens-as-token-ids", UNSUPPORTED),
    ignored("--reasoning-effort-map*", UNSUPPORTED),
    ignored("--tool-strict-level", UNSUPPORTED),
    ignored("--tool-parser-plugin", UNSUPPORTED),
    ignored("--tool-server", UNSUPPORTED),
    ignored("--middleware", UNSUPPORTED),
    ignored("--grpc", UNSUPPORTED),
    ignored("--grpc-port", UNSUPPORTED),
    ignored("--enable-per-request-metrics", UNSUPPORTED),
    ignored("--enable-server-load-tracking", UNSUPPORTED),
    ignored("--enable-tokenizer-info-endpoint", UNSUPPORTED),
    ignored("--sse-keep-alive-interval", UNSUPPORTED),
    ignored("--fingerprint-*", UNSUPPORTED),
    ignored("--cohere-*", UNSUPPORTED),
    ignored("--anthropic-disabled-thinking-effort", UNSUPPORTED),
    ignored("--tokens-only", UNSUPPORTED),
    ignored("--enable-scale-out", UNSUPPORTED),
    ignored("--disable-fastapi-docs", UNSUPPORTED),
    ignored("--enable-offline-docs", UNSUPPORTED),
    ignored("--enable-flash-late-interaction", UNSUPPORTED),
    ignored("--io-processor-plugin", UNSUPPORTED),
    ignored("--dp-supervisor-*", UNSUPPORTED),
    ignored("--otlp-traces-endpoint", SAME_NAME),
    ignored("--aggregate-engine-logging", LOGGING),
    ignored("--show-hidden-metrics-for-version", METRICS),
    ignored("--custom-histogram-buckets", METRICS),
    ignored("--kv-cache-metrics*", METRICS),
    ignored("--cudagraph-metrics", METRICS),
    ignored("--enable-mfu-metrics", METRICS),
    ignored("--per-request-spec-decode-metrics", METRICS),
    ignored("--stream-interval", "Chiasm sends tokens as they come"),
    ignored("--renderer-num-workers", TENSORS),
    ignored("--mm-processor-device", TENSORS),
    ignored("--mm-tensor-ipc", TENSORS),
    ignored("--mm-ipc-gpu-memory-gb", TENSORS),
    ignored(
        "--mm-hasher-algorithm",
        "Chiasm names media items by BLAKE3, whatever engines hash with",
    ),
    ignored(
        "--mm-shm-cache-max-object-size-mb",
        "the size of an engine's cache is Chiasm's --receiver-cache-gb",
    ),
    ignored("--enable-prompt-embeds", EMBEDDINGS),
    ignored("--enable-mm-embeds", EMBEDDINGS),
    ignored("--return-sampling-mask", HIDDEN),
    ignored("--enable-return-routed-experts", HIDDEN),
    ignored("--hf-config-path", MODEL_FOLDER),
    ignored("--hf-token", "Chiasm downloads the model, with the variable HF_TOKEN"),
    ignored("--download-dir", "Chiasm downloads the model, to where the variable HF_HOME says"),
];

impl ServerFlag {
    /// Returns the names of all flags.
    pub(super) fn names() -> impl Iterator<Item = &'static str> {
        FLAGS.iter().map(|flag| flag.name)
    }

    /// Returns the flag that an argument gives in full.
    pub(super) fn find_in_full(argument: &str) -> Option<&'static Self> {
        FLAGS.iter().find(|flag| is_flag_in_full(argument, flag.name))
    }

    /// Returns the flag that an argument gives, in full or abbreviated.
    pub fn find(argument: &str) -> Option<&'static Self> {
        Self::find_in_full(argument)
            .or_else(|| FLAGS.iter().find(|flag| is_flag(argument, flag.name)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(argument: &str) -> Option<&'static str> {
        ServerFlag::find(argument).map(|flag| flag.name)
    }

    #[test]
    fn server_flags_are_found_in_every_spelling() {
        for flag in &FLAGS {
            assert_eq!(name(flag.name.trim_end_matches('*')), Some(flag.name));
        }
        assert_eq!(name("--tool_call_parser=hermes"), Some("--tool-call-parser"));
        assert_eq!(name("--enable-auto"), Some("--enable-auto-tool-choice"));
        assert_eq!(
            name("--override-generation-config.temperature"),
            Some("--override-generation-config*")
        );
        assert_eq!(name("--ssl_keyfile"), Some("--ssl-*"));
    }

    #[test]
    fn alternatives_hold_in_files_too() {
        for flag in FLAGS.iter().filter(|flag| flag.instead.contains("before --")) {
            let place = "before -- (in a file: beside vllm-args)";
            assert!(flag.instead.contains(place), "{}: {}", flag.name, flag.instead);
        }
    }

    #[test]
    fn engine_flags_are_not_server_flags() {
        let engine_flags = [
            "--tokenizer-mode",
            "--trust-remote-code",
            "--max-model-len",
            "--enable-lora",
            "--max-loras",
            "--log-level",
            "--revision",
            "--enable-sleep-mode",
            "-tp",
            "hermes",
            "--logprobs-mode",
        ];
        for flag in engine_flags {
            assert_eq!(name(flag), None, "{flag}");
        }
    }
}
