//! The command line. Each flag of `serve` has an environment variable `CHIASM_…`, except the flags
//! of simulated engines.

mod access;
mod agents;
mod answers;
mod doctor;
mod engines;
mod http;
mod limits;
mod lora;
#[cfg(test)]
mod manifests;
mod media;
mod nixl;
mod processor;
#[cfg(test)]
mod recipes;
#[cfg(test)]
mod reference;
mod roles;
mod routing;
mod sides;
mod simulate;
mod traces;
mod upstream;
mod value_error;

use std::ffi::OsString;
use std::net::IpAddr;
use std::ops::Range;
use std::path::PathBuf;
use std::time::Duration;

use chiasm_engine::launch::{FlagPlace, place_of_flag};
use chiasm_hub::Revision;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::parser::ValueSource;
use clap::{Arg, Args, CommandFactory, FromArgMatches, Parser, Subcommand};
use serde_json::{Map, Value};

pub(crate) use access::AccessArgs;
pub(crate) use agents::{AgentArgs, AgentMediaArg, AgentTlsArgs, DrainArgs, ProbeArgs};
pub(crate) use answers::{AnswerArgs, PromptArgs};
pub(crate) use doctor::DoctorArgs;
pub(crate) use engines::{EngineArgs, MmTransfer, TensorFormats};
pub(crate) use http::HttpArgs;
pub(crate) use limits::LimitArgs;
pub(crate) use lora::LoraArgs;
pub(crate) use media::MediaArgs;
pub(crate) use nixl::NixlArgs;
pub(crate) use processor::{ProcessorArgs, ProcessorChoice};
pub(crate) use roles::{AttachArg, EngineCounts, RoleArgs, is_local_address};
pub(crate) use routing::RoutingArgs;
use sides::{is_agent_only, is_frontend_only};
pub(crate) use simulate::SimulateArgs;
pub(crate) use traces::TraceArgs;
pub(crate) use upstream::UpstreamArg;
use value_error::{NotAnObject, ValueError};

/// One fast front door before many multimodal LLM engines.
#[derive(Debug, Parser)]
#[command(version, about, arg_required_else_help = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// The default port of an agent.
const AGENT_PORT: &str = "8100";

impl Cli {
    /// Parses the command line of this process. Prints the error and exits if it is invalid.
    pub(crate) fn parse_or_exit() -> Self {
        Self::parse_args(std::env::args_os()).unwrap_or_else(|error| error.exit())
    }

    /// Returns the definition of all commands. `serve` and `agent` hide each other's flags.
    pub(crate) fn definition() -> clap::Command {
        let hide = |command: clap::Command, is_foreign: fn(&Arg) -> bool| {
            command.mut_args(|arg| {
                let hidden = arg.is_hide_set() || is_foreign(&arg);
                arg.hide(hidden)
            })
        };
        Self::command().mut_subcommands(|command| match command.get_name() {
            "serve" => hide(allow_negative_values(command), is_agent_only),
            "agent" => hide(allow_negative_values(command), is_frontend_only)
                .mut_arg("port", |port| port.default_value(AGENT_PORT)),
            _ => allow_negative_values(command),
        })
    }

    /// Parses a command line. Refuses flags of frontends for `agent`.
    fn parse_args(
        words: impl IntoIterator<Item = impl Into<OsString> + Clone>,
    ) -> Result<Self, clap::Error> {
        let mut command = Self::definition();
        let matches = command
            .try_get_matches_from_mut(words)
            .map_err(|error| explain_vllm_flag(&command, error))?;
        if let Some(("agent", given)) = matches.subcommand() {
            let agent = command
                .find_subcommand("agent")
                .into_iter()
                .flat_map(|agent| agent.get_arguments());
            let is_given = |arg: &&Arg| {
                given.value_source(arg.get_id().as_str()) == Some(ValueSource::CommandLine)
            };
            let refused =
                agent.filter(|arg| is_frontend_only(arg)).find(is_given).map(ToString::to_string);
            if let Some(arg) = refused {
                let message = format!("{arg} is a frontend's: give it to chiasm serve");
                return Err(command.error(ErrorKind::ArgumentConflict, message));
            }
        }
        Self::from_arg_matches(&matches)
    }
}

