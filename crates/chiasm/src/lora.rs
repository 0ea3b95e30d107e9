//! LoRA adapters of `chiasm serve`: their files, and the engine flags that they need.

use std::path::Path;
use std::sync::Arc;

use chiasm_fleet::adapters::{AdapterFiles, AdapterSource, Adapters, StampSource};
use chiasm_sim_engine::LoraLimits;

use crate::cli::ServeArgs;
use crate::error::CliError;
use crate::hub_model;
use crate::side::Side;
use crate::vllm_flags::FlagArg;

/// vLLM's default of `--max-lora-rank`.
const DEFAULT_MAX_RANK: u64 = 16;
/// The values that `--max-lora-rank` accepts (`MaxLoRARanks` in `vllm/config/lora.py`).
const SUPPORTED_RANKS: [u64; 9] = [1, 8, 16, 32, 64, 128, 256, 320, 512];
/// The default maximum number of adapters per step; each takes GPU memory. vLLM's own default is 1,
/// with which requests for different adapters wait for each other.
const DEFAULT_ADAPTERS_PER_STEP: u64 = 4;

const ENABLE: LoraFlag = LoraFlag { name: "--enable-lora", min_prefix: "--enable-lora" };
const DISABLE: LoraFlag = LoraFlag { name: "--no-enable-lora", min_prefix: "--no-enable-lora" };
const MAX_LORAS: LoraFlag = LoraFlag { name: "--max-loras", min_prefix: "--max-loras" };
const MAX_CPU_LORAS: LoraFlag = LoraFlag { name: "--max-cpu-loras", min_prefix: "--max-cpu" };
const MAX_RANK: LoraFlag = LoraFlag { name: "--max-lora-rank", min_prefix: "--max-lora-" };
const TOWER: LoraFlag =
    LoraFlag { name: "--enable-tower-connector-lora", min_prefix: "--enable-t" };
const DEFAULT_MM: LoraFlag = LoraFlag { name: "--default-mm-loras", min_prefix: "--default-m" };

/// A flag of vLLM about LoRA.
struct LoraFlag {
    name: &'static str,
    /// The shortest prefix that no other flag of vLLM has.
    min_prefix: &'static str,
}

impl LoraFlag {
    /// Returns `true` if `arg` is this flag or an abbreviation of it.
    fn matches(&self, arg: &FlagArg<'_>) -> bool {
        self.name.starts_with(&arg.name) && arg.name.starts_with(self.min_prefix)
    }
}

/// The adapters, and the settings of engines that serve them.
pub(crate) struct LoraSetup {
    pub(crate) adapters: Arc<Adapters>,
    /// The flags of launched engines in addition to the user's.
    pub(crate) engine_args: Vec<String>,
    /// The limits of simulated engines; `None` without adapters.
    pub(crate) sim_limits: Option<LoraLimits>,
}

/// Returns the source of adapters' stamps. Agents and their frontends must compute the same stamp
/// for the same adapter, so they hash its content.
pub(crate) fn stamp_source(args: &ServeArgs, side: Side) -> StampSource {
    if side == Side::Agent || args.agents.has_agents() {
        StampSource::Content
    } else {
        StampSource::Metadata
    }
}

