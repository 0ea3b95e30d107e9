//! The sampling that Qwen's video processors do after the loader's.

use super::kwargs::{PROCESSOR, Scope};
use super::loader::LoadedFrames;
use super::settings::QwenSettings;
use super::{VideoPlanError, VideoProperties, sampling};
use crate::fingerprint::Fingerprint;

/// The `mm_processor_kwargs` of the processor's own sampling.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Resampling {
    /// `true` if the processor samples; `None` leaves the choice to vLLM.
    pub(super) do_sample_frames: Option<bool>,
    /// The target frame rate.
    pub(super) fps: Option<f64>,
    /// The number of frames.
    pub(super) num_frames: Option<u64>,
}

impl Resampling {
    /// Returns the frames that Qwen2-VL's processor keeps: all, as it does not sample by default.
    pub(super) fn keep_all(
        self,
        settings: &QwenSettings,
        loaded: &LoadedFrames,
    ) -> Result<Vec<u64>, VideoPlanError> {
        if self.do_sample_frames.unwrap_or(settings.do_sample_frames) {
            return Err(VideoPlanError::Setting {
                key: "do_sample_frames",
                problem: "must be false for this model".into(),
            });
        }
        Ok(loaded.indices.clone())
    }

    /// Returns the frames that Qwen3-VL's processor keeps. It samples if the loader did not.
    ///
    /// Follows `_get_video_second_idx` in vLLM's `qwen3_vl.py` and
    /// `Qwen3VLVideoProcessor.sample_frames`, where they agree.
    pub(super) fn sample(
        self,
        settings: &QwenSettings,
        video: VideoProperties,
        loaded: &LoadedFrames,
    ) -> Result<Vec<u64>, VideoPlanError> {
        if !self.do_sample_frames.unwrap_or_else(|| loaded.is_everything()) {
            return Ok(loaded.indices.clone());
        }
        // The processor numbers the file's frames, but would pick among the decoded ones.
        if !loaded.is_everything() {
            return Err(video.problem("would be sampled twice"));
        }
        let QwenSettings { fps, has_num_frames, min_frames, max_frames, .. } = *settings;
        let total = loaded.total;
        let clamp = |count: u64| count.max(min_frames).min(max_frames).min(total);
        let count = match (self.num_frames, self.fps.or(fps)) {
            (Some(_), _) if self.fps.is_some() => {
                return Err(Scope(PROCESSOR).invalid("num_frames", "excludes fps"));
            }
            // vLLM clamps the number for timestamps, the processor does not.
            (Some(count), _) if count == clamp(count) => count,
            (Some(_), _) => {
                return Err(video.problem("does not have the frames that num_frames asks for"));
            }
            (None, Some(_)) if has_num_frames => {
                return Err(VideoPlanError::Setting {
                    key: "num_frames",
                    problem: "in the video processor's settings excludes fps".into(),
                });
            }
            (None, Some(fps)) => clamp((total as f64 / loaded.fps * fps) as u64),
            (None, None) => {
                return Err(VideoPlanError::Setting {
                    key: "fps",
                    problem: "must not be null in the video processor's settings".into(),
                });
            }
        };
        Ok(sampling::linspace_round(total, count))
    }

    /// Writes every setting that changes the frames, or decides whether they can be planned.
    pub(super) fn fingerprint(
        self,
        settings: &QwenSettings,
        has_timestamps: bool,
        out: &mut Fingerprint,
    ) {
        if let Some(flag) = self.do_sample_frames {
            out.flag("do_sample_frames", flag);
        }
        if !has_timestamps {
            return;
        }
        match (self.num_frames, self.fps) {
            (Some(count), fps) => {
                out.integer("sampled_frames", count);
                // `sample` refuses both.
                if let Some(fps) = fps {
                    out.double("sampled_fps", fps);
                }
            }
            (None, fps) => out.double("sampled_fps", fps.or(settings.fps).unwrap_or(0.0)),
        }
        out.integers("sampled_range", [settings.min_frames, settings.max_frames]);
    }
}
