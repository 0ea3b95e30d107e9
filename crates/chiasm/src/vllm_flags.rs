//! The flags for vLLM, given after `--`, that change what an image becomes, or how a conversation
//! is written.
//!
//! vLLM's own frontend would heed them, but here Chiasm does both: it does as they say or refuses
//! to start. They are read as vLLM 0.32 reads them (`FlexibleArgumentParser` in
//! `utils/argparse_utils.py`): `_` for `-`, `--flag=value`, `--flag.key value` for a part of an
//! object, and abbreviations.

use std::path::Path;

use chiasm_vision::TakenKinds;
use serde_json::{Map, Value, json};

use crate::error::CliError;

/// Settings of the image processor for all requests.
pub(crate) const PROCESSOR_KWARGS: &str = "--mm-processor-kwargs";
/// How many media items of each kind a prompt may have. One that may have none of a kind is not
/// taken into account.
const LIMIT: &str = "--limit-mm-per-prompt";
/// None of any kind.
const LANGUAGE_ONLY: &str = "--language-model-only";
const NOT_LANGUAGE_ONLY: &str = "--no-language-model-only";
/// How media are read.
const MEDIA_IO_KWARGS: &str = "--media-io-kwargs";
/// Whether the engine normalises pixels.
const NORMALIZE: &str = "--mm-device-do-normalize";
const NO_NORMALIZE: &str = "--no-mm-device-do-normalize";
/// It chooses which code runs the model: vLLM's own class, or the generic ones of `transformers`.
const MODEL_IMPL: &str = "--model-impl";
/// Which files the model's configuration is read from: those of `transformers` or those of Mistral.
const CONFIG_FORMAT: &str = "--config-format";
/// It chooses tokenizer and renderer. There is a `--tokenizer`, too.
const TOKENIZER_MODE: &str = "--tokenizer-mode";
/// Runs Python code that comes with the model.
const TRUST_REMOTE_CODE: &str = "--trust-remote-code";
const NO_TRUST_REMOTE_CODE: &str = "--no-trust-remote-code";
/// Which weights are loaded, of a model that has several kinds.
const LOAD_FORMAT: &str = "--load-format";
/// Which revision of a model on the hub.
const REVISION: &str = "--revision";
/// What LoRA adapters are to engines (`lora`).
const LORA: [&str; 5] = [
    "--max-loras",
    "--max-cpu-loras",
    "--max-lora-rank",
    "--enable-tower-connector-lora",
    "--default-mm-loras",
];
/// A YAML file of further flags.
const CONFIG: &str = "--config";

/// What Chiasm heeds itself, whoever starts the engines.
const HEEDED: [&str; 14] = [
    PROCESSOR_KWARGS,
    LIMIT,
    LANGUAGE_ONLY,
    NOT_LANGUAGE_ONLY,
    MEDIA_IO_KWARGS,
    NORMALIZE,
    NO_NORMALIZE,
    MODEL_IMPL,
    CONFIG_FORMAT,
    TOKENIZER_MODE,
    TRUST_REMOTE_CODE,
    NO_TRUST_REMOTE_CODE,
    LOAD_FORMAT,
    REVISION,
];

/// The first flag that is for engines alone.
pub(crate) fn for_engines_alone(args: &[String]) -> Option<String> {
    let mut flags = args.iter().filter_map(|arg| Spelled::read(arg));
    flags.find(|flag| !HEEDED.iter().any(|heeded| flag.means(heeded))).map(|flag| flag.name)
}

/// What the flags say.
#[derive(Debug, PartialEq)]
pub(crate) struct VllmFlags {
    /// Empty if the flag is not given.
    pub(crate) processor_kwargs: Map<String, Value>,
    /// Empty if the flag is not given.
    limits: Map<String, Value>,
    language_only: bool,
    /// Whether the engine normalises the pixels of models that can be normalised there.
    pub(crate) normalize: bool,
    /// Whether the model is run by code that is not vLLM's own of it, and takes other tensors:
    /// `--model-impl transformers`.
    pub(crate) foreign_model: bool,
    /// `auto` unless the flag is given.
    pub(crate) config_format: String,
    /// `auto` unless the flag is given.
    pub(crate) tokenizer_mode: String,
    /// Whether Python code that comes with the model is run.
    pub(crate) trust_remote_code: bool,
    /// `auto` unless the flag is given.
    pub(crate) load_format: String,
    /// Whether the flag is given.
    pub(crate) has_revision: bool,
}