/// Replaces the error of an unknown flag before `--` that is a flag of `vllm serve`: says where to
/// give it.
fn explain_vllm_flag(command: &clap::Command, error: clap::Error) -> clap::Error {
    let flag = match (error.kind(), error.get(ContextKind::InvalidArg)) {
        (ErrorKind::UnknownArgument, Some(ContextValue::String(flag))) => flag.clone(),
        _ => return error,
    };
    let message = match place_of_flag(&flag) {
        Some(FlagPlace::Engine) => {
            format!(
                "{flag} is a flag of vLLM's engines: give it behind --, as in chiasm serve MODEL \
                 --engines 2 -- {flag} …"
            )
        }
        Some(FlagPlace::Instead(instead)) => format!("{flag} is a flag of vllm serve: {instead}"),
        None => return error,
    };
    command.clone().error(ErrorKind::UnknownArgument, message)
}

/// Makes clap parse `-1` after a flag as the flag's value. The error then names the flag and its
/// range instead of an unknown flag `-1`.
fn allow_negative_values(command: clap::Command) -> clap::Command {
    command.mut_args(|arg| {
        let takes_values = arg.get_action().takes_values() && !arg.is_positional();
        arg.allow_negative_numbers(takes_values)
    })
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Serve a model: an OpenAI-compatible frontend before several engines
    Serve(Box<ServeArgs>),
    /// Own the engines of this machine, for frontends on any (chiasm serve --agents)
    Agent(Box<ServeArgs>),
    /// Have an agent take no new requests, or take them again
    Drain(DrainArgs),
    /// Ask an agent whether it answers, or whether frontends have admitted its engines; fails if
    /// not
    Probe(ProbeArgs),
    /// Show the main job in a minute: a frontend, two simulated engines and a small conversation
    /// set
    Demo(DemoArgs),
    /// Tell what an image means for a model's prompt: identity, layout, tensors
    Inspect(InspectArgs),
    /// Check whether this machine has what chiasm serve needs; fails if not
    Doctor(DoctorArgs),
    /// Print what a shell needs to complete this command line
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// List the engines that are or can be taken over by another frontend, or stop them
    Engines(EnginesArgs),
    /// Run one simulated engine on vLLM's wire
    SimEngine(SimEngineArgs),
    /// Compare routing policies on a modelled fleet in virtual time
    Simulate(Box<SimulateArgs>),
}

#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    /// Directory with config.json, tokenizer.json and the processor's configuration, or the id of a
    /// model on the Hugging Face hub, such as Qwen/Qwen2.5-VL-7B-Instruct
    pub(crate) model: PathBuf,
    /// Branch, tag or commit of a model on the hub, for all of its files [default: main]
    #[arg(long, env = "CHIASM_REVISION")]
    pub(crate) revision: Option<Revision>,
    /// The paths of all files of a model on the hub, downloaded or not; empty for a directory. Set
    /// when the model is resolved.
    #[arg(skip)]
    pub(crate) hub_files: Vec<String>,
    /// The model's name in requests [default: MODEL as given]
    #[arg(long, env = "CHIASM_SERVED_MODEL_NAME")]
    pub(crate) served_model_name: Option<String>,
    /// Address to listen on; 0.0.0.0 or :: for all of this machine
    #[arg(long, env = "CHIASM_HOST", default_value = "127.0.0.1", value_parser = ip_address)]
    pub(crate) host: IpAddr,
    /// Port to listen on; 0 picks a free one
    #[arg(long, env = "CHIASM_PORT", default_value_t = 8000)]
    pub(crate) port: u16,
    /// What replaces the model's chat template: a Jinja file, or the template itself, which has a
    /// brace or a line break
    #[arg(long, env = "CHIASM_CHAT_TEMPLATE", value_name = "FILE|TEMPLATE")]
    pub(crate) chat_template: Option<PathBuf>,

    #[command(flatten, next_help_heading = "Access")]
    pub(crate) access: AccessArgs,
    #[command(flatten, next_help_heading = "Prompts")]
    pub(crate) prompts: PromptArgs,
    #[command(flatten, next_help_heading = "Answers")]
    pub(crate) answers: AnswerArgs,
    #[command(flatten, next_help_heading = "HTTP")]
    pub(crate) http: HttpArgs,
    #[command(flatten, next_help_heading = "Traces")]
    pub(crate) traces: TraceArgs,
    #[command(flatten, next_help_heading = "Engines")]
    pub(crate) engines: EngineArgs,
    #[command(flatten, next_help_heading = "Roles")]
    pub(crate) roles: RoleArgs,
    #[command(flatten, next_help_heading = "Other machines")]
    pub(crate) agents: AgentArgs,
    #[command(flatten, next_help_heading = "LoRA")]
    pub(crate) lora: LoraArgs,
    #[command(flatten, next_help_heading = "Routing")]
    pub(crate) routing: RoutingArgs,
    #[command(flatten, next_help_heading = "Media")]
    pub(crate) media: MediaArgs,
    #[command(flatten, next_help_heading = "vLLM's processor")]
    pub(crate) processor: ProcessorArgs,
    #[command(flatten, next_help_heading = "Limits")]
    pub(crate) limits: LimitArgs,
    #[command(flatten, next_help_heading = "Simulated engines")]
    pub(crate) sim_args: SimArgs,

    /// Flags for every vLLM engine, after `--`
    #[arg(last = true, value_name = "VLLM_FLAGS")]
    pub(crate) vllm_args: Vec<String>,
}

