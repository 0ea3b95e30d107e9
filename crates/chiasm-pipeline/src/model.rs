//! The served model: everything that is read from its directory at the start.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use chiasm_backend::LargestItem;
use chiasm_parse::UnknownParser;
use chiasm_prompt::{ChatTemplate, ContentFormat, PromptError, Tokenizer};
use chiasm_request::{ChatDefaults, GenerationConfig};
use chiasm_types::TokenId;
use chiasm_vision::{
    AcceptedMedia, VideoModel, VideoOptions, VideoPlanError, VisionError, VisionModel, Vocabulary,
    VocabularyError,
};
use serde_json::{Map, Value};

use crate::answers::{AnswerFormat, ParserChoice};

/// An error while a model directory is read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// A file can't be read.
    #[error("can't read {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The error of the file system.
        source: std::io::Error,
    },
    /// A file can't be parsed.
    #[error("can't understand {path}: {source}")]
    Config {
        /// The file.
        path: PathBuf,
        /// The error of the parser.
        source: serde_json::Error,
    },
    /// The tokenizer or the chat template is invalid.
    #[error(transparent)]
    Prompt(#[from] PromptError),
    /// The image processor is invalid or not supported.
    #[error(transparent)]
    Vision(#[from] VisionError),
    /// The parser of calls or of reasoning is unknown.
    #[error("{0} (--tool-call-parser, --reasoning-parser)")]
    Parser(#[from] UnknownParser),
}

/// The use of Chiasm's own image processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NativeImages {
    /// Chiasm processes the images, or the model can't be served.
    Required,
    /// Chiasm processes the images if it supports the model's family and all of its settings.
    WhereSupported,
    /// Chiasm does not process images.
    Never,
}

/// The tokenizer, template, image family and defaults of one model.
pub struct ServedModel {
    /// The name in `/v1/models` and in requests.
    pub name: String,
    /// The operator's name of the model: a folder, or a name at the hub. Clients load the tokenizer
    /// by this name.
    pub root: String,
    /// The folder that the model was read from.
    pub dir: PathBuf,
    /// The tokenizer.
    pub tokenizer: Tokenizer,
    /// The chat template; `None` for a base model.
    pub template: Option<ChatTemplate>,
    /// The image family; `None` for a text model.
    pub vision: Option<VisionModel>,
    /// The planner of videos, or the reason why vLLM's own processor makes all videos.
    pub videos: Result<VideoModel, VideoPlanError>,
    /// The maximum number of videos in a prompt that Chiasm plans; vLLM's processor refuses more.
    pub max_videos: usize,
    /// The sampling defaults and the end tokens.
    pub generation: GenerationConfig,
    /// The formats of the model's answers.
    pub answers: AnswerFormat,
    /// The defaults for rendering conversations.
    pub chats: ChatDefaults,
}

/// Reads `generation_config.json`. A model without one has no defaults.
fn generation_config(dir: &Path) -> Result<GenerationConfig, ModelError> {
    let path = dir.join("generation_config.json");
    match std::fs::read(&path) {
        Ok(json) => {
            serde_json::from_slice(&json).map_err(|source| ModelError::Config { path, source })
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            Ok(GenerationConfig::default())
        }
        Err(source) => Err(ModelError::Read { path, source }),
    }
}

impl ServedModel {
    /// Reads a model directory whose images, if any, Chiasm processes. `name` is the name in
    /// requests; `template` replaces the model's own chat template.
    ///
    /// # Errors
    /// Returns an error if a file is missing or invalid, or if the image family is not supported.
    pub fn load(
        dir: &Path,
        name: impl Into<String>,
        template: Option<&Path>,
    ) -> Result<Self, ModelError> {
        Self::load_with(dir, name, template, NativeImages::Required)
    }

    /// Reads a model directory whose images vLLM's processor may process.
    ///
    /// # Errors
    /// Returns an error if a file is missing or invalid, or if a required image family is not
    /// supported.
    pub fn load_with(
        dir: &Path,
        name: impl Into<String>,
        template: Option<&Path>,
        native: NativeImages,
    ) -> Result<Self, ModelError> {
        let tokenizer = Tokenizer::from_model_dir(dir)?;
        let vision = || VisionModel::from_model_dir(dir, &TokenizerVocabulary(&tokenizer));
        let vision = match native {
            NativeImages::Never => None,
            NativeImages::Required => vision()?,
            NativeImages::WhereSupported => match vision() {
                Ok(vision) => vision,
                // vLLM can't read an invalid file either. A model in another format has no such
                // files.
                Err(broken @ VisionError::Json { .. }) => return Err(broken.into()),
                Err(reason) => {
                    tracing::info!(%reason, "vLLM's own processor processes the images");
                    None
                }
            },
        };
        let template = ChatTemplate::from_model_dir(dir, template)?;
        let tools = ParserChoice::Detect;
        let reasoning = ParserChoice::Detect;
        Ok(Self {
            name: name.into(),
            root: dir.display().to_string(),
            dir: dir.to_owned(),
            answers: AnswerFormat::new(&tokenizer, template.as_ref(), &tools, &reasoning)?,
            tokenizer,
            template,
            vision,
            videos: Err(VideoPlanError::Setting {
                key: "the image processor",
                problem: "is vLLM's own, so videos are its own, too".to_owned(),
            }),
            max_videos: usize::MAX,
            generation: generation_config(dir)?,
            chats: ChatDefaults::default(),
        })
    }

    /// Sets the form of message content for the chat template.
    #[must_use]
    pub fn with_content_format(self, format: ContentFormat) -> Self {
        Self {
            template: self.template.map(|template| template.with_content_format(format)),
            ..self
        }
    }

    /// Sets the parsers of the model's answers.
    ///
    /// # Errors
    /// Returns [`ModelError::Parser`] if a name is unknown.
    pub fn with_parsers(
        self,
        tools: &ParserChoice,
        reasoning: &ParserChoice,
    ) -> Result<Self, ModelError> {
        let answers = AnswerFormat::new(&self.tokenizer, self.template.as_ref(), tools, reasoning)?;
        Ok(Self { answers, ..self })
    }

    /// Lets the tokenizer cache the tokens of long pieces of text, in at most `max_bytes`.
    #[must_use]
    pub fn with_token_cache(self, max_bytes: u64) -> Self {
        Self { tokenizer: self.tokenizer.with_token_cache(max_bytes), ..self }
    }

    /// Sets the image processor's settings for all requests, as engines have them in
    /// `--mm-processor-kwargs`. A text model ignores them, as in vLLM.
    ///
    /// # Errors
    /// Returns the errors of [`VisionModel::with_engine_kwargs`].
    pub fn with_engine_kwargs(self, kwargs: Map<String, Value>) -> Result<Self, VisionError> {
        let vision = self.vision.map(|vision| vision.with_engine_kwargs(kwargs)).transpose()?;
        Ok(Self { vision, ..self })
    }

    /// Plans videos for engines with these options, at most `max_videos` of them in a prompt.
    ///
    /// Only models whose images Chiasm processes have such videos: both need vLLM's own model
    /// class.
    #[must_use]
    pub fn with_videos(self, options: VideoOptions, max_videos: usize) -> Self {
        if self.vision.is_none() {
            return self;
        }
        Self { videos: VideoModel::from_model_dir(&self.dir, options), max_videos, ..self }
    }

    /// Returns a fingerprint of everything in the model's media processors that changes an item's
    /// tokens or tensors, apart from a request's settings. It is a part of the workers' plan class.
    pub fn processor(&self) -> Arc<[u8]> {
        self.vision.as_ref().map_or(&[][..], VisionModel::default_fingerprint).into()
    }

    /// Returns the largest item that engines accept, if they accept `accepted`. It is unknown for
    /// models whose images vLLM's own processor processes.
    pub fn largest_item(self: &Arc<Self>, accepted: AcceptedMedia) -> LargestItem {
        if self.vision.is_none() {
            return LargestItem::unknown();
        }
        let model = self.clone();
        LargestItem::known(move |context| {
            model.vision.as_ref().map_or(0, |vision| vision.largest_item(context, accepted))
        })
    }

    /// Returns the largest token id. Smaller ids may be unused.
    pub fn last_token(&self) -> TokenId {
        self.tokenizer.max_token_id().unwrap_or(TokenId(0))
    }
}

/// A model's tokenizer as the vocabulary of its image family.
#[derive(Clone, Copy, Debug)]
pub struct TokenizerVocabulary<'a>(pub &'a Tokenizer);

impl Vocabulary for TokenizerVocabulary<'_> {
    fn id(&self, token: &str) -> Option<TokenId> {
        self.0.token_to_id(token)
    }

    fn encode(&self, text: &str) -> Result<Vec<TokenId>, VocabularyError> {
        self.0.encode(text, false).map_err(|error| VocabularyError::Tokenizer(error.into()))
    }
}
