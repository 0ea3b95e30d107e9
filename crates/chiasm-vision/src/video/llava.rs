//! LLaVA-OneVision and LLaVA-NeXT-Video: one square per frame, pooled to fewer tokens.
//!
//! Follows `get_num_video_tokens` in vLLM's `llava_onevision.py` and `llava_next_video.py`.

use chiasm_types::{TensorField, TokenId, TokenRun};
use serde_json::{Map, Value};

use super::kwargs::{PROCESSOR, Scope};
use super::loader::LoadedFrames;
use super::plan::MAX_ELEMENTS;
use super::settings::{self as video_settings, ProcessorClass};
use super::{VideoLoader, VideoPiece, VideoPlan, VideoPlanError, VideoProperties, VideoPruning};
use crate::families::llava::centered;
use crate::fingerprint::Fingerprint;
use crate::image_plan::PixelTensor;
use crate::kernels::{Filter, Layer, Layout, Normalization, Resampler, TileGrid};
use crate::model_dir::ModelDir;
use crate::settings::{self, CLIP, ResizeTarget};
use crate::{ImageSize, VisionError};

/// The largest side of a frame and the largest pooling stride.
const MAX_SIDE: u64 = 1 << 12;

/// The kind of LLaVA video model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Onevision,
    NextVideo,
}

impl Kind {
    /// Returns the class of the video processor.
    pub(super) const fn class(self) -> ProcessorClass {
        match self {
            Self::Onevision => ProcessorClass::LlavaOnevision,
            Self::NextVideo => ProcessorClass::LlavaNextVideo,
        }
    }
}

/// The videos of a LLaVA model.
#[derive(Clone, Debug)]
pub(super) struct LlavaVideos {
    kind: Kind,
    resize: ResizeTarget,
    crop: Option<ImageSize>,
    filter: Filter,
    normalization: Normalization,
    /// The side of the square that the vision tower takes.
    side: u32,
    /// The number of tokens per frame.
    frame_tokens: usize,
    pub(super) video_token: TokenId,
}

impl LlavaVideos {
    /// Reads the settings of a model directory.
    pub(super) fn read(
        dir: &ModelDir,
        kind: Kind,
        pruning: Option<VideoPruning>,
    ) -> Result<Self, VideoPlanError> {
        if pruning.is_some() {
            return Err(VideoPlanError::Setting {
                key: "video_pruning_rate",
                problem: "is not supported for this model".into(),
            });
        }
        let file = video_settings::read_file(dir, kind.class())?;
        if file.flag("do_sample_frames", false)? {
            return Err(file.problem("do_sample_frames", "must be false for videos").into());
        }
        if !file.flag("do_resize", true)? {
            return Err(file.problem("do_resize", "must not be false for videos").into());
        }
        let is_onevision = kind == Kind::Onevision;
        let (target, crops) = if is_onevision {
            (ResizeTarget::Exact(ImageSize::square(384)), false)
        } else {
            (ResizeTarget::ShortestEdge(224), true)
        };
        let crop = file
            .flag("do_center_crop", crops)?
            .then(|| settings::exact_size(&file, "crop_size", ImageSize::square(224)))
            .transpose()?;
        let (side, frame_tokens) = tower(dir)?;
        let default_token = if is_onevision { 151_647 } else { 32_000 };
        Ok(Self {
            kind,
            resize: settings::resize_target(&file, target, false)?,
            crop,
            filter: settings::resample(&file, Filter::Bicubic)?,
            normalization: settings::normalization(&file, CLIP)?,
            side,
            frame_tokens,
            video_token: dir.token(&["video_token_index", "video_token_id"], default_token)?,
        })
    }

    /// Returns the same model: the only supported kwargs have no effect, because the video
    /// processor does not sample.
    pub(super) fn with_kwargs(&self, kwargs: &Map<String, Value>) -> Result<Self, VideoPlanError> {
        let scope = Scope(PROCESSOR);
        for (key, value) in kwargs {
            match key.as_str() {
                "do_sample_frames" if value.as_bool() == Some(false) => {}
                "do_sample_frames" => {
                    return Err(scope.invalid("do_sample_frames", "must be false"));
                }
                _ => return Err(scope.unknown(key)),
            }
        }
        Ok(self.clone())
    }

