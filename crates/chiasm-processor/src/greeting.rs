//! The first message of a fork server, as defined by `greeting.py`.

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::audio::AudioDescription;

/// The fork server's first message: the properties of its model's processor.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct Greeting {
    /// The version of vLLM.
    pub vllm: String,
    /// The maximum number of items per prompt, by modality; `None` for no limit. Modalities without
    /// an entry are not supported.
    pub limits: BTreeMap<String, Option<u64>>,
    /// The maximum number of embeddings of one item, by modality. Engines can encode that many at
    /// once.
    pub max_tokens: BTreeMap<String, u64>,
    /// The texts that mark items in content of one string, by modality: one text for all items, one
    /// per item if the texts are numbered, or none if the model has no such texts.
    pub placeholders: BTreeMap<String, Vec<String>>,
    /// The class name of the model's video processor. By this name vLLM chooses how a video is
    /// read.
    pub video_processor: Option<String>,
    /// The processing of recordings; `None` if the model has none, or if it has an unknown form.
    #[serde(default)]
    pub audio: Option<AudioDescription>,
    /// The processor's own methods of writing items in prompts. If there are none, items only
    /// replace their targets.
    pub own_prompts: Vec<String>,
    /// The renderer of vLLM's own frontend, by vLLM's name.
    pub renderer: String,
    /// `true` if that renderer is code, not the model's chat template.
    pub writes_conversations: bool,
    /// The missing Python packages, without which some files that the model supports cannot be
    /// read.
    pub missing: Vec<String>,
    /// `true` if children run in the sandbox.
    pub sandbox: bool,
}

/// The first message of the fork server.
#[derive(Deserialize)]
#[serde(untagged)]
pub(crate) enum StartupMessage {
    Failed { failed: String },
    Greeting(Box<Greeting>),
}
