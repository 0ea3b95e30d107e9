//! The configuration file of `chiasm serve` and `chiasm agent` (`--config FILE`): YAML in the form
//! of vLLM's, with the long names of flags as keys.
//!
//! The values of the file become words of the command line, in front of those that the user gave. A
//! value whose flag is given on the command line or in the environment is left out; so is a value
//! that conflicts with such a flag.

use std::any::TypeId;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use chiasm_engine::launch::{FlagPlace, place_of_flag};
use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command};
use yaml_rust2::yaml::Hash;
use yaml_rust2::{ScanError, Yaml, YamlLoader};

use super::http::JsonList;
use super::value_error::plain_error;

/// The name of the flag that gives the file.
pub(crate) const CONFIG_FLAG: &str = "config";
/// The environment variable that gives the file.
pub(crate) const CONFIG_VARIABLE: &str = "CHIASM_CONFIG";
/// The key for the model, which is the positional argument of the command line.
const MODEL_KEY: &str = "model";
/// The key for vLLM's flags, which follow `--` on the command line.
pub(crate) const VLLM_KEY: &str = "vllm-args";
/// The id of the argument that takes vLLM's flags.
const VLLM_ARG_ID: &str = "vllm_args";
/// The maximum size of a file.
const MAX_FILE_BYTES: u64 = 1 << 20;
/// The similarity from which a known name is suggested for an unknown one, from 0 to 1.
pub(super) const MIN_SIMILARITY: f64 = 0.7;

/// The values of a configuration file.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct ConfigFile {
    path: PathBuf,
    /// The values by the id of their argument, in the order of the file.
    values: Vec<FileValue>,
}

/// The value of one key.
#[derive(Debug, PartialEq, Eq)]
struct FileValue {
    /// The id of the argument.
    id: String,
    /// The key as the file has it.
    key: String,
    /// The words of the command line that set the value; none for a switch that is off.
    words: Vec<String>,
}

/// An error in a configuration file.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConfigError {
    #[error("{}: the file of --{CONFIG_FLAG} can't be read: {source}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{}: the file has more than {MAX_FILE_BYTES} bytes", path.display())]
    TooLarge { path: PathBuf },
    #[error("{}: not valid YAML: {}", path.display(), describe_syntax(source))]
    Syntax { path: PathBuf, source: ScanError },
    #[error(
        "{}: expected one mapping of flags to values, such as\nport: 8000\nengines: 2",
        path.display()
    )]
    NotAMapping { path: PathBuf },
    #[error("{}: unknown key '{key}'{advice}", path.display())]
    UnknownKey { path: PathBuf, key: String, advice: String },
    #[error("{}: '{key}' expects {expected}, got {found}", path.display())]
    Value { path: PathBuf, key: String, expected: &'static str, found: String },
    #[error("{}: '{key}' occurs twice", path.display())]
    Repeated { path: PathBuf, key: String },
}

impl ConfigFile {
    /// Reads a file for `command`, which is `serve` or `agent`.
    ///
    /// # Errors
    /// The file can't be read, is not YAML, or has an unknown key or a value that its flag does not
    /// take.
    pub(crate) fn read(path: &Path, command: &Command) -> Result<Self, ConfigError> {
        let read = |source| ConfigError::Read { path: path.to_owned(), source };
        let mut text = String::new();
        File::open(path)
            .and_then(|file| file.take(MAX_FILE_BYTES + 1).read_to_string(&mut text))
            .map_err(read)?;
        if text.len() as u64 > MAX_FILE_BYTES {
            return Err(ConfigError::TooLarge { path: path.to_owned() });
        }
        Self::parse(path, &text, command)
    }

    fn parse(path: &Path, text: &str, command: &Command) -> Result<Self, ConfigError> {
        let documents = YamlLoader::load_from_str(text)
            .map_err(|source| ConfigError::Syntax { path: path.to_owned(), source })?;
        let mut file = Self { path: path.to_owned(), values: Vec::new() };
        let keys = match documents.as_slice() {
            // A file of comments sets nothing.
            [] | [Yaml::Null] => return Ok(file),
            [Yaml::Hash(keys)] => keys,
            _ => return Err(ConfigError::NotAMapping { path: path.to_owned() }),
        };
        for (key, value) in keys {
            let key =
                scalar(key).ok_or_else(|| ConfigError::NotAMapping { path: path.to_owned() })?;
            let value = file.parse_value(&key, value, command)?;
            if file.values.iter().any(|other| other.id == value.id) {
                return Err(ConfigError::Repeated { path: path.to_owned(), key });
            }
            file.values.push(value);
        }
        Ok(file)
    }

