//! The models of the goldens of videos (`python/goldens/videos/video_models.py`).

use std::collections::BTreeMap;
use std::fs;

use chiasm_types::TokenId;
use chiasm_vision::{
    PruningMethod, VideoModel, VideoOptions, VideoPlanError, VideoPruning, Vocabulary,
    VocabularyError,
};
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::golden;

/// Returns the models by name.
pub(crate) fn models() -> BTreeMap<String, Model> {
    #[derive(Deserialize)]
    struct Goldens {
        models: BTreeMap<String, Model>,
    }
    golden::json::<Goldens>("videos/plans.json").models
}

/// A model directory and an engine's flags.
#[derive(Deserialize)]
pub(crate) struct Model {
    pub(crate) files: BTreeMap<String, Value>,
    pub(crate) flags: Flags,
    pub(crate) media_io: Map<String, Value>,
    pub(crate) characters: BTreeMap<char, u32>,
}

/// The flags of vLLM.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Flags {
    #[serde(default)]
    mm_processor_kwargs: Map<String, Value>,
    video_pruning_rate: Option<f64>,
    video_pruning_method: Option<String>,
}

/// A tokenizer with one token per character.
pub(crate) struct Characters(pub(crate) BTreeMap<char, u32>);

impl Vocabulary for Characters {
    fn id(&self, _token: &str) -> Option<TokenId> {
        None
    }

    fn encode(&self, text: &str) -> Result<Vec<TokenId>, VocabularyError> {
        let token = |letter| self.0.get(&letter).copied().map(TokenId);
        text.chars()
            .map(|letter| token(letter).ok_or(VocabularyError::NoToken(letter.to_string())))
            .collect()
    }
}

fn options(model: &Model) -> VideoOptions {
    let Flags { mm_processor_kwargs, video_pruning_rate, video_pruning_method } = &model.flags;
    let method = match video_pruning_method.as_deref() {
        None | Some("evs") => PruningMethod::Evs,
        Some("vidcom2") => PruningMethod::VidCom2,
        Some(other) => panic!("{other}"),
    };
    VideoOptions {
        processor_kwargs: mm_processor_kwargs.clone(),
        media_io_kwargs: model.media_io.clone(),
        pruning: video_pruning_rate.map(|rate| VideoPruning { method, rate }),
        ..VideoOptions::default()
    }
}

impl Model {
    /// Writes the model directory and loads it.
    pub(crate) fn try_load(&self) -> Result<VideoModel, VideoPlanError> {
        let dir = tempfile::tempdir().unwrap();
        for (name, contents) in &self.files {
            fs::write(dir.path().join(name), contents.to_string()).unwrap();
        }
        VideoModel::from_model_dir(dir.path(), options(self))
    }

    /// Loads the model.
    ///
    /// # Panics
    /// If its videos are not planned.
    pub(crate) fn load(&self) -> VideoModel {
        self.try_load().unwrap()
    }
}
