//! `chiasm config`: checks a configuration file, shows the values in force, and prints the schema
//! of the file. `cli::config_file` merges the file's values into the command line.

use std::any::TypeId;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::path::Path;

use clap::builder::ValueParser;
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches};
use serde_json::{Map, Value, json};

use crate::cli::config_file::{self, ConfigFile};
use crate::cli::{Cli, ConfigCommand, Parsed};
use crate::error::CliError;

/// The flags whose values are secret, which `show` does not print.
const SECRET_FLAGS: [&str; 2] = ["api_key", "otlp_traces_headers"];

pub(crate) fn run(command: ConfigCommand) -> Result<(), CliError> {
    let output = match command {
        ConfigCommand::Check { file, agent } => {
            check(&file, if agent { "agent" } else { "serve" })?;
            format!("{}: valid\n", file.display())
        }
        ConfigCommand::Show { command } => show(command)?,
        ConfigCommand::Schema => format!("{:#}\n", schema()),
    };
    // A closed standard output is not an error.
    let _ = io::stdout().write_all(output.as_bytes());
    Ok(())
}

/// Checks that `chiasm serve` or `chiasm agent` would accept a file. A file without a model is
/// checked with the model on the command line.
fn check(path: &Path, command: &str) -> Result<(), CliError> {
    let definition = Cli::definition();
    let Some(subcommand) = definition.find_subcommand(command) else { return Ok(()) };
    let file = ConfigFile::read(path, subcommand).map_err(|e| CliError::Usage(e.to_string()))?;
    let mut words: Vec<OsString> = ["chiasm", command, "--config"].map(OsString::from).into();
    words.push(path.into());
    if !file.sets("model") {
        words.push("MODEL".into());
    }
    Cli::parse(words).map(drop).map_err(|error| usage(&error))
}

/// Returns the values that a command line would use, as a configuration file with the source of
/// each value as a comment.
fn show(command: Vec<OsString>) -> Result<String, CliError> {
    let words = [OsString::from("chiasm")].into_iter().chain(command).collect();
    let Parsed { matches, file, definition } = Cli::parse(words).map_err(|error| usage(&error))?;
    let Some((name, given)) = matches.subcommand() else { return Ok(String::new()) };
    let Some(command) = definition.find_subcommand(name) else { return Ok(String::new()) };
    let mut lines: Vec<(String, String)> = Vec::new();
    let positional = command.get_positionals().filter(|arg| arg.get_id() == "model");
    for arg in positional.chain(config_file::flags(command)) {
        let Some(value) = value(arg, given) else { continue };
        let key = arg.get_long().unwrap_or(arg.get_id().as_str());
        lines.push((format!("{key}: {value}"), source(arg, given, file.as_ref())));
    }
    if let Some(flags) = given.get_raw("vllm_args") {
        let flags: Vec<_> = flags.map(|word| word.to_string_lossy()).collect();
        lines.push((format!("# for vLLM: {}", flags.join(" ")), String::new()));
    }
    let width = lines.iter().map(|(line, _)| line.len()).max().unwrap_or(0).min(60);
    let mut text = String::new();
    for (line, source) in lines {
        let _ = match source.as_str() {
            "" => writeln!(text, "{line}"),
            source => writeln!(text, "{line:width$}  # {source}"),
        };
    }
    Ok(text)
}

/// Returns the value of an argument in YAML's form; `None` if it has none.
fn value(arg: &Arg, given: &ArgMatches) -> Option<String> {
    let words = given.get_raw(arg.get_id().as_str())?;
    if SECRET_FLAGS.contains(&arg.get_id().as_str()) {
        return Some("\"…\"".to_owned());
    }
    let words: Vec<_> = words.map(|word| to_yaml(&word.to_string_lossy())).collect();
    if config_file::takes_list(arg) {
        return Some(format!("[{}]", words.join(", ")));
    }
    words.into_iter().next_back()
}

/// Returns text as a scalar of YAML: plain where that reads back as the same text.
fn to_yaml(text: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "._/+-".contains(c);
    let is_safe = text.chars().all(is_plain)
        && text.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '/')
        && !["null", "Null", "NULL"].contains(&text);
    if is_safe { text.to_owned() } else { Value::from(text).to_string() }
}