impl ServeArgs {
    /// Returns the number of engines to launch here, by role.
    pub(crate) fn launched(&self) -> EngineCounts {
        let EngineArgs { sim, attach, upstream, engines, .. } = &self.engines;
        if sim.is_some() || !attach.is_empty() {
            return EngineCounts::aggregated(0);
        }
        let has_remote = self.agents.has_agents() || !upstream.is_empty();
        engines.clone().unwrap_or_else(|| EngineCounts::aggregated(if has_remote { 0 } else { 1 }))
    }
}

/// Flags of the size and speed of simulated engines.
#[derive(Clone, Debug, Args)]
pub(crate) struct SimArgs {
    /// Tokens per block of a simulated engine's KV cache
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(crate) sim_block_size: u32,
    /// Blocks of its KV cache
    #[arg(long, default_value_t = 8192)]
    pub(crate) sim_blocks: u32,
    /// Longest prompt and answer together
    #[arg(long, default_value_t = 8192)]
    pub(crate) sim_max_model_len: usize,
    /// Requests that it runs at once
    #[arg(long, default_value_t = 128, value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=4096))]
    pub(crate) sim_max_num_seqs: usize,
    /// Text that it answers with, such as a tool call, instead of what it saw
    #[arg(long, value_name = "TEXT")]
    pub(crate) sim_answer: Option<String>,
    /// File to write the moments of its steps to: nanoseconds since 1970, eight bytes each, little
    /// endian
    #[arg(long, value_name = "FILE")]
    pub(crate) sim_step_log: Option<PathBuf>,
    /// The same of the moments at which requests come
    #[arg(long, value_name = "FILE")]
    pub(crate) sim_request_log: Option<PathBuf>,
    /// Prompt tokens that it computes per second
    #[arg(long, default_value_t = 20_000.0, value_parser = non_negative)]
    pub(crate) sim_prefill_rate: f64,
    /// Steps that it decodes per second
    #[arg(long, default_value_t = 100.0, value_parser = non_negative)]
    pub(crate) sim_decode_rate: f64,
    /// Milliseconds that it takes to encode an image
    #[arg(long, default_value_t = 20.0, value_parser = non_negative)]
    pub(crate) sim_image_ms: f64,
    /// Runs all of that so many times faster
    #[arg(long, default_value_t = 1.0, value_parser = non_negative)]
    pub(crate) sim_speedup: f64,
    /// The version of vLLM that it says it has [default: 0.32.0]
    #[arg(long, value_name = "VERSION")]
    pub(crate) sim_vllm_version: Option<String>,
    /// Leaves out the plugin that opens shared memory
    #[arg(long)]
    pub(crate) sim_no_plugin: bool,
    /// Takes LoRA adapters, as with --lora-modules
    #[arg(long)]
    pub(crate) sim_lora: bool,
    /// Has a KV connector, as engines with roles (chiasm sim-engine; those of chiasm serve have it
    /// by their roles)
    #[arg(long)]
    pub(crate) sim_kv_connector: bool,
    /// Finds embeddings in this folder that other engines have left there (chiasm sim-engine; those
    /// of chiasm serve have one by their roles)
    #[arg(long, value_name = "DIR")]
    pub(crate) sim_embeddings: Option<PathBuf>,
    /// Encodes alone, and leaves embeddings in that folder
    #[arg(long, requires = "sim_embeddings")]
    pub(crate) sim_encodes: bool,
    /// Seconds for which it keeps a prompt that it has left for another engine
    #[arg(long, default_value = "30", value_parser = positive_seconds)]
    pub(crate) sim_prompt_lease: Duration,
    /// Publishes no KV events
    #[arg(long)]
    pub(crate) sim_no_kv_events: bool,
    /// Loses KV event batches with these numbers on their way, such as 10..12 for 10 and 11
    #[arg(long, value_name = "FROM..TO", value_parser = range, default_value = "0..0")]
    pub(crate) sim_lose_kv_batches: Range<u64>,
    /// KV event batches that it can replay
    #[arg(long, default_value_t = 10_000)]
    pub(crate) sim_replay_batches: usize,
}

