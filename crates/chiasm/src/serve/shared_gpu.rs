//! Engines that share a GPU: which one, and what part of its memory each may take.

use chiasm_engine::LaunchHost;

use crate::cli::{EngineCounts, ServeArgs};
use crate::error::CliError;
use crate::vllm_flags::Spelled;

/// The part of a GPU's memory that an engine takes, whatever others have of it.
const UTILIZATION: &str = "--gpu-memory-utilization";
/// Its other name in vLLM.
const ALIAS: &str = "--device-memory-utilization";
/// What all engines take together, unless they are told otherwise: about what one alone takes
/// (vLLM's default is 0.92), as each has CUDA graphs and a context beside what it counts.
const TOGETHER: f64 = 0.9;
/// Less is no share: the weights of a small model alone are more.
const LEAST: f64 = 0.01;

/// What the engines of one GPU are told.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Shares {
    /// The part of each engine whose flags say nothing of it; `None` if all do.
    of_others: Option<f64>,
}

impl Shares {
    /// Shares what the engines that the operator has told a part leave of the GPU between the
    /// others.
    ///
    /// # Errors
    /// [`CliError::Usage`]: it is not enough for all, or a part is not a number.
    pub(super) fn of(args: &ServeArgs, launched: &EngineCounts) -> Result<Self, CliError> {
        let (mut told, mut others) = (0.0, 0_u32);
        for &(role, count) in launched.by_role() {
            let flags: Vec<String> =
                args.vllm_args.iter().cloned().chain(args.roles.of(role)).collect();
            match utilization(&flags)? {
                Some(part) => told += part * f64::from(count),
                None => others += count,
            }
        }
        let wrong = |why: String| Err(CliError::Usage(format!("--share-gpu: {why}")));
        if told > 1.0 {
            return wrong(format!(
                "the engines are told to take {told:.2} of the GPU's memory together ({UTILIZATION})"
            ));
        }
        // In thousandths, rounded down, so that all together are not more.
        let part = ((TOGETHER - told) / f64::from(others.max(1)) * 1e3).floor() / 1e3;
        if others > 0 && part < LEAST {
            return wrong(format!(
                "{told:.2} of the GPU's memory is given away by {UTILIZATION}, and {others} more engines are to share the rest of {TOGETHER}"
            ));
        }
        Ok(Self { of_others: (others > 0).then_some(part) })
    }

    /// An engine with its part, unless it has been told one.
    pub(super) fn told(&self, mut host: LaunchHost) -> LaunchHost {
        if let (Some(part), Ok(None)) = (self.of_others, utilization(&host.extra_args)) {
            host.extra_args.insert(0, format!("{UTILIZATION}={part}"));
        }
        host
    }
}

/// The part of a GPU's memory that these flags say, which is the last one.
fn utilization(flags: &[String]) -> Result<Option<f64>, CliError> {
    let mut said = None;
    let mut flags = flags.iter();
    while let Some(flag) = flags.next() {
        let Some(spelled) = Spelled::read(flag)
            .filter(|spelled| spelled.means(UTILIZATION) || spelled.means(ALIAS))
        else {
            continue;
        };
        let value = spelled.value.or_else(|| flags.next().map(String::as_str));
        let part = value
            .and_then(|value| value.parse().ok())
            .filter(|part: &f64| (0.0..=1.0).contains(part));
        let why = || CliError::Usage(format!("{UTILIZATION} has to be a number from 0 to 1"));
        said = Some(part.ok_or_else(why)?);
    }
    Ok(said)
}

/// The GPUs that all engines see: so many, or one. `None` leaves what the operator has this process
/// see, of which vLLM takes the first: it may be there so that the others are left alone.
pub(super) fn gpus(count: Option<u32>, is_restricted: bool) -> Option<Vec<u32>> {
    match count {
        Some(count) => Some((0..count).collect()),
        None if is_restricted => None,
        None => Some(vec![0]),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::{Cli, Command};

    fn shares(words: &str) -> Result<Shares, String> {
        let words = shlex::split(words).unwrap();
        let all =
            ["chiasm", "serve", "m", "--share-gpu"].map(str::to_owned).into_iter().chain(words);
        let Command::Serve(args) = Cli::parse_from(all).command else { panic!("serve") };
        let launched = args.engines.engines.clone().unwrap();
        Shares::of(&args, &launched).map_err(|error| error.to_string())
    }

    #[test]
    fn engines_share_what_one_would_take() {
        let of_others = |words: &str| shares(words).unwrap().of_others;
        assert_eq!(of_others("--engines 2"), Some(0.45));
        assert_eq!(of_others("--engines prefill=1,decode=1"), Some(0.45));
        assert_eq!(of_others("--engines prefill=1,decode=3"), Some(0.225));
        assert_eq!(of_others("--engines 7"), Some(0.128), "rounded down");
        let told =
            "--engines prefill=1,decode=2 --role-args prefill='--gpu-memory-utilization 0.3'";
        assert_eq!(of_others(told), Some(0.3));
        assert_eq!(of_others("--engines 2 -- --gpu_memory_utilization=0.4"), None);
        assert_eq!(of_others("--engines 2 -- --device-memory-utilization 0.4"), None);
        let both = "--engines prefill=1,decode=1 --role-args decode='--gpu-memory-util 0.5' -- --gpu-memory-utilization 0.2";
        assert_eq!(of_others(both), None, "that of the role is behind that of all");
    }

    #[test]
    fn more_than_there_is_is_refused_at_the_start() {
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

    #[test]
    fn all_see_the_same_gpu_and_none_that_the_operator_keeps_from_them() {
        assert_eq!(gpus(None, false), Some(vec![0]));
        assert_eq!(gpus(None, true), None);
        assert_eq!(gpus(Some(2), true), Some(vec![0, 1]));
    }
}
