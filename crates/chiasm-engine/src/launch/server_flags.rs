//! Flags that say something to vLLM's server. A headless engine takes them all, and answers are as
//! if they weren't there.

use super::spelling::{is_flag, is_flag_in_full};

/// A flag of vLLM's that says something to its server.
#[derive(Debug, PartialEq, Eq)]
pub struct ServerFlag {
    /// The flag; one ending in `*` stands for all that start so.
    pub name: &'static str,
    /// What to do instead.
    pub instead: &'static str,
    /// Whether an engine is not started with it: who gives it may rely on it, as on a key that
    /// would protect nothing.
    pub is_refused: bool,
}

const BEFORE: &str =
    "an engine has no server; give it to Chiasm, before --, if Chiasm has it (docs/from-vllm.md)";
const SAME: &str = "give it before --, where it has the same name";
const FOUND_OUT: &str = "Chiasm finds it out, or is told by --tool-call-parser before --";
const NONE: &str = "Chiasm has no such flag (docs/from-vllm.md)";
const LOGGED: &str = "Chiasm logs by the variable CHIASM_LOG, and neither prompts nor answers";
const OF_THE_MODEL: &str = "Chiasm takes what is in the folder of MODEL";

const METRICS: &str = "Chiasm's metrics are its own (docs/metrics.md), and an engine prints none";
const TENSORS: &str = "Chiasm makes tensors itself, see --cpu-threads and --processors before --";
const EMBEDDINGS: &str = "Chiasm takes no embeddings in requests";
const HIDDEN: &str = "Chiasm's answers do not show it";

const fn refused(name: &'static str) -> ServerFlag {
    refused_for(name, BEFORE)
}

const fn refused_for(name: &'static str, instead: &'static str) -> ServerFlag {
    ServerFlag { name, instead, is_refused: true }
}

const fn ignored(name: &'static str, instead: &'static str) -> ServerFlag {
    ServerFlag { name, instead, is_refused: false }
}

/// Those of vLLM 0.33 (`entrypoints/common/cli_args.py`, and of `engine/arg_utils.py` what its
/// server reads), but for those that ask for what Chiasm does in any case.
const FLAGS: [ServerFlag; 87] = [
    refused("--host"),
    refused("--port"),
    refused("--uds"),
    refused("--api-key"),
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
    // Limits that protect a service, held in vLLM's API server (`v1/engine/async_llm.py`, 0.32).
    refused_for(
        "--max-num-queued-reqs",
        "give --max-requests before --: more requests in flight get 503",
    ),
    refused_for(
        "--max-num-queued-tokens",
        "give --busy-pending-tokens before --, the limit of one engine",
    ),
    refused_for(
        "--interleave-mm-strings",
        "Chiasm puts placeholders before the text, as vLLM does without it",
    ),
    ignored("--tool-call-parser", SAME),
    // An engine finds with it where reasoning ends, and the server what to tell of it.
    ignored(
        "--reasoning-parser",
        "it is for engines alone there; give it before --, from where they are told, too",
    ),
    ignored("--reasoning-parser-plugin", NONE),
    ignored("--enable-auto-tool-choice", FOUND_OUT),
    ignored("--served-model-name", SAME),
    ignored("--tokenizer", OF_THE_MODEL),
    ignored("--tokenizer-revision", OF_THE_MODEL),
    ignored("--generation-config", OF_THE_MODEL),
    ignored("--override-generation-config*", OF_THE_MODEL),
    ignored("--max-logprobs", "Chiasm answers with 20 at most, as vLLM by default"),
    ignored("--max-log-len", LOGGED),
    ignored("--enable-log-requests", LOGGED),
    ignored("--enable-log-outputs", LOGGED),
    ignored("--enable-log-deltas", LOGGED),
    ignored("--log-error-stack", LOGGED),
    ignored("--uvicorn-log-level", LOGGED),
    ignored("--disable-uvicorn-access-log", LOGGED),
    ignored("--disable-access-log-for-endpoints", LOGGED),
    ignored("--h11-max-*", "Chiasm's limits have other flags (docs/serving.md)"),
    ignored("--trust-request-chat-template", NONE),
    ignored("--response-role", NONE),
    ignored("--return-tokens-as-token-ids", NONE),
    ignored("--reasoning-effort-map*", NONE),
    ignored("--tool-strict-level", NONE),
    ignored("--tool-parser-plugin", NONE),
    ignored("--tool-server", NONE),
    ignored("--middleware", NONE),
    ignored("--grpc", NONE),
    ignored("--grpc-port", NONE),
    ignored("--enable-per-request-metrics", NONE),
    ignored("--enable-server-load-tracking", NONE),
    ignored("--enable-tokenizer-info-endpoint", NONE),
    ignored("--sse-keep-alive-interval", NONE),
    ignored("--fingerprint-*", NONE),
    ignored("--cohere-*", NONE),
    ignored("--anthropic-disabled-thinking-effort", NONE),
    ignored("--tokens-only", NONE),
    ignored("--enable-scale-out", NONE),
    ignored("--disable-fastapi-docs", NONE),
    ignored("--enable-offline-docs", NONE),
    ignored("--enable-flash-late-interaction", NONE),
    ignored("--io-processor-plugin", NONE),
    ignored("--dp-supervisor-*", NONE),
    ignored("--otlp-traces-endpoint", SAME),
    ignored("--aggregate-engine-logging", LOGGED),
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
        "the size of an engine's cache is --receiver-cache-gb before --",
    ),
    ignored("--enable-prompt-embeds", EMBEDDINGS),
    ignored("--enable-mm-embeds", EMBEDDINGS),
    ignored("--return-sampling-mask", HIDDEN),
    ignored("--enable-return-routed-experts", HIDDEN),
    ignored("--hf-config-path", OF_THE_MODEL),
    ignored("--hf-token", "Chiasm downloads the model, with the variable HF_TOKEN"),
    ignored("--download-dir", "Chiasm downloads the model, to where the variable HF_HOME says"),
];

impl ServerFlag {
    /// Returns the flag that an argument spells out.
    pub(super) fn in_full(argument: &str) -> Option<&'static Self> {
        FLAGS.iter().find(|flag| is_flag_in_full(argument, flag.name))
    }

    /// The flag that an argument is, in any spelling.
    pub fn of(argument: &str) -> Option<&'static Self> {
        Self::in_full(argument).or_else(|| FLAGS.iter().find(|flag| is_flag(argument, flag.name)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(argument: &str) -> Option<&'static str> {
        ServerFlag::of(argument).map(|flag| flag.name)
    }

    #[test]
    fn flags_are_known_in_every_spelling() {
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
    fn flags_of_engines_are_none_of_them() {
        let of_engines = [
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
        for flag in of_engines {
            assert_eq!(name(flag), None, "{flag}");
        }
    }
}