    fn parse_value(
        &self,
        key: &str,
        value: &Yaml,
        command: &Command,
    ) -> Result<FileValue, ConfigError> {
        let expects = |expected| ConfigError::Value {
            path: self.path.clone(),
            key: key.to_owned(),
            expected,
            found: describe(value),
        };
        let name = key.replace('_', "-");
        if name == VLLM_KEY {
            let Yaml::Hash(flags) = value else {
                return Err(expects("a mapping of vLLM's flags to values"));
            };
            let words = vllm_words(flags).ok_or_else(|| {
                expects("for each of vLLM's flags a value, a list of values, or true or false")
            })?;
            return Ok(FileValue { id: VLLM_ARG_ID.to_owned(), key: key.to_owned(), words });
        }
        let arg = find_arg(command, &name).ok_or_else(|| ConfigError::UnknownKey {
            path: self.path.clone(),
            key: key.to_owned(),
            advice: advice(command, &name),
        })?;
        let json = || match to_json(value) {
            Some(json) => Ok(json.to_string()),
            None => Err(expects("a value that JSON supports")),
        };
        let words = match value {
            Yaml::Array(items) if takes_list(arg) => items
                .iter()
                .map(scalar)
                .collect::<Option<Vec<_>>>()
                .filter(|words| !words.is_empty())
                .ok_or_else(|| expects("a list with one value or more"))?,
            Yaml::Array(_) if is_json_list(arg) => vec![json()?],
            Yaml::Hash(_) if !is_switch(arg) => vec![json()?],
            Yaml::Boolean(flag) if is_switch(arg) => flag.then(String::new).into_iter().collect(),
            _ if is_switch(arg) => return Err(expects("true or false")),
            _ => vec![scalar(value).ok_or_else(|| expects("one value"))?],
        };
        let words = match arg.get_long() {
            None => words,
            Some(long) if is_switch(arg) => words.iter().map(|_| format!("--{long}")).collect(),
            Some(long) => words.iter().map(|word| format!("--{long}={word}")).collect(),
        };
        Ok(FileValue { id: arg.get_id().to_string(), key: key.to_owned(), words })
    }

    /// Removes each value whose flag is also set on the command line or in the environment, or
    /// conflicts with a flag set there. `matches` is the result of parsing without the file.
    pub(crate) fn remove_overridden(&mut self, command: &Command, matches: &ArgMatches) {
        let is_given = |id: &str| {
            let source = matches.value_source(id);
            matches!(source, Some(ValueSource::CommandLine | ValueSource::EnvVariable))
        };
        let given: Vec<&Arg> =
            command.get_arguments().filter(|arg| is_given(arg.get_id().as_str())).collect();
        self.values.retain(|value| {
            // vLLM lets the last of several flags win.
            value.id == VLLM_ARG_ID
                || !given.iter().any(|arg| {
                    arg.get_id() == value.id.as_str() || conflicts(command, arg, &value.id)
                })
        });
    }

    /// Inserts the values into the words of a command line, whose first two are the program and the
    /// subcommand.
    pub(crate) fn insert_into(&self, words: &mut Vec<OsString>) {
        let (vllm, own): (Vec<_>, Vec<_>) =
            self.values.iter().partition(|value| value.id == VLLM_ARG_ID);
        let to_words = |values: Vec<&FileValue>| {
            values
                .into_iter()
                .flat_map(|value| &value.words)
                .map(OsString::from)
                .collect::<Vec<_>>()
        };
        let vllm = to_words(vllm);
        if !vllm.is_empty() {
            let separator = words.iter().position(|word| word == "--").unwrap_or(words.len());
            let after = words.split_off(separator);
            words.push("--".into());
            words.extend(vllm);
            words.extend(after.into_iter().skip(1));
        }
        words.splice(2..2, to_words(own));
    }

    /// Returns the key that sets this argument, as the file has it.
    pub(super) fn key_of(&self, id: &str) -> Option<&str> {
        self.values.iter().find(|value| value.id == id).map(|value| value.key.as_str())
    }

