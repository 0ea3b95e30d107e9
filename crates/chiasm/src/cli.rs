//! The command line. Each flag of `serve` has an environment variable `CHIASM_…`, except the flags
//! of simulated engines.

mod access;
mod advice;
mod agents;
mod answers;
pub(crate) mod config_file;
mod doctor;
mod engines;
mod explain;
mod help;
mod http;
mod limits;
mod lora;
#[cfg(test)]
mod manifests;
mod media;
mod nixl;
#[cfg(test)]
mod pages;
mod processor;
#[cfg(test)]
mod reference;
mod roles;
mod routing;
mod sides;
mod sim;
mod simulate;
mod traces;
mod upstream;
mod value_error;

use std::ffi::OsString;
use std::net::IpAddr;
use std::ops::Range;
use std::path::PathBuf;
use std::time::Duration;

use chiasm_discovery::Candidate;
use chiasm_hub::Revision;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Args, CommandFactory, FromArgMatches, Parser, Subcommand};
use serde_json::{Map, Value};

pub(crate) use access::AccessArgs;
use advice::advise;
pub(crate) use agents::{AgentArgs, AgentTlsArgs, DrainArgs, ProbeArgs};
pub(crate) use answers::{AnswerArgs, PromptArgs};
pub(crate) use config_file::ConfigFile;
use config_file::insert_config;
pub(crate) use doctor::DoctorArgs;
pub(crate) use engines::{EngineArgs, MmTransfer, TensorFormats};
use explain::explain;
use help::with_help_all;
pub(crate) use http::HttpArgs;
pub(crate) use limits::LimitArgs;
pub(crate) use lora::LoraArgs;
pub(crate) use media::MediaArgs;
pub(crate) use nixl::NixlArgs;
pub(crate) use processor::{ProcessorArgs, ProcessorChoice};
pub(crate) use roles::{AttachArg, EngineCounts, RoleArgs, is_local_address};
pub(crate) use routing::RoutingArgs;
use sides::{is_agent_only, is_frontend_only};
pub(crate) use sim::{SimArgs, SimEngineArgs};
pub(crate) use simulate::SimulateArgs;
pub(crate) use traces::TraceArgs;
pub(crate) use upstream::UpstreamArg;
use value_error::{NotAnObject, ValueError, plain_error};

/// A fast OpenAI-compatible frontend for many multimodal LLM engines.
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
            "serve" => with_help_all(hide(allow_negative_values(command), is_agent_only)),
            "agent" => with_help_all(hide(allow_negative_values(command), is_frontend_only))
                .mut_arg("port", |port| port.default_value(AGENT_PORT))
                .mut_args(without_frontend_sources),
            _ => allow_negative_values(command),
        })
    }

    /// Parses a command line, with the values of its configuration file. Refuses flags of frontends
    /// for `agent`.
    fn parse_args(
        words: impl IntoIterator<Item = impl Into<OsString> + Clone>,
    ) -> Result<Self, clap::Error> {
        let Parsed { matches, .. } = Self::parse(words.into_iter().map(Into::into).collect())?;
        Self::from_arg_matches(&matches)
    }

    /// Parses the words of a command line, with the values of its configuration file.
    pub(crate) fn parse(mut words: Vec<OsString>) -> Result<Parsed, clap::Error> {
        let definition = Self::definition();
        let given = words.clone();
        let file = insert_config(&definition, &mut words)?;
        match Self::matches(definition.clone(), words) {
            Ok(matches) => Ok(Parsed { matches, file, definition }),
            Err(error) => Err(explain(error, &definition, &given, file.as_ref())),
        }
    }

    fn matches(
        mut command: clap::Command,
        words: Vec<OsString>,
    ) -> Result<ArgMatches, clap::Error> {
        if !help::requests_all_flags(&words) {
            command = command.mut_subcommands(|command| match command.get_name() {
                "serve" | "agent" => help::abridge(command),
                _ => command,
            });
        }
        let matches = command
            .try_get_matches_from_mut(words.iter())
            .map_err(|error| advise(&command, &words, error))?;
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
                let message = format!("{arg} is a flag of frontends: give it to chiasm serve");
                let mut error = plain_error(ErrorKind::ArgumentConflict, message);
                error.insert(ContextKind::InvalidArg, ContextValue::String(arg));
                return Err(error);
            }
        }
        Ok(matches)
    }
}

