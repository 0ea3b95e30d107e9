//! The flags that only frontends or only agents have. `chiasm serve` and `chiasm agent` share one
//! definition of flags.

use clap::Arg;

/// The help headings whose flags are for frontends only, as agents don't talk to clients.
const FRONTEND_HEADINGS: [&str; 5] = ["Access", "HTTP", "Traces", "Prompts", "vLLM's processor"];
/// The flags under other headings that are for frontends only.
const FRONTEND_FLAGS: [&str; 11] = [
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
];
/// The flags under [`FRONTEND_HEADINGS`] that agents have, too: they limit tensors from frontends.
const SHARED_FLAGS: [&str; 2] = ["processor", "processor_item_bytes"];
/// The flags that are for agents only.
const AGENT_FLAGS: [&str; 4] = ["announce", "announce_address", "take_tensors", "fetch_media"];

/// Returns `true` if a flag is for frontends only.
pub(super) fn is_frontend_only(arg: &Arg) -> bool {
    let id = arg.get_id().as_str();
    let has_frontend_heading =
        arg.get_help_heading().is_some_and(|heading| FRONTEND_HEADINGS.contains(&heading));
    FRONTEND_FLAGS.contains(&id) || (has_frontend_heading && !SHARED_FLAGS.contains(&id))
}

/// Returns `true` if a flag is for agents only.
pub(super) fn is_agent_only(arg: &Arg) -> bool {
    AGENT_FLAGS.contains(&arg.get_id().as_str())
}