    /// Returns `true` if the file sets this argument.
    pub(crate) fn sets(&self, id: &str) -> bool {
        self.values.iter().any(|value| value.id == id)
    }

    /// Returns the path of the file.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

/// Inserts the values of the configuration file that a command line or the environment names, for
/// `serve` and `agent`. Returns the file.
pub(super) fn insert_config(
    definition: &Command,
    words: &mut Vec<OsString>,
) -> Result<Option<ConfigFile>, clap::Error> {
    let name = words.get(1).and_then(|word| word.to_str());
    let Some(name) = name.filter(|name| ["serve", "agent"].contains(name)) else {
        return Ok(None);
    };
    let Some(path) = path_in(words) else { return Ok(None) };
    let Some(command) = definition.find_subcommand(name) else { return Ok(None) };
    let mut file = ConfigFile::read(&path, command)
        .map_err(|error| plain_error(ErrorKind::ValueValidation, error))?;
    // Errors are ignored here; the parse with the file's values reports them.
    let matches = definition.clone().ignore_errors(true).try_get_matches_from(words.iter());
    if let Ok(Some((_, given))) = matches.as_ref().map(ArgMatches::subcommand) {
        file.remove_overridden(command, given);
    }
    file.insert_into(words);
    Ok(Some(file))
}

/// Returns the path of the configuration file: from the words of a command line before `--`, or
/// from the environment.
fn path_in(words: &[OsString]) -> Option<PathBuf> {
    let long = format!("--{CONFIG_FLAG}");
    let assigned = format!("--{CONFIG_FLAG}=");
    let own = words.iter().take_while(|word| *word != "--");
    let mut path = None;
    let mut is_next = false;
    for word in own {
        let assigned = word.to_str().and_then(|word| word.strip_prefix(&assigned));
        if is_next {
            path = Some(PathBuf::from(word));
        } else if let Some(assigned) = assigned {
            path = Some(PathBuf::from(assigned));
        }
        is_next = *word == *long;
    }
    let from_env = || std::env::var_os(CONFIG_VARIABLE).filter(|value| !value.is_empty());
    path.or_else(|| from_env().map(Into::into))
}

/// Returns `true` if either argument is declared to conflict with the other.
fn conflicts(command: &Command, arg: &Arg, id: &str) -> bool {
    let Some(other) = command.get_arguments().find(|other| other.get_id() == id) else {
        return false;
    };
    command.get_arg_conflicts_with(arg).contains(&other)
        || command.get_arg_conflicts_with(other).contains(&arg)
}

/// Finds the argument of a key.
pub(super) fn find_arg<'a>(command: &'a Command, name: &str) -> Option<&'a Arg> {
    if name == MODEL_KEY {
        return command.get_positionals().find(|arg| arg.get_id() == MODEL_KEY);
    }
    flags(command).find(|arg| is_named(arg, name))
}

/// Returns `true` if `--name` is a flag's long name or an alias of it.
pub(super) fn is_named(arg: &Arg, name: &str) -> bool {
    arg.get_long() == Some(name)
        || arg.get_all_aliases().is_some_and(|aliases| aliases.contains(&name))
}

/// Returns the flags that a file can set.
pub(crate) fn flags(command: &Command) -> impl Iterator<Item = &Arg> {
    command.get_arguments().filter(|arg| {
        let is_meta = [Some(CONFIG_FLAG), Some(super::help::HELP_ALL)].contains(&arg.get_long());
        arg.get_long().is_some() && (arg.get_action().takes_values() || is_switch(arg)) && !is_meta
    })
}

/// Returns `true` if an argument takes several values.
pub(crate) fn takes_list(arg: &Arg) -> bool {
    matches!(arg.get_action(), ArgAction::Append)
}

/// Returns `true` if an argument takes no value.
pub(crate) fn is_switch(arg: &Arg) -> bool {
    matches!(arg.get_action(), ArgAction::SetTrue)
}

/// Returns `true` if an argument takes a list in JSON's form.
pub(crate) fn is_json_list(arg: &Arg) -> bool {
    arg.get_value_parser().type_id() == TypeId::of::<JsonList>()
}

