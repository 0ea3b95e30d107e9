//! Groups of engines, which `--data-parallel-size` behind `--` asks for: one launched engine then
//! is a group of engines that step together.

use std::path::Path;
use std::sync::Arc;

use chiasm_engine::group::{EngineGroup, MAX_GROUP_SIZE};
use chiasm_types::Role;
use serde_json::Value;

use super::gpus::{VISIBLE_GPUS, check_gpu_count};
use crate::cli::{EngineCounts, ServeArgs};
use crate::error::CliError;
use crate::vllm_flags::FlagArg;

/// vLLM's flag for the size of groups, and its short form.
const GROUP_SIZE: [&str; 2] = ["--data-parallel-size", "-dp"];
/// vLLM's flag for the way in which it starts the processes of an engine.
const EXECUTOR: &str = "--distributed-executor-backend";
/// The flags of vLLM that multiply the number of GPUs of one engine.
const GPU_FACTORS: [&str; 3] =
    ["--tensor-parallel-size", "--pipeline-parallel-size", "--prefill-context-parallel-size"];
/// The files of the drivers of NVIDIA and AMD, which exist where there are GPUs.
const GPU_DRIVERS: [&str; 2] = ["/dev/nvidiactl", "/dev/kfd"];
/// The names of the number of experts in a model's configuration (`CONFIG_FIELD_ALIASES` in vLLM's
/// `transformers_utils/config.py`).
const EXPERTS: [&str; 4] =
    ["num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts"];
/// The maximum nesting of a configuration's sections: a text model inside a thinker inside a model.
const MAX_SECTIONS: usize = 4;

/// The reason why groups have no LoRA adapters (`prepare_finalize/naive_dp_ep.py` in vLLM).
const LORA_REASON: &str =
    "slots of adapters differ between engines, and experts would apply the wrong adapter";

/// Flags of vLLM that groups do not support, with the reasons.
const UNSUPPORTED: [(&str, &str); 5] = [
    ("--enable-elastic-ep", "the number of engines of a group can't change while they run"),
    (
        "--enable-fault-tolerance",
        "engines would wait for orders instead of ending; a group starts again as a whole",
    ),
    ("--enable-lora", LORA_REASON),
    (
        "--device-ids",
        "each engine of a group has its own GPUs, taken in order from CUDA_VISIBLE_DEVICES",
    ),
    ("--config", "Chiasm would not know its flags; give them after --"),
];

/// Returns the number of engines in each group, as the flags behind `--` have it; 1 without groups.
///
/// # Errors
/// [`CliError::Usage`] for a value that is no number, or too large.
pub(super) fn group_size(vllm_args: &[String]) -> Result<u16, CliError> {
    let Some(text) = flag_value(vllm_args, is_size) else { return Ok(1) };
    text.parse().ok().filter(|size| (1..=MAX_GROUP_SIZE).contains(size)).ok_or_else(|| {
        CliError::Usage(format!("{} after -- must be from 1 to {MAX_GROUP_SIZE}", GROUP_SIZE[0]))
    })
}

/// Returns the flags behind `--` without the size of groups, which Chiasm passes itself.
pub(super) fn without_group_size(vllm_args: &[String]) -> Vec<String> {
    let mut others = Vec::with_capacity(vllm_args.len());
    let mut args = vllm_args.iter();
    while let Some(arg) = args.next() {
        if !is_size(arg) {
            others.push(arg.clone());
        } else if !arg.contains('=') {
            args.next();
        }
    }
    others
}

