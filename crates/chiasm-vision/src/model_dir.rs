//! Reads a model directory the way `transformers` 5.19 does, up to the image processor's settings.
//!
//! `processor_config.json` wins if it has a non-null `image_processor` object; otherwise the older
//! `preprocessor_config.json` is read (`ImageProcessingMixin.get_image_processor_dict`).

use std::io;
use std::path::{Path, PathBuf};

use chiasm_types::TokenId;
use serde_json::{Map, Value};

use crate::VisionError;

/// A JSON object and the file that it came from, for error messages.
#[derive(Clone, Debug)]
pub(crate) struct Section {
    pub(crate) path: PathBuf,
    pub(crate) values: Map<String, Value>,
}

impl Section {
    /// The value of `key`, null included: `transformers` takes most nulls at their word.
    pub(crate) fn get(&self, key: &str) -> Option<&Value> {
        self.values.get(key)
    }

    /// The value of a `key` for which null is as good as missing.
    fn nullable(&self, key: &str) -> Option<&Value> {
        self.get(key).filter(|value| !value.is_null())
    }

    pub(crate) fn problem(&self, key: &'static str, problem: impl Into<String>) -> VisionError {
        VisionError::Setting { path: self.path.clone(), key, problem: problem.into() }
    }

    /// A string; `None` if missing or null.
    pub(crate) fn text(&self, key: &'static str) -> Result<Option<&str>, VisionError> {
        self.nullable(key)
            .map(|value| value.as_str().ok_or_else(|| self.problem(key, "must be a string")))
            .transpose()
    }

    /// A boolean; `default` if missing, false if null.
    pub(crate) fn flag(&self, key: &'static str, default: bool) -> Result<bool, VisionError> {
        match self.get(key) {
            None => Ok(default),
            Some(Value::Null) => Ok(false),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(_) => Err(self.problem(key, "must be true or false")),
        }
    }

    /// An integer of at least 1; `None` if missing, refused if null.
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

    /// An integer of at least 1; `None` if missing or null.
    pub(crate) fn nullable_positive(&self, key: &'static str) -> Result<Option<u64>, VisionError> {
        self.nullable(key).map_or(Ok(None), |_| self.positive(key))
    }

    /// The object below `key`, as a section of the same file; `None` if missing or null.
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

/// The parts of a model directory that say how images are handled.
#[derive(Clone, Debug)]
pub(crate) struct ModelDir {
    dir: PathBuf,
    /// `config.json`
    pub(crate) config: Section,
    /// `vision_config` of it
    pub(crate) vision: Section,
    /// `processor_config.json`, empty if there is none
    pub(crate) processor: Section,
    image_processor: Option<Section>,
    /// Settings of the video processor, which come from whatever file has them; `None` if none has
    /// or it can't be read. Videos are made by vLLM, which says what is wrong with them.
    pub(crate) video_processor: Option<Section>,
}

impl ModelDir {
    /// `None` for a text-only model: one without a `vision_config`.
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
        let own = || read_object(&dir.join("video_preprocessor_config.json")).ok().flatten();
        // `BaseVideoProcessor.get_video_processor_dict`: the image processor's own file comes last,
        // not what is nested for it.
        let of_images = || read_object(&dir.join("preprocessor_config.json")).ok().flatten();
        let video_processor = nested.or_else(own).or_else(of_images);
        Ok(Some(Self {
            dir: dir.into(),
            config,
            vision,
            processor,
            image_processor,
            video_processor,
        }))
    }

    /// Settings of the image processor.
    pub(crate) fn image_processor(&self) -> Result<&Section, VisionError> {
        self.image_processor
            .as_ref()
            .ok_or_else(|| VisionError::NoImageProcessor { dir: self.dir.clone() })
    }

    /// A token id in config.json, under the first of these names that is there.
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

/// `None` if there is no such file.
fn read_object(path: &Path) -> Result<Option<Section>, VisionError> {
    let bytes = match std::fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => {
            return Err(VisionError::Read { path: path.into(), source });
        }
    };
    let values = serde_json::from_slice(&bytes)
        .map_err(|error| VisionError::Json { path: path.into(), problem: error.to_string() })?;
    Ok(Some(Section { path: path.into(), values }))
}
