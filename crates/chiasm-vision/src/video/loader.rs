//! vLLM's video loaders: which frames of a file are decoded.

use serde_json::{Map, Value};

use super::kwargs::{MEDIA_IO, Scope};
use super::{VideoPlanError, VideoProperties, sampling};
use crate::fingerprint::Fingerprint;

/// The largest number of frames of a file. Far above a day of video; keeps floats exact.
const MAX_FRAMES: u64 = 1 << 31;
/// The largest number of frames that are sampled. The Qwen loaders sample at most 768.
const MAX_SAMPLED_FRAMES: u64 = 1 << 16;
/// `_MAX_FRAMES` of the Qwen loaders.
const QWEN_MAX_FRAMES: u64 = 768;
/// `_MAX_FPS` of the Qwen loaders.
const QWEN_MAX_FPS: f64 = 30.0;
/// The frame rate that the Qwen3-VL loader assumes for an unknown one.
const QWEN3_UNKNOWN_FPS: f64 = 24.0;

/// A loader of vLLM (`VIDEO_LOADER_REGISTRY` in its `multimodal/video.py`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum VideoLoader {
    /// Evenly spaced frames, at most `num_frames`.
    OpenCv,
    /// `fps` frames per second, an even number of them.
    Qwen2Vl,
    /// `fps` frames per second, from the first to the last frame.
    Qwen3Vl,
}

impl VideoLoader {
    /// Returns the loader's name in vLLM.
    pub const fn name(self) -> &'static str {
        match self {
            Self::OpenCv => "opencv",
            Self::Qwen2Vl => "qwen2_vl",
            Self::Qwen3Vl => "qwen3_vl",
        }
    }

    /// Returns the loader with this name in vLLM.
    pub(super) fn from_name(name: &str) -> Option<Self> {
        [Self::OpenCv, Self::Qwen2Vl, Self::Qwen3Vl]
            .into_iter()
            .find(|loader| loader.name() == name)
    }
}

/// The frames that a loader decodes, and what it reports about the file.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct LoadedFrames {
    /// The numbers of the frames, ascending and distinct.
    pub(super) indices: Vec<u64>,
    /// The number of frames in the file.
    pub(super) total: u64,
    /// The reported frame rate; 0 if unknown.
    pub(super) fps: f64,
}

impl LoadedFrames {
    /// Returns `true` if every frame is decoded. vLLM then lets the model's processor sample
    /// (`do_sample_frames` in `create_hf_metadata`).
    pub(super) fn is_everything(&self) -> bool {
        self.indices.len() as u64 == self.total
    }
}

/// A loader with its settings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Sampling {
    pub(super) loader: VideoLoader,
    /// The target number of frames; -1 or 0 means all. The Qwen loaders ignore it.
    num_frames: i64,
    /// The target frame rate; not above 0 means any.
    fps: f64,
    min_frames: u64,
    max_frames: u64,
    temporal_patch: u64,
    max_frame_pixels: u64,
}

impl Sampling {
    /// Parses merged `media_io_kwargs.video`. `default_loader` is used unless they name another
    /// one.
    pub(super) fn parse(
        kwargs: &Map<String, Value>,
        default_loader: VideoLoader,
        max_frame_pixels: u64,
    ) -> Result<Self, VideoPlanError> {
        let scope = Scope(MEDIA_IO);
        let mut loader = default_loader;
        let mut num_frames = None;
        let mut fps = None;
        let mut min_frames = None;
        let mut max_frames = None;
        let mut temporal_patch = None;
        for (key, value) in kwargs {
            match key.as_str() {
                "video_backend" => {
                    loader = value.as_str().and_then(VideoLoader::from_name).ok_or_else(|| {
                        scope.invalid("video_backend", "must be opencv, qwen2_vl or qwen3_vl")
                    })?;
                }
                "backend" if value.as_str() == Some("opencv") => {}
                "backend" => return Err(scope.invalid("backend", "must be opencv")),
                "frame_recovery" if value.as_bool() == Some(false) => {}
                "frame_recovery" => return Err(scope.invalid("frame_recovery", "must be false")),
                "num_frames" => {
                    num_frames = Some(
                        value
                            .as_i64()
                            .ok_or_else(|| scope.invalid("num_frames", "must be an integer"))?,
                    );
                }
                "fps" => fps = Some(scope.number("fps", value)?),
                "min_frames" => min_frames = Some(scope.positive("min_frames", value)?),
                "max_frames" => max_frames = Some(scope.positive("max_frames", value)?),
                "temporal_patch_size" => {
                    temporal_patch = Some(scope.positive("temporal_patch_size", value)?);
                }
                // Only the loader `opencv_dynamic` uses it.
                "max_duration" if value.is_number() => {}
                _ => return Err(scope.unknown(key)),
            }
        }
        let default_fps = match loader {
            VideoLoader::OpenCv => -1.0,
            VideoLoader::Qwen2Vl | VideoLoader::Qwen3Vl => 2.0,
        };
        Ok(Self {
            loader,
            // The default of `VideoMediaIO`.
            num_frames: num_frames.unwrap_or(32),
            fps: fps.unwrap_or(default_fps),
            min_frames: min_frames.unwrap_or(4),
            max_frames: max_frames.unwrap_or(QWEN_MAX_FRAMES).min(QWEN_MAX_FRAMES),
            temporal_patch: temporal_patch.unwrap_or(2),
            max_frame_pixels,
        })
    }

