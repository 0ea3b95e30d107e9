//! The properties of a video that decide its plan.

use super::VideoPlanError;
use crate::ImageSize;

/// The properties of a video that decide its plan, as OpenCV reports them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct VideoProperties {
    /// The number of frames as vLLM counts them, after vLLM's check for edit lists
    /// (`get_video_metadata` in its `video_decoders/opencv.py`).
    pub frames: u64,
    /// The average number of frames per second; 0 if unknown.
    pub fps: f64,
    /// The width of a frame in pixels, after rotation.
    pub width: u32,
    /// The height of a frame in pixels, after rotation.
    pub height: u32,
}

impl VideoProperties {
    /// Returns the size of a frame.
    pub(super) const fn size(self) -> ImageSize {
        ImageSize { width: self.width, height: self.height }
    }

    /// Creates the error for a video that is not planned.
    pub(super) fn problem(self, problem: impl Into<String>) -> VideoPlanError {
        let Self { frames, fps, .. } = self;
        VideoPlanError::Video { frames, fps, size: self.size(), problem: problem.into() }
    }
}
