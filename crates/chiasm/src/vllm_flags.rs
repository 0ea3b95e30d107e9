//! The vLLM flags after `--` that change tensors of images and videos, or how conversations become
//! prompts.
//!
//! These are tasks of vLLM's frontend, which Chiasm replaces: it applies the flags or refuses to
//! start. They are parsed as vLLM 0.32 parses them (`FlexibleArgumentParser` in
//! `utils/argparse_utils.py`): `_` for `-`, `--flag=value`, `--flag.key value` for a part of an
//! object, and abbreviations.

use std::path::Path;

use chiasm_vision::{AcceptedMedia, PruningMethod, VideoPruning};
use serde_json::{Map, Value, json};

use crate::error::CliError;

/// Settings of the image processor for all requests.
pub(crate) const PROCESSOR_KWARGS: &str = "--mm-processor-kwargs";
/// The maximum number of media items of each kind in a prompt. Only a limit of 0 matters here.
const LIMIT_PER_PROMPT: &str = "--limit-mm-per-prompt";
/// The limit of each kind without the flag (`config/multimodal.py`).
const DEFAULT_MAX_ITEMS: usize = 999;
/// Limits all kinds of media to 0.
const LANGUAGE_ONLY: &str = "--language-model-only";
const NOT_LANGUAGE_ONLY: &str = "--no-language-model-only";
/// Settings of the decoders of media.
const MEDIA_IO_KWARGS: &str = "--media-io-kwargs";
/// The part of a video's tokens that engines drop.
const VIDEO_PRUNING_RATE: &str = "--video-pruning-rate";
/// The algorithm that drops them.
const VIDEO_PRUNING_METHOD: &str = "--video-pruning-method";
/// Lets the engine normalise pixels.
const NORMALIZE: &str = "--mm-device-do-normalize";
const NO_NORMALIZE: &str = "--no-mm-device-do-normalize";
/// Selects the code that runs the model: vLLM's own class, or a generic one of `transformers`.
const MODEL_IMPL: &str = "--model-impl";
/// Selects the format of the model's configuration: that of `transformers` or of Mistral.
const CONFIG_FORMAT: &str = "--config-format";
/// Selects the tokenizer and the renderer of conversations. `--tokenizer` is another flag.
const TOKENIZER_MODE: &str = "--tokenizer-mode";
/// Allows Python code that comes with the model.
const TRUST_REMOTE_CODE: &str = "--trust-remote-code";
const NO_TRUST_REMOTE_CODE: &str = "--no-trust-remote-code";
/// Selects the format of the weights, for a model that has several.
const LOAD_FORMAT: &str = "--load-format";
/// The revision of a model on the hub.
const REVISION: &str = "--revision";
/// Settings of LoRA adapters, which the module `lora` applies.
const LORA_FLAGS: [&str; 5] = [
    "--max-loras",
    "--max-cpu-loras",
    "--max-lora-rank",
    "--enable-tower-connector-lora",
    "--default-mm-loras",
];
/// A YAML file of further flags.
const CONFIG: &str = "--config";

/// The short flags that engines take, with their long names (`engine/arg_utils.py`, vLLM 0.33).
/// Other short flags are refused, except `-dp` (`serve/groups.rs`).
const SHORT_FLAGS: [(&str, &str); 10] = [
    ("-ac", "--attention-config"),
    ("-cc", "--compilation-config"),
    ("-dc", "--diffusion-config"),
    ("-dcp", "--decode-context-parallel-size"),
    ("-ep", "--enable-expert-parallel"),
    ("-pcp", "--prefill-context-parallel-size"),
    ("-pp", "--pipeline-parallel-size"),
    ("-q", "--quantization"),
    ("-sc", "--speculative-config"),
    ("-tp", "--tensor-parallel-size"),
];

