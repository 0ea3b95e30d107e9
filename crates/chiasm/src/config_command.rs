//! `chiasm config`: checks a configuration file, shows the values in force, and prints the schema
//! of the file. `cli::config_file` merges the file's values into the command line.

use std::any::TypeId;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::path::Path;

use clap::builder::ValueParser;
use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, FromArgMatches};
use serde_json::{Map, Value, json};

use crate::cli::config_file::{self, ConfigFile};
use crate::cli::{Cli, Command, ConfigCommand, Parsed};
use crate::error::CliError;
use crate::serve;
use crate::side::Side;
use crate::vllm_flags::FlagArg;

/// The flags whose values are secret, which `show` does not print.
const SECRET_FLAGS: [&str; 3] = ["api_key", "otlp_traces_endpoint", "otlp_traces_headers"];
/// The flag of vLLM whose value is secret. `--api-key` after `--` is refused.
const SECRET_VLLM_FLAG: &str = "--hf-token";
/// Stands for a secret.
const HIDDEN: &str = "\"…\"";
/// The model that stands in for a missing one while a command line is parsed.
const PLACEHOLDER_MODEL: &str = "owner/model";

/// Runs a subcommand of `chiasm config` and prints its output.
pub(crate) fn run(command: ConfigCommand) -> Result<(), CliError> {
    let output = match command {
        ConfigCommand::Check { file, agent } => {
            check(&file, if agent { Side::Agent } else { Side::Frontend })?;
            format!("{}: valid\n", file.display())
        }
        ConfigCommand::Show { command } => show(command)?,
        ConfigCommand::Schema => format!("{:#}\n", schema()),
    };
    // A closed standard output is not an error.
    let _ = io::stdout().write_all(output.as_bytes());
    Ok(())
}

/// Checks that `chiasm serve` or `chiasm agent` would accept a file on this machine: its keys and
/// values, vLLM's flags in it, and the files that it names. A file without a model is checked with
/// a placeholder.
fn check(path: &Path, side: Side) -> Result<(), CliError> {
    let command = match side {
        Side::Frontend => "serve",
        Side::Agent => "agent",
    };
    let words = ["chiasm", command, "--config"].map(OsString::from);
    let words = words.into_iter().chain([path.into()]).collect();
    let (parsed, _) = parse_allowing_missing_model(words)?;
    let cli = Cli::from_arg_matches(&parsed.matches).map_err(|error| to_usage_error(&error))?;
    match cli.command {
        Command::Serve(args) | Command::Agent(args) => serve::check_flags(&args, side),
        _ => Ok(()),
    }
}

/// Parses a command line, with [`PLACEHOLDER_MODEL`] if neither it nor its file has a model.
/// Returns `true` in that case.
fn parse_allowing_missing_model(mut words: Vec<OsString>) -> Result<(Parsed, bool), CliError> {
    let error = match Cli::parse(words.clone()) {
        Ok(parsed) => return Ok((parsed, false)),
        Err(error) => error,
    };
    if error.kind() != ErrorKind::MissingRequiredArgument {
        return Err(to_usage_error(&error));
    }
    words.insert(2, PLACEHOLDER_MODEL.into());
    Ok((Cli::parse(words).map_err(|error| to_usage_error(&error))?, true))
}

