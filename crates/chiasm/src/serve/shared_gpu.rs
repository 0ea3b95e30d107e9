//! Engines that share a GPU: each engine's share of its memory.

use chiasm_engine::LaunchHost;

use crate::cli::{EngineCounts, ServeArgs};
use crate::error::CliError;
use crate::vllm_flags::FlagArg;

/// vLLM's flag for the fraction of a GPU's memory that an engine takes, regardless of other
/// processes.
const UTILIZATION_FLAG: &str = "--gpu-memory-utilization";
/// Another name of that flag in vLLM.
const UTILIZATION_ALIAS: &str = "--device-memory-utilization";
/// The fraction that all engines share by default. It is slightly below vLLM's default for one
/// engine (0.92), because each engine also needs memory for CUDA graphs and a CUDA context, which
/// vLLM does not count.
const TOTAL_FRACTION: f64 = 0.9;
/// The minimum share of an engine; even the weights of a small model are larger.
const MIN_FRACTION: f64 = 0.01;

/// The shares of the engines on one GPU.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct GpuShares {
    /// The fraction for engines whose flags set none; `None` if all flags set one.
    default_fraction: Option<f64>,
}

impl GpuShares {
    /// Divides the memory that the operator has not assigned by flags among the other engines.
    ///
    /// # Errors
    /// [`CliError::Usage`] if the memory is not enough, or if a fraction is not a number.
    pub(super) fn from_args(args: &ServeArgs, launched: &EngineCounts) -> Result<Self, CliError> {
        let mut assigned = 0.0;
        let mut others = 0_u32;
        for &(role, count) in launched.by_role() {
            let flags: Vec<String> =
                args.vllm_args.iter().cloned().chain(args.roles.vllm_flags(role)).collect();
            match utilization(&flags)? {
                Some(fraction) => assigned += fraction * f64::from(count),
                None => others += count,
            }
        }
        let invalid = |why: String| Err(CliError::Usage(format!("--share-gpu: {why}")));
        if assigned > 1.0 {
            return invalid(format!(
                "the engines together use {assigned:.2} of the GPU's memory ({UTILIZATION_FLAG})"
            ));
        }
        // Rounded down to thousandths, so that the sum does not exceed the total.
        let fraction = ((TOTAL_FRACTION - assigned) / f64::from(others.max(1)) * 1e3).floor() / 1e3;
        if others > 0 && fraction < MIN_FRACTION {
            return invalid(format!(
                "{UTILIZATION_FLAG} assigns {assigned:.2} of the GPU's memory, which leaves too \
                 little of {TOTAL_FRACTION} for {others} more engines"
            ));
        }
        Ok(Self { default_fraction: (others > 0).then_some(fraction) })
    }

    /// Adds the engine's fraction to its arguments, unless they have one.
    pub(super) fn apply(&self, mut host: LaunchHost) -> LaunchHost {
        if let (Some(fraction), Ok(None)) = (self.default_fraction, utilization(&host.extra_args)) {
            host.extra_args.insert(0, format!("{UTILIZATION_FLAG}={fraction}"));
        }
        host
    }
}

/// Returns the fraction of a GPU's memory in these flags. The last one counts.
fn utilization(flags: &[String]) -> Result<Option<f64>, CliError> {
    let mut fraction = None;
    let mut flags = flags.iter();
    while let Some(flag) = flags.next() {
        let Some(arg) = FlagArg::parse(flag)
            .filter(|arg| arg.matches(UTILIZATION_FLAG) || arg.matches(UTILIZATION_ALIAS))
        else {
            continue;
        };
        let value = arg.value.or_else(|| flags.next().map(String::as_str));
        let number = value
            .and_then(|value| value.parse().ok())
            .filter(|number: &f64| (0.0..=1.0).contains(number));
        let invalid =
            || CliError::Usage(format!("{UTILIZATION_FLAG} must be a number from 0 to 1"));
        fraction = Some(number.ok_or_else(invalid)?);
    }
    Ok(fraction)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::{Cli, Command};

    fn shares(words: &str) -> Result<GpuShares, String> {
        let words = shlex::split(words).unwrap();
        let all =
            ["chiasm", "serve", "m", "--share-gpu"].map(str::to_owned).into_iter().chain(words);
        let Command::Serve(args) = Cli::parse_from(all).command else { panic!("serve") };
        let launched = args.engines.engines.clone().unwrap();
        GpuShares::from_args(&args, &launched).map_err(|error| error.to_string())
    }

    #[test]
    fn engines_share_memory_of_one_engine() {
        let fraction = |words: &str| shares(words).unwrap().default_fraction;
        assert_eq!(fraction("--engines 2"), Some(0.45));
        assert_eq!(fraction("--engines prefill=1,decode=1"), Some(0.45));
        assert_eq!(fraction("--engines prefill=1,decode=3"), Some(0.225));
        assert_eq!(fraction("--engines 7"), Some(0.128), "rounded down");
        let one_assigned =
            "--engines prefill=1,decode=2 --role-args prefill='--gpu-memory-utilization 0.3'";
        assert_eq!(fraction(one_assigned), Some(0.3));
        assert_eq!(fraction("--engines 2 -- --gpu_memory_utilization=0.4"), None);
        assert_eq!(fraction("--engines 2 -- --device-memory-utilization 0.4"), None);
        let both = "--engines prefill=1,decode=1 --role-args decode='--gpu-memory-util 0.5' \
                    -- --gpu-memory-utilization 0.2";
        assert_eq!(fraction(both), None, "the role's flags follow those for all");
    }

    #[test]
    fn excessive_or_invalid_share_is_refused() {
        for (words, why) in [
            ("--engines 2 -- --gpu-memory-utilization 0.6", "1.20"),
            (
                "--engines prefill=1,decode=1 --role-args prefill='--gpu-memory-utilization 0.9'",
                "0.90",
            ),
            ("--engines 100", "100 more engines"),
            ("--engines 2 -- --gpu-memory-utilization half", "a number"),
            ("--engines 2 -- --gpu-memory-utilization", "a number"),
        ] {
            let error = shares(words).unwrap_err();
            assert!(error.contains(why), "{words}: {error}");
        }
    }
}