/// The flags that Chiasm applies itself, even if it launches no engine.
const APPLIED_BY_CHIASM: [&str; 16] = [
    PROCESSOR_KWARGS,
    LIMIT_PER_PROMPT,
    LANGUAGE_ONLY,
    NOT_LANGUAGE_ONLY,
    MEDIA_IO_KWARGS,
    VIDEO_PRUNING_RATE,
    VIDEO_PRUNING_METHOD,
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

/// Returns the first flag that only engines apply.
pub(crate) fn first_engine_only_flag(args: &[String]) -> Option<String> {
    let mut flags = args.iter().filter_map(|arg| FlagArg::parse(arg));
    let is_applied = |flag: &FlagArg<'_>| APPLIED_BY_CHIASM.iter().any(|name| flag.matches(name));
    flags.find(|flag| !is_applied(flag)).map(|flag| flag.name)
}

/// The values of the flags.
#[derive(Debug, PartialEq)]
pub(crate) struct VllmFlags {
    /// Empty if the flag is not given.
    pub(crate) processor_kwargs: Map<String, Value>,
    /// Empty if the flag is not given.
    limits: Map<String, Value>,
    language_only: bool,
    /// `video` in `--media-io-kwargs`; empty if it is not given.
    pub(crate) video_io_kwargs: Map<String, Value>,
    /// The part of a video's tokens that engines drop.
    pub(crate) video_pruning: Option<VideoPruning>,
    /// Lets the engine normalise pixels, for models that support it.
    pub(crate) normalize: bool,
    /// `true` if the model runs on code other than vLLM's own class (`--model-impl transformers`),
    /// which takes other tensors.
    pub(crate) foreign_model: bool,
    /// `auto` unless the flag is given.
    pub(crate) config_format: String,
    /// `auto` unless the flag is given.
    pub(crate) tokenizer_mode: String,
    /// Allows Python code that comes with the model.
    pub(crate) trust_remote_code: bool,
    /// `auto` unless the flag is given.
    pub(crate) load_format: String,
    /// `true` if the flag is given.
    pub(crate) has_revision: bool,
}

impl VllmFlags {
    /// Parses the flags. Refuses a file for vLLM's `--config` with one that Chiasm has to know.
    ///
    /// # Errors
    /// [`CliError::Usage`] names a flag with a missing, wrong, repeated or unsupported value;
    /// [`CliError::File`] names a configuration file that can't be read.
    pub(crate) fn parse(args: &[String]) -> Result<Self, CliError> {
        let mut processor = JsonFlag::new(PROCESSOR_KWARGS);
        let mut media = JsonFlag::new(MEDIA_IO_KWARGS);
        let mut limit = JsonFlag::new(LIMIT_PER_PROMPT);
        let mut flags = Self::default();
        let mut pruning_rate = 0.0;
        let mut pruning_method = PruningMethod::Evs;
        let mut args = args.iter();
        while let Some(arg) = args.next() {
            let Some(flag) = FlagArg::parse(arg) else { continue };
            let mut value = || {
                let value = flag.value.or_else(|| args.next().map(String::as_str));
                value.ok_or_else(|| CliError::Usage(format!("{arg} needs a value")))
            };
            if flag.name == CONFIG {
                check_config(Path::new(value()?))?;
            } else if let Some(json) = [&mut processor, &mut media, &mut limit]
                .into_iter()
                .find(|json| flag.matches(json.name))
            {
                json.add(flag.path, value()?)?;
            } else if flag.name != "--model" && flag.matches(MODEL_IMPL) {
                flags.foreign_model = !["auto", "vllm"].contains(&value()?);
            } else if flag.matches(CONFIG_FORMAT) {
                value()?.clone_into(&mut flags.config_format);
            } else if flag.name != "--tokenizer" && flag.matches(TOKENIZER_MODE) {
                // vLLM ignores the case of the value.
                flags.tokenizer_mode = value()?.to_lowercase();
            } else if flag.matches(LOAD_FORMAT) {
                value()?.clone_into(&mut flags.load_format);
            } else if flag.matches(LANGUAGE_ONLY) || flag.matches(NOT_LANGUAGE_ONLY) {
                flags.language_only = flag.matches(LANGUAGE_ONLY);
            } else if flag.matches(REVISION) {
                flags.has_revision = true;
            } else if flag.matches(TRUST_REMOTE_CODE) || flag.matches(NO_TRUST_REMOTE_CODE) {
                flags.trust_remote_code = flag.matches(TRUST_REMOTE_CODE);
            } else if flag.matches(VIDEO_PRUNING_RATE) {
                pruning_rate = parse_pruning_rate(value()?)?;
            } else if flag.matches(VIDEO_PRUNING_METHOD) {
                pruning_method = parse_pruning_method(value()?)?;
            } else if flag.matches(NORMALIZE) || flag.matches(NO_NORMALIZE) {
                flags.normalize = flag.matches(NORMALIZE);
            }
        }
        check_media_io(&media.object)?;
        Ok(Self {
            processor_kwargs: processor.object,
            limits: limit.object,
            video_io_kwargs: video_io_kwargs(media.object)?,
            video_pruning: (pruning_rate > 0.0)
                .then_some(VideoPruning { method: pruning_method, rate: pruning_rate }),
            ..flags
        })
    }

    /// Returns the maximum number of videos in a prompt.
    pub(crate) fn max_videos(&self) -> usize {
        if self.language_only {
            return 0;
        }
        let limit = self.limits.get("video").map(|limit| limit.get("count").unwrap_or(limit));
        match limit {
            None => DEFAULT_MAX_ITEMS,
            // vLLM's processor reports an invalid limit.
            Some(limit) => limit.as_u64().and_then(|limit| limit.try_into().ok()).unwrap_or(0),
        }
    }

    /// Returns the kinds of media that the flags let engines accept.
    pub(crate) fn accepted_media(&self) -> AcceptedMedia {
        // A number, or an object with one (`BaseDummyOptions` in vLLM's `config/multimodal.py`).
        let is_zero = |limit: &Value| limit.get("count").unwrap_or(limit).as_u64() == Some(0);
        let accepts = |kind| !self.language_only && !self.limits.get(kind).is_some_and(is_zero);
        AcceptedMedia { images: accepts("image"), videos: accepts("video") }
    }
}

impl Default for VllmFlags {
    fn default() -> Self {
        Self {
            processor_kwargs: Map::new(),
            limits: Map::new(),
            language_only: false,
            video_io_kwargs: Map::new(),
            video_pruning: None,
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

/// A command line argument that is a flag.
pub(crate) struct FlagArg<'a> {
    /// The flag's name with its leading dashes, and `-` for `_`.
    pub(crate) name: String,
    /// The text after the name's first dot: a path in a JSON object.
    path: &'a str,
    /// The text after an equals sign.
    pub(crate) value: Option<&'a str>,
}

impl<'a> FlagArg<'a> {
    /// Parses an argument; returns `None` for a value. A short flag gets its long name.
    pub(crate) fn parse(arg: &'a str) -> Option<Self> {
        let (flag, value) =
            arg.split_once('=').map_or((arg, None), |(flag, value)| (flag, Some(value)));
        let (name, path) = flag.split_once('.').unwrap_or((flag, ""));
        if let Some((_, long)) = SHORT_FLAGS.iter().find(|(short, _)| *short == name) {
            return Some(Self { name: (*long).to_owned(), path, value });
        }
        arg.starts_with("--").then(|| Self { name: name.replace('_', "-"), path, value })
    }

    /// Returns the key of the flag in a configuration file.
    pub(crate) fn key(&self) -> String {
        let name = self.name.trim_start_matches('-');
        if self.path.is_empty() { name.to_owned() } else { format!("{name}.{}", self.path) }
    }

    /// Returns `true` if the argument is `flag` or an abbreviation of it.
    pub(crate) fn matches(&self, flag: &str) -> bool {
        is_abbreviation(&self.name, flag)
    }
}

/// Returns `true` if `name` is `flag` or an abbreviation of it. vLLM refuses ambiguous
/// abbreviations.
fn is_abbreviation(name: &str, flag: &str) -> bool {
    name.len() > "--m".len() && flag.starts_with(name)
}

/// A flag with a JSON object as its value, given as a whole or key by key.
struct JsonFlag {
    name: &'static str,
    object: Map<String, Value>,
    is_whole: bool,
}

impl JsonFlag {
    fn new(name: &'static str) -> Self {
        Self { name, object: Map::new(), is_whole: false }
    }

    /// Adds a value. A value given twice is an error; vLLM would drop one of the two.
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
                // Spellings of an absent value in Python and JSON.
                "" | "None" | "null" => Map::new(),
                _ => serde_json::from_str(text).map_err(|error| {
                    CliError::Usage(format!("{name} after -- is not a JSON object: {error}"))
                })?,
            };
            self.is_whole = true;
            return Ok(());
        }
        // A value that is not JSON is a string.
        let value = serde_json::from_str(text).unwrap_or_else(|_| Value::from(text));
        if insert(&mut self.object, path, value) { Ok(()) } else { Err(twice()) }
    }
}