/// Returns the values that a command line would use, as a configuration file with the source of
/// each value as a comment.
fn show(command: Vec<OsString>) -> Result<String, CliError> {
    let name = command.first().map(|name| name.to_string_lossy().into_owned());
    if let Some(name) = name.filter(|name| !["serve", "agent"].contains(&name.as_str())) {
        return Err(CliError::Usage(format!(
            "expected the command line of chiasm serve or chiasm agent, got '{name}'"
        )));
    }
    let words = [OsString::from("chiasm")].into_iter().chain(command).collect();
    let (Parsed { matches, file, definition }, lacks_model) = parse_allowing_missing_model(words)?;
    let Some((name, given)) = matches.subcommand() else { return Ok(String::new()) };
    let Some(command) = definition.find_subcommand(name) else { return Ok(String::new()) };
    let mut lines: Vec<(String, String)> = Vec::new();
    let positional =
        command.get_positionals().filter(|arg| arg.get_id() == "model" && !lacks_model);
    // A flag of the other command, or an old name, is only shown if it is given.
    let is_shown = |arg: &&Arg| {
        let source = given.value_source(arg.get_id().as_str());
        !arg.is_hide_set() || source.is_some_and(|source| source != ValueSource::DefaultValue)
    };
    for arg in positional.chain(config_file::flags(command)).filter(is_shown) {
        let Some(value) = yaml_value(arg, given) else { continue };
        let key = arg.get_long().unwrap_or(arg.get_id().as_str());
        lines.push((format!("{key}: {value}"), describe_source(arg, given, file.as_ref())));
    }
    if let Some(flags) = given.get_raw("vllm_args") {
        let words: Vec<String> = flags.map(|word| word.to_string_lossy().into_owned()).collect();
        lines.push((format!("{}:", config_file::VLLM_KEY), String::new()));
        let flags = vllm_values(&words).into_iter();
        lines.extend(flags.map(|(name, value)| (format!("  {name}: {value}"), String::new())));
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
fn yaml_value(arg: &Arg, given: &ArgMatches) -> Option<String> {
    let words = given.get_raw(arg.get_id().as_str())?;
    if SECRET_FLAGS.contains(&arg.get_id().as_str()) {
        return Some(HIDDEN.to_owned());
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
    let is_safe = text.chars().all(is_plain) && config_file::reads_back(text);
    if is_safe { text.to_owned() } else { Value::from(text).to_string() }
}

/// Returns vLLM's flags as keys and values of YAML, without secrets. Of a flag that is given
/// several times, vLLM uses the last.
fn vllm_values(words: &[String]) -> BTreeMap<String, String> {
    let mut values = BTreeMap::new();
    let mut words = words.iter().peekable();
    while let Some(word) = words.next() {
        let Some(flag) = FlagArg::parse(word) else { continue };
        let mut given: Vec<String> = flag.value.into_iter().map(to_yaml).collect();
        while let Some(value) = words.next_if(|word| FlagArg::parse(word).is_none()) {
            given.push(to_yaml(value));
        }
        let value = match given.as_slice() {
            [] => "true".to_owned(),
            _ if flag.matches(SECRET_VLLM_FLAG) => HIDDEN.to_owned(),
            [value] => value.clone(),
            values => format!("[{}]", values.join(", ")),
        };
        values.insert(to_yaml(&flag.key()), value);
    }
    values
}

/// Describes the source of an argument's value.
fn describe_source(arg: &Arg, given: &ArgMatches, file: Option<&ConfigFile>) -> String {
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

/// Converts an error of clap, without its prefix `error: `.
fn to_usage_error(error: &clap::Error) -> CliError {
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
            let names = [long].into_iter().chain(arg.get_visible_aliases().unwrap_or_default());
            for name in names {
                properties.entry(name).or_insert_with(|| property(arg));
            }
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
    if config_file::takes_list(arg) || config_file::is_json_list(arg) {
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
        let result = check(&path, Side::Frontend).map_err(|error| error.to_string());
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
            "vllm-args:\n  dtype: float16\n  no-lora: true\n  seed: 1\n",
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
        let collector = "http://u:hunter2@127.0.0.1:4318";
        let flags = ["--api-key", "hunter2", "--otlp-traces-endpoint", collector];
        for vllm_flags in [&["--", "--hf-token", "hunter2"][..], &["--", "--hf_token=hunter2"]] {
            let text = shown("model: m\n", &[&flags, vllm_flags].concat()).unwrap();
            assert!(text.contains("api-key: ") && !text.contains("hunter2"), "{text}");
            assert!(text.contains("  hf-token: \"…\""), "{text}");
        }
        let text = shown("model: m\n", &["--", "--hf-tok", "hunter2"]).unwrap();
        assert!(text.contains("  hf-tok: \"…\""), "{text}");
    }

    #[test]
    fn vllm_flags_are_shown_by_long_name() {
        let flags = ["--", "--seed", "-1", "-tp", "2", "--max_model_len=9", "--max-model-len", "8"];
        let flags = [&flags[..], &["-cc.mode=3", "--compilation_config.cudagraph_mode", "NONE"]];
        let text = shown("model: m\n", &flags.concat()).unwrap();
        let expected = "vllm-args:\n  compilation-config.cudagraph_mode: NONE\n  \
                        compilation-config.mode: 3\n  max-model-len: 8\n  seed: -1\n  \
                        tensor-parallel-size: 2\n";
        assert!(text.ends_with(expected), "{text}");
    }

    #[test]
    fn shown_text_reads_back_as_same_text() {
        for (text, shown) in [
            ("kv+media", "kv+media"),
            ("/models/m", "/models/m"),
            ("1.50", "1.50"),
            ("007", "\"007\""),
            ("0x10", "\"0x10\""),
            ("null", "\"null\""),
            ("", "\"\""),
            ("-", "\"-\""),
            ("a: b", "\"a: b\""),
        ] {
            assert_eq!(to_yaml(text), shown);
        }
    }

    // A link to an agent needs a Tokio runtime.
    #[tokio::test]
    async fn shown_values_are_valid_file() {
        let flags =
            ["--policy", "kv", "--agents", "127.0.0.1:1", "--", "--seed", "1", "--a", "1", "2"];
        let text = shown("model: m\nengines: 2\n", &flags).unwrap();
        assert!(text.ends_with("vllm-args:\n  a: [1, 2]\n  seed: 1\n"), "{text}");
        assert_eq!(checked(&text), Ok(()), "{text}");
        let text = show(["agent", "--sim", "1"].map(OsString::from).into()).unwrap();
        assert!(text.contains("port: 8100") && !text.contains("protect-metrics"), "{text}");
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

    // A link to an agent needs a Tokio runtime.
    #[tokio::test]
    async fn check_reads_named_files_and_vllm_flags() {
        for (text, parts) in [
            ("api-key-file: /nonexistent", ["--api-key-file", "/nonexistent"]),
            ("block-key-secret: /nonexistent", ["--block-key-secret", "/nonexistent"]),
            ("allowed-local-media-path: /nonexistent", ["--allowed-local-media-path", "folder"]),
            ("otlp-traces-endpoint: grpc://a:1", ["--otlp-traces-endpoint", "gRPC"]),
            ("upstream: 'http://a:1,api-key-file=/nonexistent'", ["--upstream", "/nonexistent"]),
            ("model: /nonexistent", ["MODEL /nonexistent", "neither"]),
            ("chat-template: /nonexistent", ["/nonexistent", "template"]),
            ("chat-template: '{% if %}'", ["chat template", "does not compile"]),
            ("tool-call-parser: hermess", ["hermess", "hermes"]),
            ("engines: 0", ["engine", "--engines"]),
            ("agents: [gpu1:8100]", ["gpu1:8100", "--agent-plaintext"]),
            ("vllm-args: {data-parallel-rank: 2}", ["--data-parallel-rank", "group"]),
            ("vllm-args: {api-key: secret}", ["--api-key", "can't be passed to vLLM"]),
            ("vllm-args: {media-io-kwargs: {x: {}}}", ["--media-io-kwargs", "x"]),
            (
                "engines: prefill=1,decode=1\nrole-args: 'decode=--kv-transfer-config={}'",
                ["--kv-transfer-config", "--kv-connector"],
            ),
            ("take-tensors: true", ["take-tensors", "agent"]),
        ] {
            let error = checked(text).expect_err(text);
            for part in parts {
                assert!(error.contains(part), "{part} is missing in {error}");
            }
            assert!(!error.contains("secret'"), "{error}");
        }
        // Engines that run already have their own flags.
        assert_eq!(checked("sim: 1\nvllm-args: {data-parallel-size: 2}"), Ok(()));
    }

    #[test]
    fn example_of_docs_is_valid() {
        let page = include_str!("../../../docs/serve.md");
        let (_, example) = page.split_once("```yaml\n").unwrap();
        let (example, _) = example.split_once("```").unwrap();
        assert!(example.contains("vllm-args:"), "{example}");
        assert_eq!(checked(example), Ok(()));
    }

    #[test]
    fn agent_file_without_tls_needs_loopback() {
        let (_folder, path) = file("host: 0.0.0.0\n");
        let error = check(&path, Side::Agent).unwrap_err().to_string();
        assert!(error.contains("--agent-plaintext"), "{error}");
        let (_folder, path) = file("take-tensors: true\n");
        check(&path, Side::Agent).unwrap();
    }

    #[test]
    fn values_are_shown_without_model() {
        let text = shown("port: 9000\n", &[]).unwrap();
        assert!(text.contains("port: 9000") && !text.contains("model: "), "{text}");
        for command in ["drain", "demo", "engines", "config"] {
            let error = show(vec![command.into()]).unwrap_err().to_string();
            assert!(error.contains(command) && error.contains("chiasm serve"), "{error}");
        }
    }

    #[test]
    fn alias_sets_its_flag() {
        let text = shown("mm-processor-cache-gb: 2\n", &[]).unwrap();
        assert!(text.contains("receiver-cache-gb: 2"), "{text}");
        let text = shown("mm-processor-cache-gb: 2\n", &["--receiver-cache-gb", "3"]).unwrap();
        assert!(text.contains("receiver-cache-gb: 3"), "{text}");
        let error = checked("mm_processor_cache_gb: x\n").unwrap_err();
        assert!(error.contains("'mm_processor_cache_gb' is set in FILE"), "{error}");
        let error = checked("max-cpu-loras: 1\nmax-lora-adapters: 1\n").unwrap_err();
        assert!(error.contains("occurs twice"), "{error}");
    }

    #[test]
    fn missing_or_large_file_is_refused() {
        let error = check(Path::new("/nonexistent.yaml"), Side::Frontend).unwrap_err().to_string();
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