/// Checks that groups can have the given flags, and that the model's engines step together.
///
/// # Errors
/// [`CliError::Usage`] names a flag that groups do not support; [`CliError::File`] names a file of
/// the model that can't be read.
pub(super) fn check(args: &ServeArgs) -> Result<(), CliError> {
    let size = group_size(&args.vllm_args)?;
    if size == 1 {
        return Ok(());
    }
    let refused = |what: &str, reason: &str| {
        let flag = GROUP_SIZE[0];
        Err(CliError::Usage(format!("{what} is not supported with {flag} {size}: {reason}")))
    };
    let engines = &args.engines;
    if !engines.attach.is_empty() {
        return refused("--attach", "Chiasm starts all engines of a group");
    }
    let counts = engines.sim.clone().unwrap_or_else(|| args.launched());
    if counts.total() == 0 {
        return Ok(());
    }
    if engines.keep_engines.is_some() {
        return refused("--keep-engines", "a group ends with this process");
    }
    if engines.share_gpu {
        return refused("--share-gpu", "the engines of a group start at the same time");
    }
    if counts.roles().any(|role| role != Role::Aggregated) {
        return refused("a role of engines", "the engines of a group compute whole requests");
    }
    let flags: Vec<_> = args.vllm_args.iter().filter_map(|arg| FlagArg::parse(arg)).collect();
    for (name, reason) in UNSUPPORTED {
        // `--device` is a flag of its own in older releases.
        if flags.iter().any(|flag| flag.matches(name) && flag.name != "--device") {
            return refused(name, reason);
        }
    }
    if flag_value(&args.vllm_args, |arg| is_named(arg, EXECUTOR)) == Some("ray") {
        return refused(&format!("{EXECUTOR} ray"), "Ray chooses the GPUs, not --device-ids");
    }
    if args.lora.needs_adapters() {
        return refused("LoRA", LORA_REASON);
    }
    // The demo's model, which simulated engines often have, has no experts.
    if engines.sim.is_none() && !has_experts(&args.model)? {
        let flag = GROUP_SIZE[0];
        return Err(CliError::Usage(format!(
            "{flag} {size} is for models with experts: the engines of this one need nothing of \
             each other. Use --engines {size} instead"
        )));
    }
    Ok(())
}

/// Returns the groups of these engines; `None` if engines are on their own.
///
/// # Errors
/// [`CliError::Usage`] for a group size that is no number, or too large.
pub(super) fn groups(
    args: &ServeArgs,
    engines: &EngineCounts,
) -> Result<Option<Vec<Arc<EngineGroup>>>, CliError> {
    let size = group_size(&args.vllm_args)?;
    let max_silence = args.engines.engine_hang_timeout;
    let group = |(index, _)| EngineGroup::new(index, size, max_silence);
    Ok((size > 1).then(|| (0..).zip(engines.roles()).map(group).collect()))
}

/// Returns the GPUs of a rank of the group with this index, as `--device-ids`: indices into the
/// GPUs that this process sees. `None` without GPUs.
///
/// # Errors
/// [`CliError::Usage`] if there are too few GPUs, or if they can't be divided evenly.
pub(super) fn gpus_of_rank(
    args: &ServeArgs,
    index: u32,
    size: u16,
    rank: u16,
) -> Result<Option<Vec<String>>, CliError> {
    let visible = std::env::var(VISIBLE_GPUS).ok();
    let has_gpus = || {
        visible.as_deref() != Some("")
            && GPU_DRIVERS.iter().any(|driver| Path::new(driver).exists())
    };
    let Some(count) = args
        .engines
        .gpus_per_engine
        .or_else(|| has_gpus().then(|| gpus_per_rank(&args.vllm_args).saturating_mul(size.into())))
    else {
        return Ok(None);
    };
    check_gpu_count(
        (index + 1).saturating_mul(count),
        "groups of engines need",
        visible.as_deref(),
    )?;
    let size = u32::from(size);
    if count % size != 0 {
        return Err(CliError::Usage(format!(
            "--gpus-per-engine {count} can't be divided among the {size} engines of a group"
        )));
    }
    let first = index.saturating_mul(count) + u32::from(rank) * (count / size);
    Ok(Some((first..first + count / size).map(|gpu| gpu.to_string()).collect()))
}

/// Returns the number of GPUs that one engine takes with these flags.
fn gpus_per_rank(vllm_args: &[String]) -> u32 {
    let factor = |name: &&str| {
        flag_value(vllm_args, |arg| is_named(arg, name))
            .and_then(|text| text.parse().ok())
            .unwrap_or(1_u32)
    };
    GPU_FACTORS.iter().map(factor).fold(1, u32::saturating_mul).max(1)
}