/// Describes the source of an argument's value.
fn source(arg: &Arg, given: &ArgMatches, file: Option<&ConfigFile>) -> String {
    let id = arg.get_id().as_str();
    match (given.value_source(id), file) {
        (Some(ValueSource::CommandLine), Some(file)) if file.sets(id) => {
            file.path().display().to_string()
        }
        (Some(ValueSource::CommandLine), _) => "command line".to_owned(),
        (Some(ValueSource::EnvVariable), _) => {
            let variable = arg.get_env().unwrap_or_default().to_string_lossy();
            format!("environment, {variable}")
        }
        _ => "default".to_owned(),
    }
}

fn usage(error: &clap::Error) -> CliError {
    let text = error.to_string();
    CliError::Usage(text.strip_prefix("error: ").unwrap_or(&text).trim_end().to_owned())
}

/// Returns the JSON schema of the file for `chiasm serve` and `chiasm agent`.
fn schema() -> Value {
    let definition = Cli::definition();
    let mut properties = Map::new();
    let commands = ["serve", "agent"].into_iter();
    for command in commands.filter_map(|name| definition.find_subcommand(name)) {
        for arg in config_file::flags(command).filter(|arg| !arg.is_hide_set()) {
            let Some(long) = arg.get_long() else { continue };
            properties.entry(long).or_insert_with(|| property(arg));
        }
    }
    let model = definition
        .find_subcommand("serve")
        .and_then(|serve| serve.get_positionals().find(|arg| arg.get_id() == "model"));
    properties.extend(model.map(|arg| ("model".to_owned(), property(arg))));
    properties.insert(
        config_file::VLLM_KEY.to_owned(),
        json!({
            "description": "Flags for every vLLM engine, which follow -- on the command line: true \
                            gives a flag without a value, and false the flag with no- before its \
                            name",
            "type": "object",
        }),
    );
    json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Configuration file of chiasm serve and chiasm agent",
        "type": "object",
        "additionalProperties": false,
        "properties": properties,
    })
}

/// Returns the schema of one flag's value.
fn property(arg: &Arg) -> Value {
    let mut schema =
        if config_file::is_switch(arg) { json!({"type": "boolean"}) } else { scalar(arg) };
    if config_file::takes_list(arg) {
        schema = json!({"anyOf": [schema.clone(), {"type": "array", "items": schema}]});
    }
    let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
    if let Value::Object(schema) = &mut schema {
        schema.insert("description".to_owned(), help.into());
    }
    schema
}