/// A parsed command line.
pub(crate) struct Parsed {
    pub(crate) matches: ArgMatches,
    /// The configuration file, without the values that other sources replace.
    pub(crate) file: Option<ConfigFile>,
    pub(crate) definition: clap::Command,
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
    /// Serve a model: an OpenAI-compatible frontend in front of several engines
    Serve(Box<ServeArgs>),
    /// Run the engines of this machine for frontends on any machine (chiasm serve --agents)
    Agent(Box<ServeArgs>),
    /// Stop an agent from taking new requests, or let it take them again
    Drain(DrainArgs),
    /// Check that an agent answers, or that frontends have admitted its engines; exit with an error
    /// if not
    Probe(ProbeArgs),
    /// Run a demo of about a minute: a frontend, two simulated engines and ten short conversations
    Demo(DemoArgs),
    /// Show what an image becomes in a model's prompt: identity, layout, tensors
    Inspect(InspectArgs),
    /// Check that this machine has what chiasm serve needs; exit with an error if not
    Doctor(DoctorArgs),
    /// Check a configuration file, or show the values in force
    #[command(subcommand)]
    Config(ConfigCommand),
    /// Print the manual page of a command, for man
    Man {
        /// The command, such as serve [default: chiasm itself]
        command: Option<String>,
    },
    /// Print a shell's completion script for this command line
    Completions {
        /// Shell to print the script for
        shell: clap_complete::Shell,
    },
    /// List the engines that outlive their frontends, or stop them
    Engines(EnginesArgs),
    /// Run one simulated engine that speaks vLLM's wire protocol
    SimEngine(SimEngineArgs),
    /// Compare routing policies on a modelled fleet in virtual time
    Simulate(Box<SimulateArgs>),
}

#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    /// Directory with config.json, tokenizer.json and the processor's configuration, or the id of a
    /// model on the Hugging Face hub, such as Qwen/Qwen2.5-VL-7B-Instruct
    pub(crate) model: PathBuf,
    /// YAML file with values for flags. The command line and the environment take precedence
    #[arg(long, env = config_file::CONFIG_VARIABLE, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Branch, tag or commit of a model on the hub, for all of its files [default: main]
    #[arg(long, env = "CHIASM_REVISION")]
    pub(crate) revision: Option<Revision>,
    /// The paths of all files of a model on the hub, downloaded or not; empty for a directory. Set
    /// when the model is resolved.
    #[arg(skip)]
    pub(crate) hub_files: Vec<String>,
    /// Name of the model in requests [default: MODEL as given]
    #[arg(long, env = "CHIASM_SERVED_MODEL_NAME")]
    pub(crate) served_model_name: Option<String>,
    /// Address to listen on; 0.0.0.0 or :: for all addresses of this machine
    #[arg(long, env = "CHIASM_HOST", default_value = "127.0.0.1", value_parser = ip_address)]
    pub(crate) host: IpAddr,
    /// Port to listen on; 0 picks a free one
    #[arg(long, env = "CHIASM_PORT", default_value_t = 8000)]
    pub(crate) port: u16,
    /// Chat template that replaces the model's own: a Jinja file, or the template itself (text with
    /// a brace or a line break)
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

    /// vLLM's own flags, after --, for launched engines and for vLLM's processor
    #[arg(last = true, value_name = "VLLM_FLAGS", help_heading = "Engines")]
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

#[derive(Debug, Subcommand)]
pub(crate) enum ConfigCommand {
    /// Check that chiasm serve accepts a configuration file
    Check {
        /// The file
        file: PathBuf,
        /// Check it for chiasm agent
        #[arg(long)]
        agent: bool,
    },
    /// Print the values that a command line would use, each with its source, as a configuration
    /// file
    Show {
        /// The command line, such as serve --config chiasm.yaml --port 9000
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
        command: Vec<OsString>,
    },
    /// Print the JSON schema of the configuration file, for editors
    Schema,
}