#[derive(Debug, Args)]
pub(crate) struct DemoArgs {
    /// Print JSON lines
    #[arg(long)]
    pub(crate) json: bool,
    /// Leave the server up afterwards
    #[arg(long)]
    pub(crate) keep: bool,
    /// Port to listen on; 0 picks a free one
    #[arg(long, default_value_t = 0)]
    pub(crate) port: u16,
}

#[derive(Debug, Args)]
pub(crate) struct InspectArgs {
    /// Directory with config.json and the processor's configuration
    #[arg(long)]
    pub(crate) model: PathBuf,
    /// Files or http(s) or data: URLs
    #[arg(required = true, value_name = "IMAGE|URL")]
    pub(crate) images: Vec<String>,
    /// Print JSON lines
    #[arg(long)]
    pub(crate) json: bool,
    /// Write each tensor there, as .npy
    #[arg(long, value_name = "DIR")]
    pub(crate) dump: Option<PathBuf>,
    /// Tokens per block, for the block keys
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(crate) block_size: u32,
    /// Dump normalised floats instead of raw pixels
    #[arg(long)]
    pub(crate) normalized: bool,
    /// Image processor settings as in a request's mm_processor_kwargs, as JSON
    #[arg(long, value_name = "JSON", value_parser = json_object, default_value = "{}")]
    pub(crate) mm_processor_kwargs: Map<String, Value>,
}

#[derive(Debug, Args)]
pub(crate) struct EnginesArgs {
    /// The state folder of the frontends [default: as of chiasm serve]
    #[arg(long, env = "CHIASM_STATE_DIR", value_name = "DIR")]
    pub(crate) state_dir: Option<PathBuf>,
    /// End this engine, which no frontend may have
    #[arg(long, value_name = "NAME", conflicts_with = "stop_all")]
    pub(crate) stop: Option<String>,
    /// End all engines that no frontend has
    #[arg(long)]
    pub(crate) stop_all: bool,
    /// Print JSON lines
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct SimEngineArgs {
    /// The frontend's handshake address, such as tcp://127.0.0.1:29550
    #[arg(long, value_name = "ADDR")]
    pub(crate) handshake: String,
    /// Model directory whose tokenizer its answers use [default: one token per byte]
    #[arg(long)]
    pub(crate) model: Option<PathBuf>,
    /// Data-parallel rank
    #[arg(long, default_value_t = 0)]
    pub(crate) rank: u16,
    /// GiB of its cache of processed images, 0 for none
    #[arg(long, default_value_t = 4.0, value_parser = non_negative)]
    pub(crate) receiver_cache_gb: f64,
    /// Address to publish KV events on; port 0 picks a free one
    #[arg(long, default_value = "tcp://127.0.0.1:0")]
    pub(crate) kv_events: String,
    #[command(flatten)]
    pub(crate) sim: SimArgs,
}

fn ip_address(text: &str) -> Result<IpAddr, ValueError> {
    text.parse().map_err(|_| ValueError::IpAddress)
}

fn seconds(text: &str) -> Result<Duration, ValueError> {
    let seconds: f64 = text.parse().map_err(|_| ValueError::Seconds)?;
    Ok(Duration::try_from_secs_f64(seconds)?)
}

/// Parses a number of seconds above 0.
fn positive_seconds(text: &str) -> Result<Duration, ValueError> {
    let duration = seconds(text)?;
    if duration.is_zero() { Err(ValueError::ZeroSeconds) } else { Ok(duration) }
}

fn json_object(text: &str) -> Result<Map<String, Value>, NotAnObject> {
    Ok(serde_json::from_str(text)?)
}

fn non_negative(text: &str) -> Result<f64, ValueError> {
    match text.parse::<f64>() {
        Ok(number) if number.is_finite() && number >= 0.0 => Ok(number),
        _ => Err(ValueError::Negative),
    }
}

/// Parses a fraction from 0 to 1.
fn fraction(text: &str) -> Result<f64, ValueError> {
    match text.trim_end_matches('%').parse::<f64>() {
        Ok(part) if (0.0..=1.0).contains(&part) && !text.ends_with('%') => Ok(part),
        Ok(percent) if (0.0..=100.0).contains(&percent) => Err(ValueError::PerCent(percent)),
        _ => Err(ValueError::NotAFraction),
    }
}

fn range(text: &str) -> Result<Range<u64>, ValueError> {
    let ends =
        text.split_once("..").and_then(|(from, to)| Some(from.parse().ok()?..to.parse().ok()?));
    ends.ok_or(ValueError::Range)
}

fn positive(text: &str) -> Result<f64, ValueError> {
    non_negative(text).ok().filter(|&number| number > 0.0).ok_or(ValueError::NotPositive)
}

#[cfg(test)]
mod tests {
    use chiasm_router::Policy;