/// Returns `true` if a model's layers have experts, which engines of a group divide.
fn has_experts(model: &Path) -> Result<bool, CliError> {
    let path = model.join("config.json");
    let read_error = |source: std::io::Error| CliError::File { path: path.clone(), source };
    let text = std::fs::read(&path).map_err(read_error)?;
    let config: Value =
        serde_json::from_slice(&text).map_err(|error| read_error(std::io::Error::other(error)))?;
    Ok(has_experts_in(&config, MAX_SECTIONS))
}

/// Returns `true` if a section of a configuration, or a section inside it, has a number of experts.
/// Sections may be in lists, such as `block_configs`.
fn has_experts_in(section: &Value, depth: usize) -> bool {
    let count = |value: &Value| value.as_u64().or_else(|| value.get(0)?.as_u64());
    let has_count = |name: &&str| section.get(*name).and_then(count).is_some_and(|it| it > 0);
    match section {
        _ if depth == 0 => false,
        Value::Object(inner) => {
            EXPERTS.iter().any(has_count)
                || inner.values().any(|inner| has_experts_in(inner, depth - 1))
        }
        Value::Array(inner) => inner.iter().any(|inner| has_experts_in(inner, depth - 1)),
        _ => false,
    }
}

fn is_size(arg: &str) -> bool {
    let name = arg.split('=').next().unwrap_or_default().replace('_', "-");
    GROUP_SIZE.contains(&name.as_str())
}

/// Returns `true` if an argument is this flag, or an abbreviation of it.
fn is_named(arg: &str, name: &str) -> bool {
    FlagArg::parse(arg).is_some_and(|flag| flag.matches(name))
}

/// Returns the value of the last flag that `is_flag` selects, written `--flag=value` or
/// `--flag value`.
fn flag_value(vllm_args: &[String], is_flag: impl Fn(&str) -> bool) -> Option<&str> {
    let index = vllm_args.iter().rposition(|arg| is_flag(arg))?;
    match vllm_args[index].split_once('=') {
        Some((_, value)) => Some(value),
        None => Some(vllm_args.get(index + 1).map_or("", String::as_str)),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn args(text: &str) -> Vec<String> {
        text.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn size_is_taken_from_vllm_flags() {
        for (text, size, others) in [
            ("--dtype half", 1, "--dtype half"),
            ("--data-parallel-size 4 --dtype half", 4, "--dtype half"),
            ("--dtype half --data_parallel_size=8", 8, "--dtype half"),
            ("-dp 2 -ep", 2, "-ep"),
            ("-dp=2 -dp=3", 3, ""),
        ] {
            assert_eq!(group_size(&args(text)).unwrap(), size, "{text}");
            assert_eq!(without_group_size(&args(text)), args(others), "{text}");
        }
        for text in ["-dp", "-dp x", "--data-parallel-size=0", "-dp 65"] {
            assert!(matches!(group_size(&args(text)), Err(CliError::Usage(_))), "{text}");
        }
    }

    #[test]
    fn gpus_are_multiplied_by_parallel_sizes() {
        assert_eq!(gpus_per_rank(&args("-tp 2 --pipeline-parallel-size=3 --dtype half")), 6);
        assert_eq!(gpus_per_rank(&args("--tensor-par 4")), 4);
        assert_eq!(gpus_per_rank(&[]), 1);
    }

    #[test]
    fn experts_are_counted_in_sections() {
        for (config, expected) in [
            (json!({"num_experts": 8}), true),
            (json!({"text_config": {"n_routed_experts": 64}}), true),
            (json!({"thinker_config": {"text_config": {"num_local_experts": [8, 8]}}}), true),
            (json!({"block_configs": [{}, {"n_routed_experts": 8}]}), true),
            (json!({"num_experts": 0, "text_config": {"num_experts": null}}), false),
            (json!({"text_config": {"hidden_size": 8}}), false),
        ] {
            assert_eq!(has_experts_in(&config, MAX_SECTIONS), expected, "{config}");
        }
    }
}