/// Inserts a value at a dotted path. Returns `false` if the path has a value already.
fn insert(object: &mut Map<String, Value>, path: &str, value: Value) -> bool {
    let Some((key, rest)) = path.split_once('.') else {
        return object.insert(path.to_owned(), value).is_none();
    };
    let inner = object.entry(key).or_insert_with(|| json!({}));
    inner.as_object_mut().is_some_and(|inner| insert(inner, rest, value))
}

/// Parses a rate as vLLM does, where `None` means that nothing is dropped.
fn parse_pruning_rate(text: &str) -> Result<f64, CliError> {
    if ["", "None"].contains(&text) {
        return Ok(0.0);
    }
    // vLLM refuses other values, too (`config/multimodal.py`).
    text.parse().ok().filter(|rate| (0.0..1.0).contains(rate)).ok_or_else(|| {
        CliError::Usage(format!("{VIDEO_PRUNING_RATE} after -- must be from 0 to below 1"))
    })
}

fn parse_pruning_method(text: &str) -> Result<PruningMethod, CliError> {
    match text {
        "evs" => Ok(PruningMethod::Evs),
        "vidcom2" => Ok(PruningMethod::VidCom2),
        _ => {
            Err(CliError::Usage(format!("{VIDEO_PRUNING_METHOD} after -- must be evs or vidcom2")))
        }
    }
}

