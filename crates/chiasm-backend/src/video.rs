//! Videos that another machine plans from a description, and decodes from a cut of the file.

use std::sync::Arc;

use bytes::Bytes;
use futures_util::future::BoxFuture;

use crate::SourceError;

/// A planned video whose wanted frames can be cut out of its file.
///
/// Another machine plans the video from its [description](VideoDescription) as this process has,
/// and makes the same tensors from the cut. The cut is a part of the file, so it does not have the
/// file's hash: the other machine must trust it.
pub trait CuttableVideo: Send + Sync {
    /// Returns everything that decides the plan.
    fn description(&self) -> VideoDescription;

    /// Returns the maximum number of bytes of the cut and the tensors together.
    fn item_bytes(&self) -> u64;

    /// Cuts the wanted frames out of the file, for a machine that decodes `slots` usual videos at
    /// once: into as many parts as the machine decodes at once of this video.
    ///
    /// # Errors
    /// Returns an error if the file can't be cut now.
    fn cut(&self, slots: u32) -> BoxFuture<'_, Result<Vec<VideoPart>, SourceError>>;

    /// Reports that the cut decodes to other frames than were planned. The tensors are then made
    /// from the whole file, and later requests are planned anew.
    fn reject_cut(&self);
}

/// The facts about a video that decide its plan, for a given model.
#[derive(Clone, Debug, PartialEq)]
pub struct VideoDescription {
    /// The blake3 hash of the file.
    pub content: [u8; 32],
    /// The number of frames, as vLLM counts them.
    pub frames: u64,
    /// The number of frames per second.
    pub fps: f64,
    /// The width of a frame in pixels.
    pub width: u32,
    /// The height of a frame in pixels.
    pub height: u32,
    /// The request's settings for the model's processor, as a JSON object.
    pub processor_kwargs: Arc<str>,
    /// The request's settings for reading files, by modality, as a JSON object.
    pub io_kwargs: Arc<str>,
}

/// One part of a cut: a small mp4 file of which some frames are wanted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VideoPart {
    /// The file: the pieces in order.
    pub pieces: Vec<Bytes>,
    /// The number of samples of the file, all of which must decode.
    pub samples: u32,
    /// The wanted frames.
    pub frames: Vec<PartFrame>,
}

impl VideoPart {
    /// Returns the length of the file in bytes.
    pub fn bytes(&self) -> u64 {
        self.pieces.iter().map(|piece| piece.len() as u64).sum()
    }
}

/// A wanted frame inside a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartFrame {
    /// The number of the frame in the whole video, from 0.
    pub frame: u64,
    /// The number of the frame among those of the part, from 0.
    pub position: u32,
}