/// Loads the adapters of the command line, and downloads those of the hub first. No adapter may
/// have the name `model`.
///
/// # Errors
/// [`CliError::Usage`] names the adapter that can't be served, or the vLLM flag that conflicts with
/// it.
pub(crate) async fn prepare(
    args: &ServeArgs,
    model: &str,
    stamp_source: StampSource,
) -> Result<LoraSetup, CliError> {
    let user_flags = UserFlags::parse(&args.vllm_args)?;
    let limit = usize::from(args.lora.max_lora_adapters);
    let adapters = Adapters::new(limit).with_model(model).with_stamp_source(stamp_source);
    let mut max_rank = 1;
    let mut module_count = 0;
    for source in args.lora.modules() {
        let files = find_files(args, source, stamp_source).await?;
        let fault =
            |problem: String| CliError::Usage(format!("--lora-modules {}: {problem}", source.name));
        if source.name == model {
            return Err(fault("the model has this name".to_owned()));
        }
        adapters.serve(source, &files).map_err(|error| fault(error.to_string()))?;
        let largest = user_flags.max_rank.unwrap_or(SUPPORTED_RANKS[SUPPORTED_RANKS.len() - 1]);
        match files.rank {
            Some(found) if found > largest => {
                return Err(fault(format!(
                    "its rank {found} exceeds the engines' limit of {largest} (--max-lora-rank)"
                )));
            }
            found => max_rank = max_rank.max(found.unwrap_or(1)),
        }
        module_count += 1;
    }
    if args.lora.needs_adapters() && args.agents.has_agents() && !args.engines.has_any() {
        let message = "--lora-modules and --allow-runtime-lora-updating are for engines of this \
                       frontend, which has none: give the adapters to chiasm agent";
        return Err(CliError::Usage(message.to_owned()));
    }
    if !args.lora.needs_adapters() {
        return Ok(LoraSetup {
            adapters: Arc::new(adapters),
            engine_args: Vec::new(),
            sim_limits: None,
        });
    }
    if user_flags.is_disabled {
        return Err(CliError::Usage(
            "--no-enable-lora after -- disables the LoRA adapters that other flags require"
                .to_owned(),
        ));
    }
    let settings = user_flags.complete(limit as u64, module_count, max_rank);
    if settings.max_cpu_loras < module_count {
        tracing::warn!(
            adapters = module_count,
            kept = settings.max_cpu_loras,
            "engines keep fewer adapters than are served: they reload adapters within a step, and \
             die if the files are gone; raise --max-cpu-loras after --"
        );
    }
    let sim_limits = LoraLimits {
        max_loras: u32::try_from(settings.max_loras).unwrap_or(u32::MAX),
        max_cpu_loras: usize::try_from(settings.max_cpu_loras).unwrap_or(usize::MAX),
        max_rank: settings.max_rank,
    };
    Ok(LoraSetup {
        adapters: Arc::new(adapters),
        engine_args: user_flags.missing_args(&settings),
        sim_limits: Some(sim_limits),
    })
}

/// Finds an adapter's files in its folder, or downloads them from the hub.
async fn find_files(
    args: &ServeArgs,
    source: &AdapterSource,
    stamp_source: StampSource,
) -> Result<AdapterFiles, CliError> {
    // Attached engines may run on another machine, which has the folder.
    let allow_missing = !args.engines.attach.is_empty();
    let fault = |error: &dyn ToString| {
        CliError::Usage(format!("--lora-modules {}: {}", source.name, error.to_string()))
    };
    let downloaded = if Path::new(&source.path).exists() || allow_missing {
        None
    } else {
        hub_model::fetch_adapter(&source.path).await?
    };
    let path = match downloaded {
        Some(folder) => folder
            .into_os_string()
            .into_string()
            .map_err(|_| fault(&"the path of its folder is not UTF-8"))?,
        None => source.path.clone(),
    };
    let source = AdapterSource { path, ..source.clone() };
    let inspect = move || AdapterFiles::inspect(&source, allow_missing, stamp_source);
    let files = tokio::task::spawn_blocking(inspect).await.map_err(|error| fault(&error))?;
    files.map_err(|error| fault(&error))
}

/// The LoRA settings of engines, under vLLM's names.
#[derive(Debug, PartialEq, Eq)]
struct LoraSettings {
    max_loras: u64,
    max_cpu_loras: u64,
    max_rank: u64,
}

/// The LoRA flags among the user's flags for vLLM.
#[derive(Debug, Default, PartialEq, Eq)]
struct UserFlags {
    is_enabled: bool,
    is_disabled: bool,
    max_loras: Option<u64>,
    max_cpu_loras: Option<u64>,
    max_rank: Option<u64>,
}