/// Returns the settings for reading videos.
fn video_io_kwargs(mut kwargs: Map<String, Value>) -> Result<Map<String, Value>, CliError> {
    match kwargs.remove("video") {
        None => Ok(Map::new()),
        Some(Value::Object(kwargs)) => Ok(kwargs),
        Some(_) => {
            Err(CliError::Usage(format!("{MEDIA_IO_KWARGS} after --: video must be an object")))
        }
    }
}

/// Accepts settings that change no image: vLLM's defaults, and settings of other media.
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
                        "image.{key} as {value} is not supported: images are converted to RGB \
                         on a white background"
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

/// Refuses a file for `--config` that seems to have one of the flags as a key. The YAML is not
/// parsed, so a word that only looks like such a key is refused, too.
fn check_config(path: &Path) -> Result<(), CliError> {
    let text = std::fs::read_to_string(path).map_err(|error| {
        CliError::Usage(format!("{CONFIG} after --: {}: {error}", path.display()))
    })?;
    let is_word = |char: char| char.is_alphanumeric() || char == '-' || char == '_';
    for (end, _) in text.match_indices([':', '.']) {
        let key = text[..end].trim_end_matches(['"', '\'', ' ', '\t']);
        let key = key.rsplit(|char| !is_word(char)).next().unwrap_or_default();
        let name = format!("--{}", key.replace('_', "-"));
        let flags = [PROCESSOR_KWARGS, MEDIA_IO_KWARGS, NORMALIZE, NO_NORMALIZE];
        // Their abbreviations are words that other settings have, too, such as `video`.
        let exact = [
            MODEL_IMPL,
            CONFIG_FORMAT,
            TOKENIZER_MODE,
            TRUST_REMOTE_CODE,
            LOAD_FORMAT,
            VIDEO_PRUNING_RATE,
            VIDEO_PRUNING_METHOD,
        ];
        let whole = exact.iter().chain(&LORA_FLAGS).copied().find(|flag| name == *flag);
        if let Some(flag) = flags.into_iter().find(|flag| is_abbreviation(&name, flag)).or(whole) {
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