    use super::*;

    #[test]
    fn command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn vllm_flags_follow_two_dashes() {
        let cli =
            Cli::parse_from(["chiasm", "serve", "m", "--engines", "2", "--", "--dtype", "float32"]);
        let Command::Serve(args) = cli.command else { panic!("serve") };
        assert_eq!(args.engines.engines, Some(EngineCounts::aggregated(2)));
        assert_eq!(args.vllm_args, ["--dtype", "float32"]);
    }

    #[test]
    fn agent_refuses_frontend_flags() {
        let parse = |more: &[&str]| Cli::parse_args(["chiasm", "agent", "m"].iter().chain(more));
        let Ok(Cli { command: Command::Agent(args) }) =
            parse(&["--sim", "2", "--mm-transfer", "inline"])
        else {
            panic!("agent")
        };
        assert_eq!((args.engines.sim, args.port), (Some(EngineCounts::aggregated(2)), 8100));
        let Ok(Cli { command: Command::Serve(args) }) = Cli::parse_args(["chiasm", "serve", "m"])
        else {
            panic!("serve")
        };
        assert_eq!(args.port, 8000);
        for (flag, value) in
            [("--api-key", "k"), ("--agents", "a:1"), ("--processors", "2"), ("--root-path", "/m")]
        {
            let error = parse(&[flag, value]).unwrap_err().to_string();
            assert!(error.contains(flag) && error.contains("chiasm serve"), "{error}");
        }
    }

    #[test]
    fn negative_value_names_its_flag() {
        for (flag, value) in [
            ("--engines", "-1"),
            ("--sim", "-2"),
            ("--port", "-1"),
            ("--receiver-cache-gb", "-1"),
            ("--queue-weight", "-0.5"),
            ("--request-timeout", "-1"),
            ("--max-requests", "-3"),
        ] {
            let error = Cli::parse_args(["chiasm", "serve", "m", flag, value]);
            let error = error.unwrap_err().to_string();
            assert!(error.contains(&format!("invalid value '{value}' for '{flag}")), "{error}");
        }
    }

    #[test]
    fn fraction_given_as_per_cent_is_explained() {
        assert_eq!(fraction("0.9"), Ok(0.9));
        assert_eq!((fraction("0"), fraction("1")), (Ok(0.0), Ok(1.0)));
        for text in ["90", "90%", "1.5", "1%"] {
            let error = fraction(text).unwrap_err().to_string();
            let number = text.trim_end_matches('%').parse::<f64>().unwrap();
            assert!(
                error.ends_with(&format!("{number} per cent is {}", number / 100.0)),
                "{error}"
            );
        }
        for text in ["-0.1", "101", "nan", "inf", "x", ""] {
            assert_eq!(fraction(text), Err(ValueError::NotAFraction), "{text}");
        }
    }

    #[test]
    fn list_flags_are_parsed() {
        let cli =
            Cli::parse_from(["chiasm", "simulate", "--policy", "kv,kv+media", "--workload", "all"]);
        let Command::Simulate(args) = cli.command else { panic!("simulate") };
        assert_eq!(args.policy.0, [Policy::Kv, Policy::KvMedia]);
        assert_eq!(args.workload.0.len(), 6);
        let error = Cli::try_parse_from(["chiasm", "simulate", "--policy", "best"])
            .unwrap_err()
            .to_string();
        assert!(error.contains("round-robin"), "{error}");
    }
}