impl UserFlags {
    /// Parses the flags after `--`.
    ///
    /// # Errors
    /// [`CliError::Usage`] for a flag that is not supported, and for a value that is not a number.
    fn parse(args: &[String]) -> Result<Self, CliError> {
        let mut given = Self::default();
        let mut args = args.iter();
        while let Some(arg) = args.next() {
            let Some(flag) = FlagArg::parse(arg) else { continue };
            let mut number = || {
                let value = flag.value.or_else(|| args.next().map(String::as_str));
                let number = value.and_then(|value| value.parse().ok());
                number
                    .map(Some)
                    .ok_or_else(|| CliError::Usage(format!("{arg} after -- requires a number")))
            };
            if let Some(refused) = [TOWER, DEFAULT_MM].iter().find(|refused| refused.matches(&flag))
            {
                let name = refused.name;
                let message = format!(
                    "{name} after -- is not supported: adapters are for the language model, and \
                     requests name them"
                );
                return Err(CliError::Usage(message));
            }
            if ENABLE.matches(&flag) || DISABLE.matches(&flag) {
                given.is_enabled = ENABLE.matches(&flag);
                given.is_disabled = !given.is_enabled;
            } else if MAX_LORAS.matches(&flag) {
                given.max_loras = number()?;
            } else if MAX_CPU_LORAS.matches(&flag) {
                given.max_cpu_loras = number()?;
            } else if MAX_RANK.matches(&flag) {
                given.max_rank = number()?;
            }
        }
        Ok(given)
    }

    /// Returns the user's numbers and, for missing ones, values that fit `limit` adapters, of which
    /// `module_count` are loaded at the start, with ranks up to `max_rank`.
    fn complete(&self, limit: u64, module_count: u64, max_rank: u64) -> LoraSettings {
        let max_loras = self.max_loras.unwrap_or(module_count.clamp(1, DEFAULT_ADAPTERS_PER_STEP));
        let fitting = SUPPORTED_RANKS
            .into_iter()
            .find(|&supported| supported >= max_rank.max(DEFAULT_MAX_RANK))
            .unwrap_or(DEFAULT_MAX_RANK);
        LoraSettings {
            max_loras,
            // vLLM refuses a value below `max_loras`.
            max_cpu_loras: self.max_cpu_loras.unwrap_or(limit.max(max_loras)),
            max_rank: self.max_rank.unwrap_or(fitting),
        }
    }

    /// Returns the arguments for the settings that the user has not given.
    fn missing_args(&self, settings: &LoraSettings) -> Vec<String> {
        let number = |flag: LoraFlag, given: Option<u64>, value: u64| {
            given.is_none().then(|| format!("{}={value}", flag.name))
        };
        let enable = (!self.is_enabled).then(|| ENABLE.name.to_owned());
        let numbers = [
            number(MAX_LORAS, self.max_loras, settings.max_loras),
            number(MAX_CPU_LORAS, self.max_cpu_loras, settings.max_cpu_loras),
            number(MAX_RANK, self.max_rank, settings.max_rank),
        ];
        enable.into_iter().chain(numbers.into_iter().flatten()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(args: &[&str]) -> Result<UserFlags, String> {
        let args: Vec<_> = args.iter().map(|arg| (*arg).to_owned()).collect();
        UserFlags::parse(&args).map_err(|error| error.to_string())
    }

    fn added_args(args: &[&str], module_count: u64, max_rank: u64) -> Vec<String> {
        let user_flags = parse(args).unwrap();
        user_flags.missing_args(&user_flags.complete(64, module_count, max_rank))
    }

    #[test]
    fn engines_get_flags_that_user_left_out() {
        let all = ["--enable-lora", "--max-loras=2", "--max-cpu-loras=64", "--max-lora-rank=16"];
        assert_eq!(added_args(&[], 2, 8), all);
        assert_eq!(added_args(&["--enable-log-requests", "--max-logprobs", "5"], 2, 8), all);
        assert_eq!(
            added_args(&["--enable_lora", "--max-loras", "100"], 9, 200),
            ["--max-cpu-loras=100", "--max-lora-rank=256"]
        );
        assert_eq!(
            added_args(&["--max-lora-rank=32", "--max-cpu-loras", "3"], 9, 8),
            ["--enable-lora", "--max-loras=4"],
            "the user's own numbers stay"
        );
        assert!(parse(&["--enable-lora", "--no-enable-lora"]).unwrap().is_disabled);
    }

    #[test]
    fn unsupported_adapter_flag_is_refused() {
        for flag in [
            "--enable-tower-connector-lora",
            "--enable_tower_conn",
            "--default-mm-loras",
            "--default-mm-loras.image=x",
        ] {
            let error = parse(&[flag]).unwrap_err();
            assert!(error.contains("after -- is not supported"), "{flag}: {error}");
        }
        assert!(parse(&["--max-loras"]).unwrap_err().contains("--max-loras"));
        assert!(parse(&["--max-loras=x"]).is_err());
    }
}
