//! Whose flags are whose: `chiasm serve` and `chiasm agent` are read by one definition, and each
//! has no use for some of it.

use clap::Arg;

/// The parts of what `chiasm serve` takes that an agent has no use for: it speaks to frontends
/// alone.
const NOT_OF_AGENTS: [&str; 5] = ["Access", "HTTP", "Traces", "Prompts", "vLLM's processor"];
const NOR_THESE: [&str; 11] = [
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
/// What concerns agents alone.
const NOT_OF_FRONTENDS: [&str; 4] = ["announce", "announce_address", "take_tensors", "fetch_media"];
/// Of the first, what concerns tensors that frontends have made.
const BUT_THESE: [&str; 2] = ["processor", "processor_item_bytes"];

/// Whether an agent has no use for a flag.
pub(super) fn is_not_of_agents(arg: &Arg) -> bool {
    let id = arg.get_id().as_str();
    let is_of_others =
        arg.get_help_heading().is_some_and(|heading| NOT_OF_AGENTS.contains(&heading));
    NOR_THESE.contains(&id) || (is_of_others && !BUT_THESE.contains(&id))
}

/// Whether a frontend has no use for a flag.
pub(super) fn is_not_of_frontends(arg: &Arg) -> bool {
    NOT_OF_FRONTENDS.contains(&arg.get_id().as_str())
}
