//! The help of `chiasm serve` and `chiasm agent`: `--help` shows the flags that most users need,
//! and `--help-all` shows all of them.

use std::ffi::OsString;

use clap::builder::Resettable;
use clap::{Arg, ArgAction, Command};

/// The long name of the flag that shows all flags.
pub(super) const HELP_ALL: &str = "help-all";

/// The flags that `--help` shows.
const COMMON_FLAGS: [&str; 25] = [
    "config",
    "served_model_name",
    "host",
    "port",
    "chat_template",
    "api_key",
    "api_key_file",
    "tool_call_parser",
    "reasoning_parser",
    "ssl_certfile",
    "ssl_keyfile",
    "otlp_traces_endpoint",
    "engines",
    "gpus_per_engine",
    "sim",
    "attach",
    "upstream",
    "keep_engines",
    "receiver_cache_gb",
    "agents",
    "discovery",
    "lora_modules",
    "policy",
    "allowed_media_domains",
    "limit_mm_per_prompt",
];

const SERVE_EXAMPLES: &str = "\
Examples:
  Serve a model with one vLLM engine
    chiasm serve Qwen/Qwen2.5-VL-7B-Instruct
  Four engines with one GPU each, and flags for vLLM
    chiasm serve MODEL --engines 4 --gpus-per-engine 1 -- --max-model-len 32768
  Route to servers that are already running
    chiasm serve MODEL --upstream http://gpu1:8000 --upstream http://gpu2:8000
  Route to the workers of Dynamo
    chiasm serve MODEL --upstream dynamo+etcd://etcd:2379/dynamo
  Engines on other machines, each with a running `chiasm agent`
    chiasm serve MODEL --agents gpu1:8100,gpu2:8100
  Prefill and decode on different engines
    chiasm serve MODEL --engines prefill=1,decode=1 --gpus-per-engine 1
  Require a key, and speak TLS
    chiasm serve MODEL --api-key-file keys --ssl-certfile cert.pem --ssl-keyfile key.pem
  Upgrade without losing the engines
    chiasm serve MODEL --keep-engines 600
  Read the flags from a file, and check the file first
    chiasm config check chiasm.yaml && chiasm serve --config chiasm.yaml
  Try everything without a GPU
    chiasm serve MODEL --sim 2

All flags: --help-all, or docs/flags.md";

/// Returns `true` if a command line has `--help-all` before `--`.
pub(super) fn requests_all_flags(words: &[OsString]) -> bool {
    let all = format!("--{HELP_ALL}");
    words.iter().take_while(|word| *word != "--").any(|word| *word == *all)
}

/// Adds `--help-all` to a command that has many flags.
pub(super) fn with_help_all(command: Command) -> Command {
    let all = Arg::new(HELP_ALL)
        .long(HELP_ALL)
        .action(ArgAction::HelpLong)
        .help("Print help with all flags")
        .help_heading(Resettable::Reset);
    let command = command.arg(all);
    if command.get_name() == "serve" { command.after_help(SERVE_EXAMPLES) } else { command }
}

/// Hides rarely used flags and shortens the entries of the others.
pub(super) fn abridge(command: Command) -> Command {
    let short = Arg::new("help")
        .short('h')
        .long("help")
        .action(ArgAction::HelpShort)
        .help("Print help with the most common flags")
        .help_heading(Resettable::Reset);
    command.disable_help_flag(true).arg(short).mut_args(|arg| {
        let id = arg.get_id().as_str();
        let is_common = arg.is_positional() || ["help", HELP_ALL].contains(&id);
        let is_hidden = arg.is_hide_set() || !(is_common || COMMON_FLAGS.contains(&id));
        arg.hide(is_hidden).hide_env(true)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Cli;

    fn help_of(words: &[&str]) -> String {
        Cli::parse_args(words).unwrap_err().to_string()
    }

    #[test]
    fn help_shows_common_flags_alone() {
        let help = help_of(&["chiasm", "serve", "--help"]);
        let flags: Vec<_> = help.lines().filter(|line| line.starts_with("      --")).collect();
        assert_eq!(flags.len(), COMMON_FLAGS.len() + 1, "{help}");
        for flag in COMMON_FLAGS {
            let long = format!("--{}", flag.replace('_', "-"));
            assert!(flags.iter().any(|line| line.contains(&long)), "{long} is missing in {help}");
        }
        assert!(help.contains("--help-all") && help.contains("Examples:"), "{help}");
    }

    #[test]
    fn help_all_shows_every_flag() {
        let help = help_of(&["chiasm", "serve", "--help-all"]);
        let definition = Cli::definition();
        let serve = definition.find_subcommand("serve").unwrap();
        for arg in serve.get_arguments().filter(|arg| !arg.is_hide_set()) {
            let Some(long) = arg.get_long() else { continue };
            assert!(help.contains(&format!("--{long}")), "--{long} is missing");
        }
    }

    #[test]
    fn examples_parse() {
        let examples = SERVE_EXAMPLES.lines().filter_map(|line| line.strip_prefix("    "));
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("chiasm.yaml");
        std::fs::write(&file, "model: m\n").unwrap();
        let mut count = 0;
        for line in examples.flat_map(|line| line.split(" && ")) {
            let words = shlex::split(line).unwrap();
            let words = words.iter().map(|word| match word.as_str() {
                "chiasm.yaml" => file.to_str().unwrap(),
                word => word,
            });
            let result = Cli::parse_args(words);
            assert!(result.is_ok(), "{line}: {}", result.unwrap_err());
            count += 1;
        }
        assert_eq!(count, 11);
    }
}
