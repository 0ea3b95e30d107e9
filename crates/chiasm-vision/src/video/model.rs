//! The public entry point: plans the videos of one model.

use std::path::Path;

use serde_json::{Map, Value};

use super::llava::{Kind, LlavaVideos};
use super::loader::{self, Sampling};
use super::qwen::{Generation, QwenVideos};
use super::settings;
use super::{VideoLoader, VideoOptions, VideoPlan, VideoPlanError, VideoProperties};
use crate::engine_kwargs;
use crate::fingerprint::Fingerprint;
use crate::image_prompt::ImagePrompt;
use crate::kernels::Normalization;
use crate::model_dir::ModelDir;

/// The heights for which `transformers` takes the rows of a frame for its colours
/// (`infer_channel_dimension_format`).
const AMBIGUOUS_HEIGHTS: [u32; 2] = [1, 3];

/// The video family and settings of one model, in an engine with given flags. Immutable.
#[derive(Clone, Debug)]
pub struct VideoModel {
    model_type: String,
    /// The family with the settings of the model directory.
    base: Family,
    options: VideoOptions,
    loader: VideoLoader,
    prompt: ImagePrompt,
    /// The settings of a request without kwargs.
    default: VideoRequest,
}

/// The settings of one request. Created by [`VideoModel::parse_request`].
#[derive(Clone, Debug)]
pub struct VideoRequest {
    family: Family,
    sampling: Sampling,
}

#[derive(Clone, Debug)]
enum Family {
    Qwen(Box<QwenVideos>),
    Llava(LlavaVideos),
}

impl VideoModel {
    /// Reads the video settings of a model directory.
    ///
    /// # Errors
    /// [`VideoPlanError`] if the family is unknown, or a setting of the model or the engine is not
    /// supported. All videos then belong to vLLM's own processor.
    pub fn from_model_dir(dir: &Path, options: VideoOptions) -> Result<Self, VideoPlanError> {
        let unknown = |model_type: &str| VideoPlanError::Family { model_type: model_type.into() };
        let dir = ModelDir::read(dir)?.ok_or_else(|| unknown(""))?;
        let model_type = dir.config.text("model_type")?.unwrap_or_default().to_owned();
        let pruning = options.pruning.map(super::VideoPruning::validate).transpose()?;
        let qwen = |generation| {
            QwenVideos::read(&dir, generation, pruning)
                .map(|videos| (Family::Qwen(Box::new(videos)), generation.class()))
        };
        let llava = |kind: Kind| {
            LlavaVideos::read(&dir, kind, pruning)
                .map(|videos| (Family::Llava(videos), kind.class()))
        };
        let (base, class) = match model_type.as_str() {
            "qwen2_vl" => qwen(Generation::Two)?,
            "qwen2_5_vl" => qwen(Generation::TwoFive)?,
            "qwen3_vl" | "qwen3_vl_moe" => qwen(Generation::Three)?,
            "qwen3_5" | "qwen3_5_moe" => qwen(Generation::ThreeFive)?,
            "llava_onevision" => llava(Kind::Onevision)?,
            "llava_next_video" => llava(Kind::NextVideo)?,
            other => return Err(unknown(other)),
        };
        let loader = settings::loader(&dir, class, &options.default_loader)?;
        let prompt = base.prompt();
        let default = VideoRequest {
            family: base.with_kwargs(&options.processor_kwargs)?,
            sampling: Sampling::parse(&options.media_io_kwargs, loader, options.max_frame_pixels)?,
        };
        Ok(Self { model_type, base, options, loader, prompt, default })
    }

    /// Returns the text and token that represent a video in a prompt.
    pub fn prompt(&self) -> &ImagePrompt {
        &self.prompt
    }

    /// Returns the settings of a request without kwargs.
    pub fn default_request(&self) -> &VideoRequest {
        &self.default
    }

    /// Parses a request's `mm_processor_kwargs` and the `video` of its `media_io_kwargs`.
    ///
    /// They override the engine's, as vLLM merges them.
    ///
    /// # Errors
    /// [`VideoPlanError::UnknownKwarg`] and [`VideoPlanError::InvalidKwarg`].
    pub fn parse_request(
        &self,
        processor_kwargs: &Map<String, Value>,
        media_io_kwargs: &Map<String, Value>,
    ) -> Result<VideoRequest, VideoPlanError> {
        let mut request = self.default.clone();
        if !processor_kwargs.is_empty() {
            let engine = &self.options.processor_kwargs;
            let mut kwargs = processor_kwargs.clone();
            if !engine.is_empty() {
                self.base.add_aliases(&mut kwargs);
                kwargs = engine_kwargs::merge(engine, kwargs);
            }
            request.family = self.base.with_kwargs(&kwargs)?;
        }
        if !media_io_kwargs.is_empty() {
            let merged = loader::merge(&self.options.media_io_kwargs, media_io_kwargs);
            let max_pixels = self.options.max_frame_pixels;
            request.sampling = Sampling::parse(&merged, self.loader, max_pixels)?;
        }
        Ok(request)
    }

    /// Computes the frames, tokens and tensors of a video.
    ///
    /// # Errors
    /// [`VideoPlanError`] if vLLM would refuse the video, or if its result is not known.
    pub fn plan(
        &self,
        video: VideoProperties,
        request: &VideoRequest,
    ) -> Result<VideoPlan, VideoPlanError> {
        let VideoRequest { family, sampling } = request;
        if AMBIGUOUS_HEIGHTS.contains(&video.height) {
            return Err(video.problem("has rows that transformers takes for colours"));
        }
        let loaded = sampling.load(video)?;
        match family {
            Family::Qwen(videos) => videos.plan(video, sampling.loader, loaded),
            Family::Llava(videos) => videos.plan(video, sampling.loader, loaded),
        }
    }

    /// Returns canonical bytes of the family and the settings in effect: everything except the
    /// video that changes its frames, tensors or placeholder.
    pub fn fingerprint(&self, request: &VideoRequest) -> Vec<u8> {
        let mut out = Fingerprint::for_family(&self.model_type);
        out.text("modality", "video");
        request.sampling.fingerprint(&mut out);
        match &request.family {
            Family::Qwen(videos) => videos.fingerprint(&mut out),
            Family::Llava(videos) => videos.fingerprint(&mut out),
        }
        out.into_bytes()
    }
}

impl VideoRequest {
    /// Returns the normalisation of each channel.
    pub(super) fn normalization(&self) -> &Normalization {
        match &self.family {
            Family::Qwen(videos) => videos.normalization(),
            Family::Llava(videos) => videos.normalization(),
        }
    }
}

impl Family {
    fn prompt(&self) -> ImagePrompt {
        match self {
            // `get_placeholder_str` of the classes in vLLM.
            Self::Qwen(videos) => ImagePrompt::token(
                "<|vision_start|><|video_pad|><|vision_end|>",
                videos.video_token,
            ),
            Self::Llava(videos) => ImagePrompt::token("<video>", videos.video_token),
        }
    }

    fn with_kwargs(&self, kwargs: &Map<String, Value>) -> Result<Self, VideoPlanError> {
        if kwargs.is_empty() {
            return Ok(self.clone());
        }
        Ok(match self {
            Self::Qwen(videos) => Self::Qwen(Box::new(videos.with_kwargs(kwargs)?)),
            Self::Llava(videos) => Self::Llava(videos.with_kwargs(kwargs)?),
        })
    }

    fn add_aliases(&self, request: &mut Map<String, Value>) {
        if let Self::Qwen(videos) = self {
            videos.add_aliases(request);
        }
    }
}
