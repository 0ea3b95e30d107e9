//! The served model: everything that is read from its directory, once, at start.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use chiasm_backend::LargestItem;
use chiasm_parse::UnknownParser;
use chiasm_prompt::{ChatTemplate, ContentFormat, PromptError, Tokenizer};
use chiasm_request::{ChatDefaults, GenerationConfig};
use chiasm_types::TokenId;
use chiasm_vision::{TakenKinds, VisionError, VisionModel, Vocabulary, VocabularyError};
use serde_json::{Map, Value};

use crate::answers::{AnswerFormat, ParserChoice};

/// Why a model directory can't be served.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// A file can't be read.
    #[error("can't read {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A file is not what it should be.
    #[error("can't understand {path}: {source}")]
    Config {
        /// The file.
        path: PathBuf,
        /// Why.
        source: serde_json::Error,
    },
    /// Tokenizer or chat template.
    #[error(transparent)]
    Prompt(#[from] PromptError),
    /// Image processor.
    #[error(transparent)]
    Vision(#[from] VisionError),
    /// Parser of calls or of reasoning.
    #[error(transparent)]
    Parser(#[from] UnknownParser),
}

/// Whether a model's images are made by Chiasm itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NativeImages {
    /// They are, or the model can't be served.
    Required,
    /// They are if Chiasm has the model's family, and all of its settings can be honoured.
    WhereSupported,
    /// They are not.
    Never,
}

/// Tokenizer, template, image family and defaults of one model.
pub struct ServedModel {
    /// The name in `/v1/models` and in requests.
    pub name: String,
    /// What its operator called it: a folder or its name at the hub. Clients load its tokenizer by
    /// that.
    pub root: String,
    /// Where it was read from.
    pub dir: PathBuf,
    /// Text to tokens and back.
    pub tokenizer: Tokenizer,
    /// Conversation to text; `None` for a base model.
    pub template: Option<ChatTemplate>,
    /// Image layouts and pixels; `None` for a text model.
    pub vision: Option<VisionModel>,
    /// Sampling defaults and end tokens.
    pub generation: GenerationConfig,
    /// What of its answers is reasoning, and what calls.
    pub answers: AnswerFormat,
    /// How conversations are written where a request does not say.
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
    /// Reads a model directory whose images, if it takes any, are made here. `name` is what clients
    /// call it; `template` replaces the model's own chat template.
    pub fn load(
        dir: &Path,
        name: impl Into<String>,
        template: Option<&Path>,
    ) -> Result<Self, ModelError> {
        Self::load_with(dir, name, template, NativeImages::Required)
    }

    /// Reads a model directory whose images may be made elsewhere.
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
                // Nobody else can read it either. A model in a form of its own has no such files.
                Err(broken @ VisionError::Json { .. }) => return Err(broken.into()),
                Err(reason) => {
                    tracing::info!(%reason, "images are made by vLLM's own processor");
                    None
                }
            },
        };
        let template = ChatTemplate::from_model_dir(dir, template)?;
        let (tools, reasoning) = (ParserChoice::Detect, ParserChoice::Detect);
        Ok(Self {
            name: name.into(),
            root: dir.display().to_string(),
            dir: dir.to_owned(),
            answers: AnswerFormat::new(&tokenizer, template.as_ref(), &tools, &reasoning)?,
            tokenizer,
            template,
            vision,
            generation: generation_config(dir)?,
            chats: ChatDefaults::default(),
        })
    }

    /// The same model, whose chat template is given content in this form.
    #[must_use]
    pub fn with_content_format(self, format: ContentFormat) -> Self {
        Self {
            template: self.template.map(|template| template.with_content_format(format)),
            ..self
        }
    }

    /// The same model, whose answers are read by these parsers.
    ///
    /// # Errors
    /// [`ModelError::Parser`] for a name that is not known.
    pub fn with_parsers(
        self,
        tools: &ParserChoice,
        reasoning: &ParserChoice,
    ) -> Result<Self, ModelError> {
        let answers = AnswerFormat::new(&self.tokenizer, self.template.as_ref(), tools, reasoning)?;
        Ok(Self { answers, ..self })
    }

    /// The same model, whose tokenizer keeps the tokens of long pieces of text in at most so many
    /// bytes.
    #[must_use]
    pub fn with_token_cache(self, max_bytes: u64) -> Self {
        Self { tokenizer: self.tokenizer.with_token_cache(max_bytes), ..self }
    }

    /// The same model with these settings of its image processor for all requests, as its engines
    /// have them in `--mm-processor-kwargs`. They mean nothing to a text model, as in vLLM.
    ///
    /// # Errors
    /// The same as those of [`VisionModel::with_engine_kwargs`].
    pub fn with_engine_kwargs(self, kwargs: Map<String, Value>) -> Result<Self, VisionError> {
        let vision = self.vision.map(|vision| vision.with_engine_kwargs(kwargs)).transpose()?;
        Ok(Self { vision, ..self })
    }

    /// Everything of the model's media processors that changes tokens or tensors of an item without
    /// a request's settings: a part of the plan class of its workers.
    pub fn processor(&self) -> Arc<[u8]> {
        self.vision.as_ref().map_or(&[][..], VisionModel::processor).into()
    }

    /// The largest item that engines take, if these kinds are the ones that they take. Not known of
    /// models whose images are made by vLLM's own processor.
    pub fn largest_item(self: &Arc<Self>, taken: TakenKinds) -> LargestItem {
        if self.vision.is_none() {
            return LargestItem::unknown();
        }
        let model = self.clone();
        LargestItem::known(move |context| {
            model.vision.as_ref().map_or(0, |vision| vision.largest_item(context, taken))
        })
    }

    /// The largest token id; there may be unused ones below it.
    pub fn last_token(&self) -> TokenId {
        self.tokenizer.max_token_id().unwrap_or(TokenId(0))
    }
}

/// A model's tokenizer, for its image family to ask.
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