fn scalar(arg: &Arg) -> Value {
    let choices = arg.get_possible_values();
    if !choices.is_empty() {
        let names: Vec<_> = choices.iter().map(|choice| choice.get_name()).collect();
        return json!({"enum": names});
    }
    let parser: &ValueParser = arg.get_value_parser();
    let is = |types: &[TypeId]| types.iter().any(|of| parser.type_id() == *of);
    let integers = [
        TypeId::of::<u16>(),
        TypeId::of::<u32>(),
        TypeId::of::<u64>(),
        TypeId::of::<usize>(),
        TypeId::of::<i64>(),
    ];
    if is(&integers) {
        json!({"type": "integer", "minimum": 0})
    } else if is(&[TypeId::of::<f64>(), TypeId::of::<std::time::Duration>()]) {
        json!({"type": "number"})
    } else {
        json!({"type": ["string", "number", "object"]})
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const SCHEMA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/config.schema.json");

    /// Writes a configuration file and returns it with its folder.
    fn file(text: &str) -> (tempfile::TempDir, std::path::PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("chiasm.yaml");
        fs::write(&path, text).unwrap();
        (folder, path)
    }

    fn shown(text: &str, words: &[&str]) -> Result<String, String> {
        let (_folder, path) = file(text);
        let path = path.display().to_string();
        let command = [&["serve", "--config", &path], words].concat();
        let text = show(command.into_iter().map(OsString::from).collect());
        text.map(|text| text.replace(&path, "FILE")).map_err(|error| error.to_string())
    }

    fn checked(text: &str) -> Result<(), String> {
        let (_folder, path) = file(text);
        let result = check(&path, "serve").map_err(|error| error.to_string());
        result.map_err(|error| error.replace(&path.display().to_string(), "FILE"))
    }

    #[test]
    fn command_line_wins_over_file_over_default() {
        let text = shown("model: m\nport: 9000\nhost: 0.0.0.0\n", &["--port", "7"]).unwrap();
        let line = |key: &str| text.lines().find(|line| line.starts_with(key)).unwrap();
        assert!(line("port: 7 ").ends_with("# command line"), "{text}");
        assert!(line("host: 0.0.0.0").ends_with("# FILE"), "{text}");
        assert!(line("model: m").ends_with("# FILE"), "{text}");
        assert!(line("policy: kv+media").ends_with("# default"), "{text}");
    }

    #[test]
    fn lists_switches_objects_reach_their_flags() {
        let text = shown(
            "model: m\nattach: ['tcp://a:1', 'tcp://b:2']\nprotect_metrics: true\n\
             share-gpu: false\nmm-processor-kwargs: {size: {longest_edge: 7}}\n\
             vllm-args: {dtype: float16, lora: false}\n",
            &["--", "--seed", "1"],
        )
        .unwrap();
        for part in [
            "attach: [\"tcp://a:1\", \"tcp://b:2\"]",
            "protect-metrics: true",
            "share-gpu: false",
            r#"mm-processor-kwargs: "{\"size\":{\"longest_edge\":7}}""#,
            "# for vLLM: --dtype float16 --no-lora --seed 1",
        ] {
            assert!(text.contains(part), "{part} is missing in {text}");
        }
    }

    #[test]
    fn value_excluded_by_command_line_is_left_out() {
        let text = shown("model: m\nsim: 2\n", &["--engines", "3"]).unwrap();
        assert!(text.contains("engines: 3") && !text.contains("sim: 2"), "{text}");
        let error = checked("sim: 2\nengines: 3\n").unwrap_err();
        assert!(error.contains("--sim") && error.contains("--engines"), "{error}");
    }

    #[test]
    fn secrets_are_not_shown() {
        let text = shown("model: m\n", &["--api-key", "hunter2"]).unwrap();
        assert!(text.contains("api-key: ") && !text.contains("hunter2"), "{text}");
    }

    #[test]
    fn shown_values_are_valid_file() {
        let text = shown("model: m\nengines: 2\n", &["--policy", "kv", "--agents", "a:1"]).unwrap();
        assert_eq!(checked(&text), Ok(()), "{text}");
    }

    #[test]
    fn faults_name_file_and_key() {
        for (text, parts) in [
            ("prot: 1", ["unknown key 'prot'", "did you mean 'port'?"]),
            ("dtype: float16", ["unknown key 'dtype'", "vllm-args:\n  dtype"]),
            ("port: 70000", ["invalid value '70000' for '--port", "'port' is set in FILE"]),
            ("port: [1, 2]", ["'port' expects one value", "FILE"]),
            ("share-gpu: maybe", ["'share-gpu' expects true or false", "FILE"]),
            ("vllm_args: 3", ["'vllm_args' expects a mapping", "FILE"]),
            ("- a\n- b", ["expected one mapping", "FILE"]),
            ("port: 1\nport: 2", ["not valid YAML", "FILE"]),
            ("api-key: a\napi_key: b", ["'api_key' occurs twice", "FILE"]),
            ("a: [", ["not valid YAML", "FILE"]),
            ("config: other.yaml", ["unknown key 'config'", "FILE"]),
            ("announce: etcd://a", ["announce", "FILE"]),
        ] {
            let error = checked(text).expect_err(text);
            for part in parts {
                assert!(error.contains(part), "{part} is missing in {error}");
            }
        }
        assert_eq!(checked("# nothing\n"), Ok(()));
    }

    #[test]
    fn missing_or_large_file_is_refused() {
        let error = check(Path::new("/nonexistent.yaml"), "serve").unwrap_err().to_string();
        assert!(error.starts_with("/nonexistent.yaml: "), "{error}");
        let error = checked(&"#".repeat(2 << 20)).unwrap_err();
        assert!(error.contains("more than"), "{error}");
    }

    #[test]
    fn committed_schema_matches_command_line() {
        let generated = format!("{:#}\n", schema());
        if std::env::var_os("CHIASM_WRITE_DOCS").is_some_and(|value| value == "1") {
            fs::write(SCHEMA, &generated).unwrap();
        }
        let current = fs::read_to_string(SCHEMA).unwrap_or_default();
        assert!(
            current == generated,
            "docs/config.schema.json differs from the command line; write it again with: \
             CHIASM_WRITE_DOCS=1 cargo test -p chiasm --lib config"
        );
    }
}
