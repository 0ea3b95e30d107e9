//! The settings of an engine that change how it processes videos.

use serde_json::{Map, Value};

use super::VideoPlanError;

/// The flags and environment of an engine that change its videos.
#[derive(Clone, Debug)]
pub struct VideoOptions {
    /// `--mm-processor-kwargs`.
    pub processor_kwargs: Map<String, Value>,
    /// `video` in `--media-io-kwargs`.
    pub media_io_kwargs: Map<String, Value>,
    /// `VLLM_VIDEO_LOADER_BACKEND`, the loader of models whose video processor has none.
    pub default_loader: String,
    /// `VLLM_MAX_IMAGE_PIXELS`, the largest area of a frame; 0 means no limit.
    pub max_frame_pixels: u64,
    /// `--video-pruning-rate` and `--video-pruning-method`; `None` if the rate is 0 or not set.
    pub pruning: Option<VideoPruning>,
}

impl Default for VideoOptions {
    /// Returns the settings of an engine that sets none of them (`vllm/envs.py`).
    fn default() -> Self {
        Self {
            processor_kwargs: Map::new(),
            media_io_kwargs: Map::new(),
            default_loader: "opencv".into(),
            max_frame_pixels: 178_956_970,
            pruning: None,
        }
    }
}

/// The part of a video's tokens that the engine drops.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct VideoPruning {
    /// The algorithm.
    pub method: PruningMethod,
    /// The part that is dropped, above 0 and below 1.
    pub rate: f64,
}

/// The algorithms of `--video-pruning-method`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PruningMethod {
    /// Efficient video sampling: keeps all tokens of the first frame.
    Evs,
    /// VidCom2: keeps at least one token of each frame.
    VidCom2,
}

impl VideoPruning {
    /// Checks the rate.
    pub(super) fn validate(self) -> Result<Self, VideoPlanError> {
        if self.rate > 0.0 && self.rate < 1.0 {
            Ok(self)
        } else {
            Err(VideoPlanError::Setting {
                key: "video_pruning_rate",
                problem: "must be above 0 and below 1".into(),
            })
        }
    }

    /// Returns the number of tokens that are kept of `groups` groups of frames with `group_tokens`
    /// tokens each.
    ///
    /// Follows `compute_retained_tokens_count` in vLLM's `video_prune/evs.py` and `vidcom2.py`.
    pub(super) fn kept_tokens(self, group_tokens: u64, groups: u64) -> u64 {
        let total = group_tokens * groups;
        // int() truncates.
        let kept = (total as f64 * (1.0 - self.rate)) as u64;
        match self.method {
            PruningMethod::Evs => group_tokens.max(kept),
            PruningMethod::VidCom2 => groups.max(kept.min(total)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pruning_keeps_at_least_first_frame_or_one_token_each() {
        let pruning = |method, rate| VideoPruning { method, rate };
        assert_eq!(pruning(PruningMethod::Evs, 0.75).kept_tokens(100, 8), 200);
        assert_eq!(pruning(PruningMethod::Evs, 0.99).kept_tokens(100, 8), 100);
        assert_eq!(pruning(PruningMethod::VidCom2, 0.99).kept_tokens(100, 8), 8);
        assert!(pruning(PruningMethod::Evs, 0.0).validate().is_err());
        assert!(pruning(PruningMethod::Evs, 1.0).validate().is_err());
        assert!(pruning(PruningMethod::Evs, f64::NAN).validate().is_err());
    }
}