#[derive(Debug, Args)]
pub(crate) struct DemoArgs {
    /// Print JSON lines
    #[arg(long)]
    pub(crate) json: bool,
    /// Keep the server running afterwards
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
    /// Images and videos to inspect: files, or http(s) or data: URLs
    #[arg(required = true, value_name = "FILE|URL")]
    pub(crate) media: Vec<String>,
    /// Print JSON lines
    #[arg(long)]
    pub(crate) json: bool,
    /// Write each tensor of images to this directory, as .npy
    #[arg(long, value_name = "DIR")]
    pub(crate) dump: Option<PathBuf>,
    /// Tokens per block, for the block keys
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(crate) block_size: u32,
    /// Dump normalised floats instead of raw pixels
    #[arg(long)]
    pub(crate) normalized: bool,
    /// Processor settings as a JSON object, as in a request's mm_processor_kwargs
    #[arg(long, value_name = "JSON", value_parser = json_object, default_value = "{}")]
    pub(crate) mm_processor_kwargs: Map<String, Value>,
    /// Settings for reading videos as a JSON object, as media_io_kwargs.video in a request
    #[arg(long, value_name = "JSON", value_parser = json_object, default_value = "{}")]
    pub(crate) media_io_kwargs: Map<String, Value>,
}

#[derive(Debug, Args)]
pub(crate) struct EnginesArgs {
    /// State folder of the frontends [default: that of chiasm serve]
    #[arg(long, env = "CHIASM_STATE_DIR", value_name = "DIR")]
    pub(crate) state_dir: Option<PathBuf>,
    /// Stop the launched engine of this name; fails while a frontend uses it
    #[arg(long, value_name = "NAME", conflicts_with = "stop_all")]
    pub(crate) stop: Option<String>,
    /// Stop all launched engines that no frontend uses
    #[arg(long)]
    pub(crate) stop_all: bool,
    /// Print JSON lines
    #[arg(long)]
    pub(crate) json: bool,
}

/// Removes the flags that an agent lacks from the help of `--engines`.
fn without_frontend_sources(arg: Arg) -> Arg {
    const SOURCES: &str = ", or none with --agents, --discovery or --upstream";
    let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
    if help.contains(SOURCES) { arg.help(help.replace(SOURCES, "")) } else { arg }
}

fn ip_address(text: &str) -> Result<IpAddr, ValueError> {
    text.parse().map_err(|_| ValueError::IpAddress)
}

fn seconds(text: &str) -> Result<Duration, ValueError> {
    let seconds: f64 = text.parse().map_err(|_| ValueError::Seconds)?;
    if seconds < 0.0 {
        return Err(ValueError::NegativeSeconds);
    }
    Duration::try_from_secs_f64(seconds).map_err(|_| ValueError::Seconds)
}

/// Parses a number of seconds above 0.
fn positive_seconds(text: &str) -> Result<Duration, ValueError> {
    match seconds(text) {
        Ok(Duration::ZERO) | Err(ValueError::NegativeSeconds) => Err(ValueError::ZeroSeconds),
        result => result,
    }
}

/// Parses the address of an agent.
fn agent_address(text: &str) -> Result<String, ValueError> {
    let address = text.trim();
    Candidate::new(address, None).map_err(|_| ValueError::AgentAddress)?;
    Ok(address.to_owned())
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
        for (flag, value) in [
            ("--api-key", "k"),
            ("--agents", "a:1"),
            ("--max-audio-seconds", "2"),
            ("--root-path", "/m"),
        ] {
            let error = parse(&[flag, value]).unwrap_err().to_string();
            assert!(error.contains(flag) && error.contains("chiasm serve"), "{error}");
        }
    }

    #[test]
    fn agent_help_names_no_frontend_flag() {
        let definition = Cli::definition();
        let help = |command: &str| {
            let command = definition.find_subcommand(command).unwrap();
            let engines = command.get_arguments().find(|arg| arg.get_id() == "engines").unwrap();
            engines.get_help().unwrap().to_string()
        };
        assert!(help("serve").contains("--upstream"));
        assert!(help("agent").ends_with("[default: 1]"), "{}", help("agent"));
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
