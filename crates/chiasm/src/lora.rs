//! LoRA adapters of `chiasm serve`: where they are, and what engines need for them.

use std::path::Path;
use std::sync::Arc;

use chiasm_fleet::adapters::{AdapterFiles, AdapterSource, Adapters, Stamps};
use chiasm_sim_engine::LoraLimits;

use crate::cli::ServeArgs;
use crate::error::CliError;
use crate::hub_model;
use crate::side::Side;
use crate::vllm_flags::Spelled;

/// vLLM's default of `--max-lora-rank`.
const DEFAULT_RANK: u64 = 16;
/// The values that it takes (`MaxLoRARanks` in `vllm/config/lora.py`).
const RANKS: [u64; 9] = [1, 8, 16, 32, 64, 128, 256, 320, 512];
/// Adapters that a step may use where nobody says otherwise; each takes memory of the GPU. vLLM's
/// own default is 1, and requests with different adapters then wait for each other.
const MAX_IN_A_STEP: u64 = 4;

/// Flags for vLLM, each with the beginning that no other flag has.
const ENABLE: (&str, &str) = ("--enable-lora", "--enable-lora");
const DISABLE: (&str, &str) = ("--no-enable-lora", "--no-enable-lora");
const MAX_LORAS: (&str, &str) = ("--max-loras", "--max-loras");
const MAX_CPU_LORAS: (&str, &str) = ("--max-cpu-loras", "--max-cpu");
const MAX_RANK: (&str, &str) = ("--max-lora-rank", "--max-lora-");
const TOWER: (&str, &str) = ("--enable-tower-connector-lora", "--enable-t");
const OF_MODALITIES: (&str, &str) = ("--default-mm-loras", "--default-m");

/// What is served, and how engines are started for it.
pub(crate) struct Loras {
    /// The adapters.
    pub(crate) adapters: Arc<Adapters>,
    /// What launched engines are told beside the user's flags.
    pub(crate) engine_args: Vec<String>,
    /// What simulated engines take; `None` for no adapters.
    pub(crate) of_sim: Option<LoraLimits>,
}

/// How contents of adapters are told apart: agents and frontends that have one each find that it is
/// the same.
pub(crate) fn stamps(args: &ServeArgs, side: Side) -> Stamps {
    match side == Side::Agent || args.agents.has_agents() {
        true => Stamps::Content,
        false => Stamps::Place,
    }
}

/// Finds the adapters, and those of the hub after they have been downloaded. `model` is the name
/// that none may have.
///
/// # Errors
/// [`CliError::Usage`] names the adapter that can't be served, or the flag for vLLM that is against
/// it.
pub(crate) async fn prepare(
    args: &ServeArgs,
    model: &str,
    stamps: Stamps,
) -> Result<Loras, CliError> {
    let given = Given::read(&args.vllm_args)?;
    let limit = usize::from(args.lora.max_lora_adapters);
    let adapters = Adapters::new(limit).beside(model).with_stamps(stamps);
    let (mut rank, mut modules) = (1, 0);
    for source in args.lora.modules() {
        let files = find(args, source, stamps).await?;
        let fault =
            |problem: String| CliError::Usage(format!("--lora-modules {}: {problem}", source.name));
        if source.name == model {
            return Err(fault("the model has this name".to_owned()));
        }
        adapters.serve(source, &files).map_err(|error| fault(error.to_string()))?;
        let largest = given.max_rank.unwrap_or(RANKS[RANKS.len() - 1]);
        match files.rank {
            Some(found) if found > largest => {
                return Err(fault(format!(
                    "its rank is {found}, and engines take {largest} at most (--max-lora-rank)"
                )));
            }
            found => rank = rank.max(found.unwrap_or(1)),
        }
        modules += 1;
    }
    if args.lora.wants_adapters() && args.agents.has_agents() && !args.engines.has_any() {
        let message = "--lora-modules and --allow-runtime-lora-updating are for engines of this frontend, and it has none: agents serve \
                       the adapters that chiasm agent is given";
        return Err(CliError::Usage(message.to_owned()));
    }
    if !args.lora.wants_adapters() {
        return Ok(Loras { adapters: Arc::new(adapters), engine_args: Vec::new(), of_sim: None });
    }
    if given.is_disabled {
        return Err(CliError::Usage(
            "--no-enable-lora after -- leaves no engine for LoRA adapters".to_owned(),
        ));
    }
    let wanted = given.completed(limit as u64, modules, rank);
    if wanted.max_cpu_loras < modules {
        tracing::warn!(
            adapters = modules,
            kept = wanted.max_cpu_loras,
            "engines read adapters again within a step, and die if one is gone (--max-cpu-loras after --)"
        );
    }
    let of_sim = LoraLimits {
        max_loras: u32::try_from(wanted.max_loras).unwrap_or(u32::MAX),
        max_cpu_loras: usize::try_from(wanted.max_cpu_loras).unwrap_or(usize::MAX),
        max_rank: wanted.max_rank,
    };
    Ok(Loras {
        adapters: Arc::new(adapters),
        engine_args: given.lacking(&wanted),
        of_sim: Some(of_sim),
    })
}

/// An adapter's files: in a folder, or of the hub.
async fn find(
    args: &ServeArgs,
    source: &AdapterSource,
    stamps: Stamps,
) -> Result<AdapterFiles, CliError> {
    let elsewhere = !args.engines.attach.is_empty();
    let fault = |error: &dyn ToString| {
        CliError::Usage(format!("--lora-modules {}: {}", source.name, error.to_string()))
    };
    let on_hub = match Path::new(&source.path).exists() || elsewhere {
        true => None,
        false => hub_model::fetch_adapter(&source.path).await?,
    };
    let path = match on_hub {
        Some(folder) => {
            folder.into_os_string().into_string().map_err(|_| fault(&"its folder is not UTF-8"))?
        }
        None => source.path.clone(),
    };
    let source = AdapterSource { path, ..source.clone() };
    let look = move || AdapterFiles::look(&source, elsewhere, stamps);
    let found = tokio::task::spawn_blocking(look).await.map_err(|error| fault(&error))?;
    found.map_err(|error| fault(&error))
}

