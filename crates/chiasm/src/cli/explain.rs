//! The texts of clap's errors: plain words for an invalid number, and the source of each value that
//! is not on the command line.

use std::error::Error as _;
use std::ffi::OsString;

use clap::error::{ContextKind, ContextValue};
use clap::{Arg, Command, Error};

use super::ConfigFile;
use super::config_file::{find_arg, is_named};
use super::value_error::{describe_number, plain_error};

/// Rewrites the text of an invalid number, and adds the source of each value that a file or a
/// variable sets. Any other error is returned unchanged.
pub(super) fn explain(
    error: Error,
    definition: &Command,
    given: &[OsString],
    file: Option<&ConfigFile>,
) -> Error {
    let command = given.get(1).and_then(|name| definition.find_subcommand(name));
    let Some(command) = command else { return error };
    let args: Vec<&Arg> = [ContextKind::InvalidArg, ContextKind::PriorArg]
        .into_iter()
        .filter_map(|kind| error.get(kind))
        .flat_map(|shown| match shown {
            ContextValue::String(shown) => std::slice::from_ref(shown),
            ContextValue::Strings(shown) => shown,
            _ => &[],
        })
        // As in `--port <PORT>`, `--ui[=<WHEN>]` or `--api-key=<KEY>`.
        .filter_map(|shown| shown.split([' ', '=', '[']).next())
        .filter_map(|flag| find_arg(command, flag.trim_start_matches("--")))
        .collect();
    let sources: Vec<String> =
        args.iter().filter_map(|arg| describe_source(arg, given, file)).collect();
    let is_bytes = args.iter().any(|arg| arg.get_id().as_str().ends_with("bytes"));
    let number = error
        .source()
        .and_then(|source| Some((source.to_string(), describe_number(source, is_bytes)?)));
    if sources.is_empty() && number.is_none() {
        return error;
    }
    let text = error.to_string();
    let mut text = text.strip_prefix("error: ").unwrap_or(&text).trim_end().to_owned();
    if let Some((original, plain)) = number {
        text = text.replacen(&format!(": {original}"), &format!(": {plain}"), 1);
    }
    if !sources.is_empty() {
        // The usage does not help with a value from a file or a variable.
        let end = text.find("\n\nUsage:").or_else(|| text.find("\n\nFor more information"));
        text.truncate(end.unwrap_or(text.len()));
        text = format!("{text}\n\n{}", sources.join("\n"));
    }
    plain_error(error.kind(), text)
}

/// Describes the source of an argument's value; `None` if the command line sets it or nothing does.
fn describe_source(arg: &Arg, given: &[OsString], file: Option<&ConfigFile>) -> Option<String> {
    let key = file.and_then(|file| Some((file, file.key_of(arg.get_id().as_str())?)));
    if let Some((file, key)) = key {
        return Some(format!("'{key}' is set in {}", file.path().display()));
    }
    let is_given = given
        .iter()
        .take_while(|word| *word != "--")
        .filter_map(|word| word.to_str()?.strip_prefix("--")?.split('=').next())
        .any(|name| is_named(arg, name));
    let variable = arg.get_env().filter(|name| std::env::var_os(name).is_some())?;
    let long = arg.get_long().filter(|_| !is_given)?;
    Some(format!("--{long} is set by the variable {}", variable.to_string_lossy()))
}

#[cfg(test)]
mod tests {
    use crate::cli::Cli;

    fn error(file: &str, words: &[&str]) -> String {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("chiasm.yaml");
        std::fs::write(&path, file).unwrap();
        let path = path.display().to_string();
        let all = [&["chiasm", "serve", "m", "--config", &path], words].concat();
        Cli::parse_args(all).unwrap_err().to_string().replace(&path, "FILE")
    }

    #[test]
    fn invalid_number_is_described_in_words() {
        for (words, expected) in [
            (["--port", "x"], "for '--port <PORT>': expected a whole number\n"),
            (["--max-body-bytes", "64MiB"], ": expected a whole number of bytes, such as 67108864"),
            (["--max-messages", "99999999999999999999"], ": the number is too large"),
            (["--max-connections", "0"], ": expected 1 or more"),
            (["--port", "70000"], ": expected a whole number from 0 to 65535"),
            (["--busy-waiting", "0"], ": expected 1 or more"),
            (["--media-timeout", "-1"], ": expected 0 or more seconds"),
            (["--media-timeout", "inf"], ": expected a number of seconds"),
        ] {
            let error = error("", &words);
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn value_of_file_names_its_key_without_usage() {
        for (file, parts) in [
            ("port: x", ["expected a whole number", "'port' is set in FILE"]),
            ("ui: maybe", ["possible values: auto, on, off", "'ui' is set in FILE"]),
            ("engines: {prefill: 1}", ["such as prefill=1", "'engines' is set in FILE"]),
            ("engines: 1\nsim: 1", ["'sim' is set in FILE", "'engines' is set in FILE"]),
            ("allowed-origins: 1", ["JSON list", "'allowed-origins' is set in FILE"]),
            ("prot: 1", ["FILE: unknown key 'prot'", "did you mean 'port'?"]),
            ("share-gpu: yes", ["'share-gpu' expects true or false, got 'yes'", "FILE"]),
            ("port: [1, 2]", ["'port' expects one value, got a list", "FILE"]),
            ("port: 1\nport: 2", ["'port' occurs twice, at line 2", "FILE"]),
        ] {
            let error = error(file, &[]);
            for part in parts {
                assert!(error.contains(part), "{part} is missing in {error}");
            }
            assert!(!error.contains("Usage:") && !error.contains("--help"), "{error}");
        }
    }

    #[test]
    fn missing_file_names_its_flag() {
        let words = ["chiasm", "serve", "m", "--config", "nope.yaml"];
        let error = Cli::parse_args(words).unwrap_err().to_string();
        assert!(
            error.starts_with("error: nope.yaml: the file of --config can't be read"),
            "{error}"
        );
    }

    #[test]
    fn yaml_list_is_accepted_for_json_list() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("chiasm.yaml");
        std::fs::write(&path, "allowed-origins: ['https://x']\n").unwrap();
        let path = path.display().to_string();
        Cli::parse_args(["chiasm", "serve", "m", "--config", &path]).unwrap();
    }
}