impl VllmFlags {
    /// Reads the flags and, for vLLM's `--config`, makes sure that its file has none of them.
    ///
    /// # Errors
    /// [`CliError::Usage`] names the flag that has no value, a wrong one or several, or asks for
    /// what is not supported; [`CliError::File`] the configuration that can't be read.
    pub(crate) fn read(args: &[String]) -> Result<Self, CliError> {
        let (mut processor, mut media) =
            (JsonFlag::new(PROCESSOR_KWARGS), JsonFlag::new(MEDIA_IO_KWARGS));
        let mut limit = JsonFlag::new(LIMIT);
        let mut flags = Self::default();
        let mut args = args.iter();
        while let Some(arg) = args.next() {
            let Some(flag) = Spelled::read(arg) else { continue };
            let mut value = || {
                let value = flag.value.or_else(|| args.next().map(String::as_str));
                value.ok_or_else(|| CliError::Usage(format!("{arg} needs a value")))
            };
            if flag.name == CONFIG {
                check_config(Path::new(value()?))?;
            } else if let Some(json) = [&mut processor, &mut media, &mut limit]
                .into_iter()
                .find(|json| flag.means(json.name))
            {
                json.add(flag.path, value()?)?;
            } else if flag.name != "--model" && flag.means(MODEL_IMPL) {
                flags.foreign_model = !["auto", "vllm"].contains(&value()?);
            } else if flag.means(CONFIG_FORMAT) {
                value()?.clone_into(&mut flags.config_format);
            } else if flag.name != "--tokenizer" && flag.means(TOKENIZER_MODE) {
                // vLLM does not mind capitals.
                flags.tokenizer_mode = value()?.to_lowercase();
            } else if flag.means(LOAD_FORMAT) {
                value()?.clone_into(&mut flags.load_format);
            } else if flag.means(LANGUAGE_ONLY) || flag.means(NOT_LANGUAGE_ONLY) {
                flags.language_only = flag.means(LANGUAGE_ONLY);
            } else if flag.means(REVISION) {
                flags.has_revision = true;
            } else if flag.means(TRUST_REMOTE_CODE) || flag.means(NO_TRUST_REMOTE_CODE) {
                flags.trust_remote_code = flag.means(TRUST_REMOTE_CODE);
            } else if flag.means(NORMALIZE) || flag.means(NO_NORMALIZE) {
                flags.normalize = flag.means(NORMALIZE);
            }
        }
        check_media_io(&media.object)?;
        Ok(Self { processor_kwargs: processor.object, limits: limit.object, ..flags })
    }

    /// The kinds of media that the engines take, of those that their model has.
    pub(crate) fn taken_kinds(&self) -> TakenKinds {
        // A number, or an object with one (`BaseDummyOptions` in vLLM's `config/multimodal.py`).
        let is_none = |limit: &Value| limit.get("count").unwrap_or(limit).as_u64() == Some(0);
        let takes = |kind| !self.language_only && !self.limits.get(kind).is_some_and(is_none);
        TakenKinds { images: takes("image"), videos: takes("video") }
    }
}

impl Default for VllmFlags {
    fn default() -> Self {
        Self {
            processor_kwargs: Map::new(),
            limits: Map::new(),
            language_only: false,
            normalize: true,
            foreign_model: false,
            config_format: "auto".to_owned(),
            tokenizer_mode: "auto".to_owned(),
            trust_remote_code: false,
            load_format: "auto".to_owned(),
            has_revision: false,
        }
    }
}

/// An argument that is a flag.
pub(crate) struct Spelled<'a> {
    /// The flag with its dashes, and none of the underscores that vLLM takes for dashes.
    pub(crate) name: String,
    /// What follows the name's first dot: a place in a JSON object.
    path: &'a str,
    /// What follows an equals sign.
    pub(crate) value: Option<&'a str>,
}

impl<'a> Spelled<'a> {
    pub(crate) fn read(arg: &'a str) -> Option<Self> {
        let (flag, value) =
            arg.split_once('=').map_or((arg, None), |(flag, value)| (flag, Some(value)));
        let (name, path) = flag.split_once('.').unwrap_or((flag, ""));
        arg.starts_with("--").then(|| Self { name: name.replace('_', "-"), path, value })
    }

    /// Whether it is this flag, or could be short for it.
    pub(crate) fn means(&self, flag: &str) -> bool {
        is_short_for(&self.name, flag)
    }
}