/// What engines take.
#[derive(Debug, PartialEq, Eq)]
struct Wanted {
    max_loras: u64,
    max_cpu_loras: u64,
    max_rank: u64,
}

/// What the user tells engines.
#[derive(Debug, Default, PartialEq, Eq)]
struct Given {
    is_enabled: bool,
    is_disabled: bool,
    max_loras: Option<u64>,
    max_cpu_loras: Option<u64>,
    max_rank: Option<u64>,
}

impl Given {
    /// Reads the flags after `--`.
    ///
    /// # Errors
    /// [`CliError::Usage`] for a flag that makes adapters something else than they are here, and
    /// for what is no number.
    fn read(args: &[String]) -> Result<Self, CliError> {
        let mut given = Self::default();
        let mut args = args.iter();
        while let Some(arg) = args.next() {
            let Some(flag) = Spelled::read(arg) else { continue };
            let is = |(whole, unique): (&str, &str)| {
                whole.starts_with(&flag.name) && flag.name.starts_with(unique)
            };
            let mut number = || {
                let value = flag.value.or_else(|| args.next().map(String::as_str));
                let number = value.and_then(|value| value.parse().ok());
                number
                    .map(Some)
                    .ok_or_else(|| CliError::Usage(format!("{arg} after -- needs a number")))
            };
            if is(TOWER) || is(OF_MODALITIES) {
                let name = if is(TOWER) { TOWER.0 } else { OF_MODALITIES.0 };
                let message = format!(
                    "{name} after -- is not supported: adapters are of the language model, by name"
                );
                return Err(CliError::Usage(message));
            }
            match () {
                () if is(ENABLE) => (given.is_enabled, given.is_disabled) = (true, false),
                () if is(DISABLE) => (given.is_enabled, given.is_disabled) = (false, true),
                () if is(MAX_LORAS) => given.max_loras = number()?,
                () if is(MAX_CPU_LORAS) => given.max_cpu_loras = number()?,
                () if is(MAX_RANK) => given.max_rank = number()?,
                () => {}
            }
        }
        Ok(given)
    }

    /// The user's numbers, and for those that are not given what so many adapters at most, these at
    /// the start and the largest rank need.
    fn completed(&self, limit: u64, modules: u64, rank: u64) -> Wanted {
        let max_loras = self.max_loras.unwrap_or(modules.clamp(1, MAX_IN_A_STEP));
        let fitting = RANKS
            .into_iter()
            .find(|&allowed| allowed >= rank.max(DEFAULT_RANK))
            .unwrap_or(DEFAULT_RANK);
        Wanted {
            max_loras,
            // vLLM refuses less than there may be in a step.
            max_cpu_loras: self.max_cpu_loras.unwrap_or(limit.max(max_loras)),
            max_rank: self.max_rank.unwrap_or(fitting),
        }
    }

    /// The flags that the user has not given.
    fn lacking(&self, wanted: &Wanted) -> Vec<String> {
        let number = |(name, _): (&str, &str), given: Option<u64>, value: u64| {
            given.is_none().then(|| format!("{name}={value}"))
        };
        let enable = (!self.is_enabled).then(|| ENABLE.0.to_owned());
        let numbers = [
            number(MAX_LORAS, self.max_loras, wanted.max_loras),
            number(MAX_CPU_LORAS, self.max_cpu_loras, wanted.max_cpu_loras),
            number(MAX_RANK, self.max_rank, wanted.max_rank),
        ];
        enable.into_iter().chain(numbers.into_iter().flatten()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(args: &[&str]) -> Result<Given, String> {
        let args: Vec<_> = args.iter().map(|arg| (*arg).to_owned()).collect();
        Given::read(&args).map_err(|error| error.to_string())
    }

    fn told(args: &[&str], modules: u64, rank: u64) -> Vec<String> {
        let given = read(args).unwrap();
        given.lacking(&given.completed(64, modules, rank))
    }

    #[test]
    fn engines_are_told_what_the_user_has_not_told_them() {
        let all = ["--enable-lora", "--max-loras=2", "--max-cpu-loras=64", "--max-lora-rank=16"];
        assert_eq!(told(&[], 2, 8), all);
        assert_eq!(told(&["--enable-log-requests", "--max-logprobs", "5"], 2, 8), all);
        assert_eq!(
            told(&["--enable_lora", "--max-loras", "100"], 9, 200),
            ["--max-cpu-loras=100", "--max-lora-rank=256"]
        );
        assert_eq!(
            told(&["--max-lora-rank=32", "--max-cpu-loras", "3"], 9, 8),
            ["--enable-lora", "--max-loras=4"],
            "the user's own numbers stay"
        );
        assert!(read(&["--enable-lora", "--no-enable-lora"]).unwrap().is_disabled);
    }

    #[test]
    fn adapters_of_other_kinds_are_refused_by_name() {
        for flag in [
            "--enable-tower-connector-lora",
            "--enable_tower_conn",
            "--default-mm-loras",
            "--default-mm-loras.image=x",
        ] {
            let error = read(&[flag]).unwrap_err();
            assert!(error.contains("after -- is not supported"), "{flag}: {error}");
        }
        assert!(read(&["--max-loras"]).unwrap_err().contains("--max-loras"));
        assert!(read(&["--max-loras=x"]).is_err());
    }
}
