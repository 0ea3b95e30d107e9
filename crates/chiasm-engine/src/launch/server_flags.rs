//! Flags that say something to vLLM's server. A headless engine takes them all, and answers are as if they weren't there.

use super::arguments::{is_flag, is_flag_in_full};

/// A flag of vLLM's that says something to its server.
#[derive(Debug, PartialEq, Eq)]
pub struct ServerFlag {
    /// The flag; one ending in `*` stands for all that start so.
    pub name: &'static str,
    /// What to do instead.
    pub instead: &'static str,
    /// Whether an engine is not started with it: who gives it may rely on it, as on a key that would protect nothing.
    pub is_refused: bool,
}

const BEFORE: &str = "an engine has no server; give it to Chiasm, before --, if Chiasm has it (docs/from-vllm.md)";
const SAME: &str = "give it before --, where it has the same name";
const FOUND_OUT: &str = "Chiasm finds it out, or is told by --tool-call-parser before --";
const NONE: &str = "Chiasm has no such flag (docs/from-vllm.md)";
const LOGGED: &str = "Chiasm logs by the variable CHIASM_LOG, and neither prompts nor answers";
const OF_THE_MODEL: &str = "Chiasm takes what is in the folder of MODEL";

const fn refused(name: &'static str) -> ServerFlag {
    ServerFlag { name, instead: BEFORE, is_refused: true }
}

const fn ignored(name: &'static str, instead: &'static str) -> ServerFlag {
    ServerFlag { name, instead, is_refused: false }
}

/// Those of vLLM 0.33 (`entrypoints/common/cli_args.py`, and of `engine/arg_utils.py` what its server reads), but for those that ask for
/// what Chiasm does in any case.
const FLAGS: [ServerFlag; 59] = [
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
    ignored("--tool-call-parser", SAME),
    // An engine finds with it where reasoning ends, and the server what to tell of it.
    ignored("--reasoning-parser", "it is for engines alone there; give it before --, from where they are told, too"),
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
];

impl ServerFlag {
    /// The flag that an argument is, in any spelling.
    pub fn of(argument: &str) -> Option<&'static Self> {
        let exactly = FLAGS.iter().find(|flag| is_flag_in_full(argument, flag.name));
        exactly.or_else(|| FLAGS.iter().find(|flag| is_flag(argument, flag.name)))
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
        assert_eq!(name("--override-generation-config.temperature"), Some("--override-generation-config*"));
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
            "--otlp-traces-endpoint",
            "-tp",
            "hermes",
            "--logprobs-mode",
        ];
        for flag in of_engines {
            assert_eq!(name(flag), None, "{flag}");
        }
    }
}
