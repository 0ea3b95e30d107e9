//! Reading the image settings of a model directory as `transformers` 5.19 does.
//!
//! `processor_config.json` wins if it has a non-null `image_processor` object; otherwise the older
//! `preprocessor_config.json` is read (`ImageProcessingMixin.get_image_processor_dict`).

use std::io;
use std::path::{Path, PathBuf};

use chiasm_types::TokenId;
use serde_json::{Map, Value};

use crate::VisionError;

/// A JSON object and its source file, for error messages.
#[derive(Clone, Debug)]
pub(crate) struct Section {
    pub(crate) path: PathBuf,
    pub(crate) values: Map<String, Value>,
}

impl Section {
    /// Returns the value of `key`, null included: for most keys of `transformers`, null does not
    /// mean the default.
    pub(crate) fn get(&self, key: &str) -> Option<&Value> {
        self.values.get(key)
    }

    /// Returns the value of `key`; `None` if missing or null.
    fn nullable(&self, key: &str) -> Option<&Value> {
        self.get(key).filter(|value| !value.is_null())
    }

    /// Creates the error for an invalid value of `key`.
    pub(crate) fn problem(&self, key: &'static str, problem: impl Into<String>) -> VisionError {
        VisionError::Setting { path: self.path.clone(), key, problem: problem.into() }
    }

    /// Returns a string; `None` if missing or null.
    pub(crate) fn text(&self, key: &'static str) -> Result<Option<&str>, VisionError> {
        self.nullable(key)
            .map(|value| value.as_str().ok_or_else(|| self.problem(key, "must be a string")))
            .transpose()
    }

    /// Returns a boolean; `default` if missing, false if null.
    pub(crate) fn flag(&self, key: &'static str, default: bool) -> Result<bool, VisionError> {
        match self.get(key) {
            None => Ok(default),
            Some(Value::Null) => Ok(false),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(_) => Err(self.problem(key, "must be true or false")),
        }
    }

    /// Returns an integer of at least 1; `None` if missing, an error if null.
    pub(crate) fn positive(&self, key: &'static str) -> Result<Option<u64>, VisionError> {
        self.get(key)
            .map(|value| {
                value
                    .as_u64()
                    .filter(|&number| number > 0)
                    .ok_or_else(|| self.problem(key, "must be an integer above 0"))
            })
            .transpose()
    }

    /// Returns an integer of at least 1; `None` if missing or null.
    pub(crate) fn nullable_positive(&self, key: &'static str) -> Result<Option<u64>, VisionError> {
        self.nullable(key).map_or(Ok(None), |_| self.positive(key))
    }

    /// Returns the object under `key` as a section of the same file; `None` if missing or null.
    pub(crate) fn section(&self, key: &'static str) -> Result<Option<Self>, VisionError> {
        self.nullable(key)
            .map(|value| {
                let values =
                    value.as_object().ok_or_else(|| self.problem(key, "must be an object"))?;
                Ok(Self { path: self.path.clone(), values: values.clone() })
            })
            .transpose()
    }
}

/// The parts of a model directory that describe how images are processed.
#[derive(Clone, Debug)]
pub(crate) struct ModelDir {
    dir: PathBuf,
    /// The contents of `config.json`.
    pub(crate) config: Section,
    /// The `vision_config` of `config.json`.
    pub(crate) vision: Section,
    /// The contents of `processor_config.json`; empty if the file is missing.
    pub(crate) processor: Section,
    image_processor: Option<Section>,
    /// The settings of the video processor, from the first file that has them; `None` if no file
    /// has them or if they cannot be read.
    ///
    /// Errors are ignored here: vLLM processes videos and reports invalid settings itself.
    pub(crate) video_processor: Option<Section>,
}

impl ModelDir {
    /// Reads a model directory; `None` for a text-only model, which has no `vision_config`.
    pub(crate) fn read(dir: &Path) -> Result<Option<Self>, VisionError> {
        let path = dir.join("config.json");
        let missing = |path| VisionError::Read { path, source: io::ErrorKind::NotFound.into() };
        let config = read_object(&path)?.ok_or_else(|| missing(path))?;
        let Some(vision) = config.section("vision_config")? else {
            return Ok(None);
        };
        let path = dir.join("processor_config.json");
        let processor = read_object(&path)?.unwrap_or_else(|| Section { path, values: Map::new() });
        let image_processor = match processor.section("image_processor")? {
            Some(nested) => Some(nested),
            None => read_object(&dir.join("preprocessor_config.json"))?,
        };
        let nested = processor.section("video_processor").ok().flatten();
        let video_file = || read_object(&dir.join("video_preprocessor_config.json")).ok().flatten();
        // `BaseVideoProcessor.get_video_processor_dict` falls back to the image processor's own
        // file, but not to the image processor of `processor_config.json`.
        let image_file = || read_object(&dir.join("preprocessor_config.json")).ok().flatten();
        let video_processor = nested.or_else(video_file).or_else(image_file);
        Ok(Some(Self {
            dir: dir.into(),
            config,
            vision,
            processor,
            image_processor,
            video_processor,
        }))
    }

    /// Returns the settings of the image processor.
    ///
    /// # Errors
    /// [`VisionError::NoImageProcessor`].
    pub(crate) fn image_processor(&self) -> Result<&Section, VisionError> {
        self.image_processor
            .as_ref()
            .ok_or_else(|| VisionError::NoImageProcessor { dir: self.dir.clone() })
    }

    /// Reads another JSON object of the directory; `None` if the file does not exist.
    pub(crate) fn read_other(&self, file: &str) -> Result<Option<Section>, VisionError> {
        read_object(&self.dir.join(file))
    }

    /// Returns the token id in config.json under the first of these names that exists.
    pub(crate) fn token(
        &self,
        names: &[&'static str],
        default: u32,
    ) -> Result<TokenId, VisionError> {
        let Some(&name) = names.iter().find(|name| self.config.get(name).is_some()) else {
            return Ok(TokenId(default));
        };
        let id =
            self.config.get(name).and_then(Value::as_u64).and_then(|id| u32::try_from(id).ok());
        id.map(TokenId)
            .ok_or_else(|| self.config.problem(name, "must be a token id: an integer below 2^32"))
    }
}

/// Reads a JSON object; `None` if the file does not exist.
fn read_object(path: &Path) -> Result<Option<Section>, VisionError> {
    let bytes = match std::fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(VisionError::Read { path: path.into(), source }),
    };
    let values = serde_json::from_slice(&bytes)
        .map_err(|error| VisionError::Json { path: path.into(), problem: error.to_string() })?;
    Ok(Some(Section { path: path.into(), values }))
}
