//! Advice in the errors of the command line.

use std::ffi::OsString;

use chiasm_engine::launch::{FlagPlace, nearest_flag, place_of_flag};
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, Command, Error};

use super::config_file::MIN_SIMILARITY;
use super::value_error::plain_error;

/// Replaces the error of a faulty command line by one with advice, if there is any.
pub(super) fn advise(command: &Command, words: &[OsString], error: Error) -> Error {
    let message = match error.kind() {
        ErrorKind::UnknownArgument => vllm_flag_advice(&error),
        ErrorKind::MissingRequiredArgument | ErrorKind::ValueValidation => {
            taken_model_advice(command, words)
        }
        _ => None,
    };
    match message {
        Some(message) => plain_error(error.kind(), message),
        None => error,
    }
}

/// Returns advice for an unknown flag that is a flag of `vllm serve`, or is closer to one of its
/// flags than to the flag that clap suggests.
fn vllm_flag_advice(error: &Error) -> Option<String> {
    let Some(ContextValue::String(flag)) = error.get(ContextKind::InvalidArg) else { return None };
    let Some(place) = place_of_flag(flag) else {
        let (nearest, similarity) = nearest_flag(flag);
        let suggested = match error.get(ContextKind::SuggestedArg) {
            Some(ContextValue::String(own)) => strsim::jaro(own, flag),
            _ => MIN_SIMILARITY,
        };
        return (similarity > suggested).then(|| {
            format!("there is no flag {flag}; did you mean {nearest}, after --? It is vLLM's")
        });
    };
    Some(match place {
        FlagPlace::Engine => format!(
            "{flag} is a flag of vLLM's engines: give it after --, as in chiasm serve MODEL \
             --engines 2 -- {flag} …"
        ),
        FlagPlace::Instead(instead) => format!("{flag} is a flag of vllm serve: {instead}"),
    })
}

/// Names the flag that seems to have taken MODEL as one of its values: it takes all words up to the
/// next flag.
fn taken_model_advice(command: &Command, words: &[OsString]) -> Option<String> {
    let matches = command.clone().ignore_errors(true).try_get_matches_from(words).ok()?;
    let (name, given) = matches.subcommand()?;
    let subcommand = command.find_subcommand(name)?;
    let takes_model = subcommand.get_positionals().any(|arg| arg.get_id() == "model");
    if !takes_model || given.get_raw("model").is_some() {
        return None;
    }
    let words: Vec<&str> = words.iter().filter_map(|word| word.to_str()).collect();
    let takes_many = |arg: &&Arg| arg.get_num_args().is_some_and(|range| range.max_values() > 1);
    let longs: Vec<&str> =
        subcommand.get_opts().filter(takes_many).filter_map(Arg::get_long).collect();
    let own: Vec<&str> = words.iter().copied().take_while(|word| *word != "--").collect();
    own.iter().enumerate().rev().find_map(|(at, word)| {
        let long = word.strip_prefix("--").filter(|name| longs.contains(name))?;
        let values = own[at + 1..].iter().take_while(|word| !word.starts_with('-'));
        let last = values.skip(1).last()?;
        Some(format!(
            "MODEL is missing, or --{long} took it: it takes all words up to the next flag, the \
             last one is '{last}'. Give MODEL first, as in chiasm {name} MODEL --{long} …"
        ))
    })
}

#[cfg(test)]
mod tests {
    use crate::cli::Cli;

    fn error(words: &[&str]) -> String {
        Cli::parse_args(words).unwrap_err().to_string()
    }

    #[test]
    fn nearer_flag_of_vllm_is_suggested() {
        let text = error(&["chiasm", "serve", "m", "--max-model-length", "9"]);
        assert!(text.contains("did you mean --max-model-len, after --"), "{text}");
        let text = error(&["chiasm", "serve", "m", "--prot", "9"]);
        assert!(text.contains("--port") && !text.contains("after --"), "{text}");
    }

    #[test]
    fn hints_end_without_usage() {
        for words in [&["serve", "m", "--dtype", "x"][..], &["agent", "m", "--api-key", "x"]] {
            let text = error(&[&["chiasm"], words].concat());
            assert!(!text.contains("Usage") && !text.contains("try '--help'"), "{text}");
        }
    }

    #[test]
    fn flag_that_took_model_is_named() {
        let words = ["chiasm", "serve", "--sim", "1", "--allowed-media-domains", "a.b", "org/m"];
        let text = error(&words);
        assert!(text.contains("or --allowed-media-domains took it"), "{text}");
        assert!(text.contains("'org/m'"), "{text}");
        let words = ["chiasm", "serve", "--attach", "tcp://a:1", "tcp://a:2", "--agents", "a", "m"];
        assert!(error(&words).contains("--agents took it"));
        for words in [
            &["chiasm", "serve"][..],
            &["chiasm", "serve", "--agents", "a:1"],
            &["chiasm", "serve", "--agents", "a:1", "--", "b", "c"],
            &["chiasm", "drain"],
        ] {
            let text = error(words);
            assert!(text.contains("required"), "{words:?}: {text}");
        }
        let text = error(&["chiasm", "serve", "m", "--allowed-media-domains", "a.b", "a/b"]);
        assert!(text.contains("invalid value 'a/b'"), "{text}");
    }
}