/// Whether a name is this flag or could be short for it. Where it could be short for others too,
/// vLLM refuses it.
fn is_short_for(name: &str, flag: &str) -> bool {
    name.len() > "--m".len() && flag.starts_with(name)
}

/// A flag whose value is a JSON object, given as a whole or key by key.
struct JsonFlag {
    name: &'static str,
    object: Map<String, Value>,
    is_whole: bool,
}

impl JsonFlag {
    fn new(name: &'static str) -> Self {
        Self { name, object: Map::new(), is_whole: false }
    }

    /// Adds a value. vLLM drops one of two; here that is an error.
    fn add(&mut self, path: &str, text: &str) -> Result<(), CliError> {
        let name = self.name;
        let twice = || {
            CliError::Usage(format!("{name} after -- is given twice: give it once, or key by key"))
        };
        if self.is_whole || (path.is_empty() && !self.object.is_empty()) {
            return Err(twice());
        }
        if path.is_empty() {
            self.object = match text {
                // Python's words for nothing.
                "" | "None" | "null" => Map::new(),
                _ => serde_json::from_str(text).map_err(|error| {
                    CliError::Usage(format!("{name} after -- is no JSON object: {error}"))
                })?,
            };
            self.is_whole = true;
            return Ok(());
        }
        // What is no JSON is a string.
        let value = serde_json::from_str(text).unwrap_or_else(|_| Value::from(text));
        if insert(&mut self.object, path, value) { Ok(()) } else { Err(twice()) }
    }
}

/// Puts a value at a dotted path; false if something is there.
fn insert(object: &mut Map<String, Value>, path: &str, value: Value) -> bool {
    let Some((key, rest)) = path.split_once('.') else {
        return object.insert(path.to_owned(), value).is_none();
    };
    let inner = object.entry(key).or_insert_with(|| json!({}));
    inner.as_object_mut().is_some_and(|inner| insert(inner, rest, value))
}

/// Takes what changes no image: vLLM's defaults, and settings for media that are refused anyway.
fn check_media_io(kwargs: &Map<String, Value>) -> Result<(), CliError> {
    let refused =
        |problem: &str| Err(CliError::Usage(format!("{MEDIA_IO_KWARGS} after --: {problem}")));
    for (modality, settings) in kwargs {
        match (modality.as_str(), settings) {
            ("audio" | "video", _) => {}
            ("image", Value::Object(settings)) => {
                // Defaults of `ImageMediaIO` in vLLM's `multimodal/media/image.py`.
                let defaults = [
                    ("image_mode", json!("RGB")),
                    ("rgba_background_color", json!([255, 255, 255])),
                ];
                let is_default = |(key, value): &(&String, &Value)| {
                    defaults.iter().any(|(k, v)| k == key && v == *value)
                };
                if let Some((key, value)) = settings.iter().find(|setting| !is_default(setting)) {
                    return refused(&format!(
                        "image.{key} as {value} is not supported: images are read as RGB, what is transparent on white"
                    ));
                }
            }
            ("image", _) => return refused("image must be an object"),
            _ => {
                return refused(&format!(
                    "{modality:?} is not supported, only image, audio and video"
                ));
            }
        }
    }
    Ok(())
}

/// Refuses a file for `--config` in which one of the flags seems to be a key. Its YAML is not
/// understood here, so a word that only looks like one is refused too.
fn check_config(path: &Path) -> Result<(), CliError> {
    let text = std::fs::read_to_string(path).map_err(|error| CliError::file(path, error))?;
    let is_word = |char: char| char.is_alphanumeric() || char == '-' || char == '_';
    for (end, _) in text.match_indices([':', '.']) {
        let key = text[..end].trim_end_matches(['"', '\'', ' ', '\t']);
        let key = key.rsplit(|char| !is_word(char)).next().unwrap_or_default();
        let name = format!("--{}", key.replace('_', "-"));
        let flags = [PROCESSOR_KWARGS, MEDIA_IO_KWARGS, NORMALIZE, NO_NORMALIZE];
        let whole = [MODEL_IMPL, CONFIG_FORMAT, TOKENIZER_MODE]
            .iter()
            .chain(&LORA)
            .copied()
            .find(|flag| name == *flag);
        if let Some(flag) = flags.into_iter().find(|flag| is_short_for(&name, flag)).or(whole) {
            let path = path.display();
            return Err(CliError::Usage(format!(
                "{key} in {path} is not read by Chiasm: give {flag} after --"
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