/// Returns a value as errors show it.
fn describe(value: &Yaml) -> String {
    match value {
        Yaml::Array(_) => "a list".to_owned(),
        Yaml::Hash(_) => "a mapping".to_owned(),
        _ => scalar(value).map_or_else(|| "nothing".to_owned(), |text| format!("'{text}'")),
    }
}

/// Returns the text of an error of the YAML parser, with a repeated key as the file has it.
fn describe_syntax(error: &ScanError) -> String {
    let text = error.to_string();
    let key =
        text.split_once("String(\"").and_then(|(_, rest)| rest.split_once("\"): duplicated key"));
    match key {
        Some((key, _)) => format!("'{key}' occurs twice, at line {}", error.marker().line()),
        None => text,
    }
}

/// Returns the text of a value that is neither a list nor a mapping.
fn scalar(value: &Yaml) -> Option<String> {
    match value {
        Yaml::String(text) | Yaml::Real(text) => Some(text.clone()),
        Yaml::Integer(number) => Some(number.to_string()),
        Yaml::Boolean(flag) => Some(flag.to_string()),
        _ => None,
    }
}

/// Returns `true` if YAML reads text without quotation marks as a scalar with the same text.
pub(crate) fn reads_back(text: &str) -> bool {
    let documents = YamlLoader::load_from_str(text).unwrap_or_default();
    matches!(documents.as_slice(), [value] if scalar(value).as_deref() == Some(text))
}

/// Returns vLLM's flags as words of its command line; `None` if a value has no such form. `true`
/// gives the flag alone, and `false` the flag with `no-` before its name.
fn vllm_words(flags: &Hash) -> Option<Vec<String>> {
    let mut words = Vec::new();
    for (key, value) in flags {
        let key = scalar(key)?.replace('_', "-");
        match value {
            Yaml::Boolean(true) => words.push(format!("--{key}")),
            Yaml::Boolean(false) => words.push(format!("--no-{key}")),
            Yaml::Array(items) => {
                words.push(format!("--{key}"));
                words.extend(items.iter().map(scalar).collect::<Option<Vec<_>>>()?);
            }
            Yaml::Hash(_) => {
                words.push(format!("--{key}"));
                words.push(to_json(value)?.to_string());
            }
            _ => {
                words.push(format!("--{key}"));
                words.push(scalar(value)?);
            }
        }
    }
    Some(words)
}

fn to_json(value: &Yaml) -> Option<serde_json::Value> {
    Some(match value {
        Yaml::Null => serde_json::Value::Null,
        Yaml::Boolean(flag) => (*flag).into(),
        Yaml::Integer(number) => (*number).into(),
        Yaml::Real(text) => serde_json::Number::from_f64(text.parse().ok()?)?.into(),
        Yaml::String(text) => text.clone().into(),
        Yaml::Array(items) => items.iter().map(to_json).collect::<Option<Vec<_>>>()?.into(),
        Yaml::Hash(pairs) => {
            let pair = |(key, value): (&Yaml, &Yaml)| Some((scalar(key)?, to_json(value)?));
            serde_json::Value::Object(pairs.iter().map(pair).collect::<Option<_>>()?)
        }
        Yaml::Alias(_) | Yaml::BadValue => return None,
    })
}

/// Returns the advice for an unknown key: the nearest flag, or the place for a flag of vLLM.
fn advice(command: &Command, name: &str) -> String {
    if name == CONFIG_FLAG {
        return ": a file can't name another file".to_owned();
    }
    match place_of_flag(&format!("--{name}")) {
        Some(FlagPlace::Engine) => {
            return format!(
                ": it is a flag of vLLM's engines, which are set below '{VLLM_KEY}', as in\n\
                 {VLLM_KEY}:\n  {name}: …"
            );
        }
        Some(FlagPlace::Instead(instead)) => {
            return format!(": it is a flag of vllm serve: {instead}");
        }
        None => {}
    }
    let known = flags(command).filter(|arg| !arg.is_hide_set()).filter_map(Arg::get_long);
    let nearest = known
        .chain([MODEL_KEY, VLLM_KEY])
        .map(|known| (strsim::jaro(known, name), known))
        .max_by(|(left, _), (right, _)| left.total_cmp(right));
    match nearest {
        Some((similarity, known)) if similarity >= MIN_SIMILARITY => {
            format!("; did you mean '{known}'?")
        }
        _ => String::new(),
    }
}
