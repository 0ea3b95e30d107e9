//! The flags that only frontends or only agents have. `chiasm serve` and `chiasm agent` share one
//! definition of flags.

use clap::Arg;

/// The help headings whose flags are for frontends only, as agents don't talk to clients.
const FRONTEND_HEADINGS: [&str; 4] = ["Access", "HTTP", "Traces", "Prompts"];
/// The flags under other headings that are for frontends only.
const FRONTEND_FLAGS: [&str; 53] = [
    "upstream",
    "dynamo_tensors_gb",
    "agents",
    "discovery",
    "served_model_name",
    "agent_tls_name",
    "slo_ttft",
    "slo_itl",
    "allow_runtime_lora_updating",
    "reasoning_fields",
    "enable_force_include_usage",
    "max_body_bytes",
    "max_json_values",
    "max_messages",
    "max_content_parts",
    "body_timeout",
    "min_body_rate",
    "max_connections",
    "head_timeout",
    "write_timeout",
    "max_requests",
    "trusted_proxies",
    "max_request_cost",
    "first_token_timeout",
    "request_timeout",
    "quarantine",
    "drain_delay",
    "policy",
    "prefill_weight",
    "fetch_weight",
    "encode_weight",
    "process_weight",
    "queue_weight",
    "load_weight",
    "balance_weight",
    "decode_steps_per_second",
    "decode_read_per_block",
    "routing_temperature",
    "busy_kv_usage",
    "busy_pending_tokens",
    "busy_waiting",
    "busy_status",
    "session_header",
    "max_sessions",
    "transfer_weight",
    "network_transfer_weight",
    "hop_weight",
    "disturb_weight",
    "limit_mm_per_prompt",
    "agent_media",
    "tool_call_parser",
    "max_audio_seconds",
    "trust_request_mm_kwargs",
];
/// The flags that are for agents only.
const AGENT_FLAGS: [&str; 4] = ["announce", "announce_address", "take_tensors", "fetch_media"];

/// Returns `true` if a flag is for frontends only.
pub(super) fn is_frontend_only(arg: &Arg) -> bool {
    let id = arg.get_id().as_str();
    let has_frontend_heading =
        arg.get_help_heading().is_some_and(|heading| FRONTEND_HEADINGS.contains(&heading));
    has_frontend_heading || FRONTEND_FLAGS.contains(&id)
}

/// Returns `true` if a flag is for agents only.
pub(super) fn is_agent_only(arg: &Arg) -> bool {
    AGENT_FLAGS.contains(&arg.get_id().as_str())
}