    /// Returns the plan of a video whose loader decodes `loaded`.
    pub(super) fn plan(
        &self,
        video: VideoProperties,
        loader: VideoLoader,
        loaded: LoadedFrames,
    ) -> Result<VideoPlan, VideoPlanError> {
        let size = video.size();
        let resized = self.resize.resized(size);
        let found = self.crop.unwrap_or(resized);
        let expected = ImageSize::square(self.side);
        if found != expected {
            return Err(VisionError::TowerSize { size, found, expected }.into());
        }
        if resized.width == 0 || resized.height == 0 {
            return Err(video.problem("is too elongated"));
        }
        let frames = loaded.indices.len();
        let elements = 3 * u64::from(self.side) * u64::from(self.side) * frames as u64;
        if elements > MAX_ELEMENTS {
            return Err(video.problem("would become too large a tensor"));
        }
        let side = self.side as usize;
        let newline = usize::from(self.kind == Kind::Onevision);
        let tokens = frames * self.frame_tokens + newline;
        let layer = Layer {
            width: resized.width as usize,
            height: resized.height as usize,
            left: centered(resized.width, self.side),
            top: centered(resized.height, self.side),
            ..Layer::whole(
                size.width as usize,
                size.height as usize,
                Layout::Tiles(TileGrid::single(side, side)),
            )
        };
        let pixels = PixelTensor {
            name: "pixel_values_videos",
            shape: vec![frames, 3, side, side],
            field: TensorField::Batched { keep_on_cpu: false },
            resampler: Resampler::Torch(self.filter),
            layers: vec![layer],
        };
        let run = TokenRun { token: self.video_token, count: tokens, embeds: true };
        Ok(VideoPlan {
            video,
            loader,
            frames: loaded.indices.clone(),
            loaded_frames: loaded.indices,
            resized,
            grid: [frames as u32, 1, 1],
            tokens,
            placeholder: vec![VideoPiece::Tokens(run)],
            timestamps: None,
            seconds_per_group: None,
            pixels,
            small_tensors: Vec::new(),
        })
    }

    /// Writes every setting that changes tensors or tokens.
    pub(super) fn fingerprint(&self, out: &mut Fingerprint) {
        let Self { kind, resize, crop, filter, normalization, side, frame_tokens, video_token } =
            self;
        out.text("class", kind.class().name());
        match *resize {
            ResizeTarget::ShortestEdge(edge) => out.integer("shortest_edge", edge),
            ResizeTarget::Exact(size) => out.size("size", size),
        }
        if let Some(size) = crop {
            out.size("crop", *size);
        }
        out.filter("resample", *filter);
        normalization.fingerprint(out);
        out.integer("side", *side);
        out.count("frame_tokens", *frame_tokens);
        out.tokens("tokens", &[*video_token]);
    }

    /// Returns the normalisation of each channel.
    pub(super) fn normalization(&self) -> &Normalization {
        &self.normalization
    }
}

/// Returns the side of the images that the vision tower takes, and the number of tokens that are
/// left of a frame after pooling.
///
/// Both sides must be in config.json: their defaults depend on the classes of the configs.
fn tower(dir: &ModelDir) -> Result<(u32, usize), VisionError> {
    let vision = &dir.vision;
    match vision.text("model_type")? {
        Some("clip_vision_model" | "siglip_vision_model") => {}
        _ => {
            let problem = "must be clip_vision_model or siglip_vision_model for videos";
            return Err(vision.problem("model_type", problem));
        }
    }
    let number = |section: &crate::model_dir::Section, key, default: Option<u64>| {
        section
            .positive(key)?
            .or(default)
            .filter(|number| *number <= MAX_SIDE)
            .ok_or_else(|| section.problem(key, format!("must be from 1 to {MAX_SIDE}")))
    };
    let side = number(vision, "image_size", None)?;
    let patch = number(vision, "patch_size", None)?;
    let stride = number(&dir.config, "spatial_pool_stride", Some(2))?;
    let pooled = (side / patch).div_ceil(stride) as usize;
    if pooled == 0 {
        return Err(vision.problem("patch_size", "leaves no embedding of a frame"));
    }
    Ok((side as u32, pooled * pooled))
}
