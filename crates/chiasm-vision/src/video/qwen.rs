//! Qwen2-VL, Qwen2.5-VL (Cosmos-Reason1), Qwen3-VL and Qwen3.5.
//!
//! Follows `_get_prompt_updates` and `_apply_hf_processor_main` in vLLM's `qwen2_vl.py`,
//! `qwen2_5_vl.py` and `qwen3_vl.py`.

use chiasm_types::{TensorField, TokenId, TokenRun};
use serde_json::{Map, Value};

use super::kwargs::{PROCESSOR, Scope};
use super::loader::LoadedFrames;
use super::plan::MAX_ELEMENTS;
use super::resampling::Resampling;
use super::settings::{self, ProcessorClass, QwenSettings};
use super::{
    PruningMethod, VideoLoader, VideoPiece, VideoPlan, VideoPlanError, VideoProperties,
    VideoPruning, qwen_resize,
};
use crate::TensorSpec;
use crate::families::qwen_vl::kwargs as size_kwargs;
use crate::fingerprint::Fingerprint;
use crate::image_plan::PixelTensor;
use crate::kernels::{Filter, Layer, Layout, Normalization, PatchGrid, Resampler};
use crate::model_dir::ModelDir;

/// The generation of a Qwen-VL model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Generation {
    Two,
    TwoFive,
    Three,
    ThreeFive,
}

impl Generation {
    /// Returns `true` if the generation has timestamps and its own video processor.
    const fn has_timestamps(self) -> bool {
        matches!(self, Self::Three | Self::ThreeFive)
    }

    /// Returns the class of the video processor.
    pub(super) const fn class(self) -> ProcessorClass {
        match self {
            Self::Two | Self::TwoFive => ProcessorClass::Qwen2Vl,
            Self::Three | Self::ThreeFive => ProcessorClass::Qwen3Vl,
        }
    }

    /// Returns the default ids of the video token and of the tokens around it.
    const fn default_tokens(self) -> [u32; 3] {
        match self {
            Self::Two | Self::TwoFive | Self::Three => [151_656, 151_652, 151_653],
            Self::ThreeFive => [248_057, 248_053, 248_054],
        }
    }
}

/// The videos of a Qwen-VL model.
#[derive(Clone, Debug)]
pub(super) struct QwenVideos {
    generation: Generation,
    settings: QwenSettings,
    pruning: Option<VideoPruning>,
    pub(super) video_token: TokenId,
    vision_start: TokenId,
    vision_end: TokenId,
    resampling: Resampling,
}

impl QwenVideos {
    /// Reads the settings of a model directory.
    pub(super) fn read(
        dir: &ModelDir,
        generation: Generation,
        pruning: Option<VideoPruning>,
    ) -> Result<Self, VideoPlanError> {
        let is_supported = match (generation, pruning.map(|pruning| pruning.method)) {
            (_, None) => true,
            (Generation::Two, Some(_)) => false,
            (Generation::TwoFive, Some(method)) => method == PruningMethod::Evs,
            (Generation::Three | Generation::ThreeFive, Some(_)) => true,
        };
        if !is_supported {
            return Err(VideoPlanError::Setting {
                key: "video_pruning_rate",
                problem: "is not supported for this model".into(),
            });
        }
        let file = settings::read_file(dir, generation.class())?;
        let settings = QwenSettings::read(dir, &file, generation.class())?;
        let [video, start, end] = generation.default_tokens();
        Ok(Self {
            generation,
            settings,
            pruning,
            video_token: dir.token(&["video_token_id"], video)?,
            vision_start: dir.token(&["vision_start_token_id"], start)?,
            vision_end: dir.token(&["vision_end_token_id"], end)?,
            resampling: Resampling::default(),
        })
    }