    /// Returns the frames that vLLM decodes.
    ///
    /// Follows `compute_frames_index_to_sample` of the loaders and `decode_opencv`.
    pub(super) fn load(&self, video: VideoProperties) -> Result<LoadedFrames, VideoPlanError> {
        let VideoProperties { frames: total, fps, width, height } = video;
        let problem = |problem: &str| video.problem(problem);
        if !fps.is_finite() || fps < 0.0 {
            return Err(problem("has an invalid frame rate"));
        }
        if total == 0 || total > MAX_FRAMES || width == 0 || height == 0 {
            return Err(problem("is empty or too long"));
        }
        // OpenCV 5.0 cannot rewind such a video after vLLM's seek to the end, and loads no frame.
        if total == 1 {
            return Err(problem("has one frame, which vLLM cannot read"));
        }
        let area = video.size().area();
        if self.max_frame_pixels > 0 && area > self.max_frame_pixels {
            return Err(problem("has larger frames than VLLM_MAX_IMAGE_PIXELS allows"));
        }
        let (count, fps) = match self.loader {
            VideoLoader::OpenCv => (self.opencv_count(total, fps), fps),
            VideoLoader::Qwen2Vl if fps <= 0.0 => {
                return Err(problem("has no frame rate, which the loader qwen2_vl needs"));
            }
            VideoLoader::Qwen2Vl => (self.qwen2_count(total, fps), fps),
            VideoLoader::Qwen3Vl => {
                let fps = if fps > 0.0 { fps } else { QWEN3_UNKNOWN_FPS };
                (self.qwen3_count(total, fps), fps)
            }
        };
        if count == 0 {
            return Err(problem("is too short to be sampled"));
        }
        if count > MAX_SAMPLED_FRAMES {
            return Err(problem("would be sampled too densely"));
        }
        let mut indices = match self.loader {
            VideoLoader::OpenCv => sampling::linspace_floor(total, count),
            VideoLoader::Qwen2Vl => sampling::arange(total, count),
            VideoLoader::Qwen3Vl => sampling::linspace_round(total, count),
        };
        // OpenCV's frames are read through a set of their numbers.
        indices.dedup();
        Ok(LoadedFrames { indices, total, fps })
    }

    /// Returns the number of frames of `VideoBackend`; at least 1.
    fn opencv_count(&self, total: u64, fps: f64) -> u64 {
        let mut count = total;
        if self.num_frames > 0 {
            count = count.min(self.num_frames.unsigned_abs());
        }
        if self.fps > 0.0 {
            let duration = if fps > 0.0 { total as f64 / fps } else { 0.0 };
            count = count.min((duration * self.fps).floor() as u64);
        }
        count.max(1)
    }

    /// Returns the number of frames of `Qwen2VLVideoBackend`, before float32 adds one.
    fn qwen2_count(&self, total: u64, fps: f64) -> u64 {
        let multiple = self.temporal_patch;
        let max_frames = self.max_frames.min(total) / multiple * multiple;
        let count = total as f64 / fps * self.fps.min(QWEN_MAX_FPS);
        let count = count.max(self.min_frames as f64).min(max_frames as f64).min(total as f64);
        (count / multiple as f64).floor() as u64 * multiple
    }

    /// Returns the number of frames of `Qwen3VLVideoBackend`.
    fn qwen3_count(&self, total: u64, fps: f64) -> u64 {
        let count = (total as f64 / fps * self.fps.min(QWEN_MAX_FPS)) as u64;
        count.max(self.min_frames).min(self.max_frames).min(total)
    }

    /// Writes every setting that changes the frames.
    pub(super) fn fingerprint(&self, out: &mut Fingerprint) {
        let Self { loader, num_frames, fps, min_frames, max_frames, temporal_patch, .. } = *self;
        out.text("loader", loader.name());
        out.double("target_fps", fps);
        match loader {
            VideoLoader::OpenCv => out.integer("num_frames", num_frames.max(0).unsigned_abs()),
            VideoLoader::Qwen2Vl => {
                out.integers("frames_range", [min_frames, max_frames, temporal_patch]);
            }
            VideoLoader::Qwen3Vl => out.integers("frames_range", [min_frames, max_frames]),
        }
    }
}

/// Merges `media_io_kwargs.video` of an engine and a request.
///
/// Follows `VideoMediaIO.merge_kwargs`: the number of frames and their rate belong together, so a
/// request that sets one of them removes the engine's other one.
pub(super) fn merge(
    engine: &Map<String, Value>,
    request: &Map<String, Value>,
) -> Map<String, Value> {
    let mut merged = engine.clone();
    merged.extend(request.iter().map(|(key, value)| (key.clone(), value.clone())));
    for (set, removed) in [("num_frames", "fps"), ("fps", "num_frames")] {
        if request.contains_key(set) && !request.contains_key(removed) {
            merged.remove(removed);
        }
    }
    merged
}