    /// Returns the same model with `mm_processor_kwargs` in place of its own settings.
    pub(super) fn with_kwargs(&self, kwargs: &Map<String, Value>) -> Result<Self, VideoPlanError> {
        let scope = Scope(PROCESSOR);
        let mut changed = self.clone();
        let mut bounds = Map::new();
        for (key, value) in kwargs {
            match key.as_str() {
                "do_sample_frames" => {
                    changed.resampling.do_sample_frames =
                        Some(scope.flag("do_sample_frames", value)?);
                }
                "fps" => {
                    let fps = scope.number("fps", value)?;
                    if fps <= 0.0 {
                        return Err(scope.invalid("fps", "must be above 0"));
                    }
                    changed.resampling.fps = Some(fps);
                }
                "num_frames" => {
                    changed.resampling.num_frames = Some(scope.positive("num_frames", value)?);
                }
                "cap_pixels_per_frame" => {
                    changed.settings.caps_frames = scope.flag("cap_pixels_per_frame", value)?;
                }
                _ => {
                    bounds.insert(key.clone(), value.clone());
                }
            }
        }
        let bounds = size_kwargs::parse(&bounds, self.generation.has_timestamps())?;
        if let Some(pixels) = bounds.min_pixels {
            changed.settings.min_pixels = pixels;
        }
        if let Some(pixels) = bounds.max_pixels {
            changed.settings.max_pixels = pixels;
        }
        Ok(changed)
    }

    /// Adds the other names of each setting in a request's kwargs.
    ///
    /// vLLM does so only for generations whose processor it calls video by video. For the others,
    /// an engine's `max_pixels` wins over a request's `size`.
    pub(super) fn add_aliases(&self, request: &mut Map<String, Value>) {
        if self.generation.has_timestamps() {
            size_kwargs::add_size_aliases(request);
        }
    }

    /// Returns the plan of a video whose loader decodes `loaded`.
    pub(super) fn plan(
        &self,
        video: VideoProperties,
        loader: VideoLoader,
        loaded: LoadedFrames,
    ) -> Result<VideoPlan, VideoPlanError> {
        if self.generation.has_timestamps() && loaded.fps <= 0.0 {
            return Err(video.problem("has no frame rate, which timestamps need"));
        }
        let frames = if self.generation.has_timestamps() {
            self.resampling.sample(&self.settings, video, &loaded)?
        } else {
            self.resampling.keep_all(&self.settings, &loaded)?
        };
        let count = frames.len() as u64;
        let resized = if self.generation.has_timestamps() {
            qwen_resize::by_volume(&self.settings, video, count)?
        } else {
            qwen_resize::by_frame(&self.settings, video, count)?
        };
        let QwenSettings { patch, merge, temporal, .. } = self.settings;
        let groups = count.div_ceil(u64::from(temporal));
        let grid = [groups as u32, resized.height / patch, resized.width / patch];
        let patches = PatchGrid {
            height: grid[1] as usize,
            width: grid[2] as usize,
            patch: patch as usize,
            merge: merge as usize,
            temporal: temporal as usize,
        };
        let elements = resized.area() * 3 * u64::from(temporal) * groups;
        if elements > MAX_ELEMENTS {
            return Err(video.problem("would become too large a tensor"));
        }
        let rows = patches.rows() * groups as usize;
        let group_tokens = patches.rows() as u64 / u64::from(merge * merge);
        let tokens = match self.pruning {
            Some(pruning) => pruning.kept_tokens(group_tokens, groups),
            None => group_tokens * groups,
        };
        let timestamps =
            self.generation.has_timestamps().then(|| self.timestamps(&frames, loaded.fps));
        let placeholder = match &timestamps {
            Some(timestamps) => self.timed_placeholder(timestamps, tokens, group_tokens),
            None => vec![self.video_tokens(tokens)],
        };
        let seconds_per_group = (self.generation == Generation::TwoFive).then(|| {
            let sampled_fps = count as f64 / loaded.total as f64 * loaded.fps;
            f64::from(temporal) / sampled_fps
        });
        if seconds_per_group.is_some_and(|seconds| !seconds.is_finite()) {
            return Err(video.problem("has no frame rate, which Qwen2.5-VL needs"));
        }
        let pixels = PixelTensor {
            name: "pixel_values_videos",
            shape: vec![rows, patches.row_len()],
            field: TensorField::rows(rows),
            resampler: Resampler::Torch(Filter::Bicubic),
            layers: vec![Layer::whole(
                video.width as usize,
                video.height as usize,
                Layout::Patches(PatchGrid { temporal: 1, ..patches }),
            )],
        };
        let grid_thw = TensorSpec::integers(
            "video_grid_thw",
            vec![3],
            TensorField::Batched { keep_on_cpu: true },
            &grid.map(i64::from),
        );
        Ok(VideoPlan {
            video,
            loader,
            loaded_frames: loaded.indices,
            frames,
            resized,
            grid,
            tokens: tokens as usize,
            placeholder,
            timestamps,
            seconds_per_group,
            pixels,
            small_tensors: vec![grid_thw],
        })
    }

    /// Returns the mean of the times of the first and last frame of each group, in seconds.
    ///
    /// Follows `_calculate_timestamps` in vLLM's `qwen3_vl.py`.
    fn timestamps(&self, frames: &[u64], fps: f64) -> Vec<f64> {
        let seconds = |frame: &u64| *frame as f64 / fps;
        frames
            .chunks(self.settings.temporal as usize)
            .filter_map(|group| Some((seconds(group.first()?) + seconds(group.last()?)) / 2.0))
            .collect()
    }

    /// Returns the placeholder of Qwen3-VL (`get_video_repl` in vLLM's `qwen3_vl.py`).
    ///
    /// With pruning, all video tokens follow the first timestamp, and the engine finds them itself:
    /// every token counts as an embedding.
    fn timed_placeholder(
        &self,
        timestamps: &[f64],
        tokens: u64,
        group_tokens: u64,
    ) -> Vec<VideoPiece> {
        let is_pruned = self.pruning.is_some();
        let mark = |token| VideoPiece::Tokens(TokenRun { token, count: 1, embeds: is_pruned });
        let mut pieces = Vec::with_capacity(4 * timestamps.len());
        for (index, seconds) in timestamps.iter().enumerate() {
            let text = format!("<{seconds:.1} seconds>");
            pieces.push(VideoPiece::Text { text, embeds: is_pruned });
            pieces.push(mark(self.vision_start));
            let count = match (is_pruned, index) {
                (false, _) => group_tokens,
                (true, 0) => tokens,
                (true, _) => 0,
            };
            if count > 0 {
                pieces.push(self.video_tokens(count));
            }
            pieces.push(mark(self.vision_end));
        }
        pieces
    }

    /// Returns `count` video tokens.
    fn video_tokens(&self, count: u64) -> VideoPiece {
        let token = self.video_token;
        VideoPiece::Tokens(TokenRun { token, count: count as usize, embeds: true })
    }

    /// Writes every setting that changes tensors or tokens.
    pub(super) fn fingerprint(&self, out: &mut Fingerprint) {
        let Self {
            generation,
            settings,
            pruning,
            video_token,
            vision_start,
            vision_end,
            resampling,
        } = self;
        let QwenSettings {
            patch,
            merge,
            temporal,
            min_pixels,
            max_pixels,
            caps_frames,
            max_video_tokens,
            do_sample_frames: _,
            // `resampling` writes these where they matter.
            fps: _,
            has_num_frames: _,
            min_frames: _,
            max_frames: _,
            ref normalization,
        } = *settings;
        out.integers("patch", [patch, merge, temporal].map(u64::from));
        out.integers("pixels", [min_pixels, max_pixels]);
        if caps_frames {
            out.integer("max_video_tokens", max_video_tokens);
        }
        resampling.fingerprint(settings, generation.has_timestamps(), out);
        if let Some(VideoPruning { method, rate }) = *pruning {
            let method = match method {
                PruningMethod::Evs => "evs",
                PruningMethod::VidCom2 => "vidcom2",
            };
            out.text("pruning", method);
            out.double("pruning_rate", rate);
        }
        normalization.fingerprint(out);
        out.tokens("tokens", &[*video_token, *vision_start, *vision_end]);
    }

    /// Returns the normalisation of each channel.
    pub(super) fn normalization(&self) -> &Normalization {
        &self.settings.normalization
    }
}
