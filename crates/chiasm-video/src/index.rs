//! The index of a video: its properties, and the roles of its samples.

use crate::codec::{RandomAccess, SampleRole, read_contents};
use crate::count::FrameCounter;
use crate::error::IndexError;
use crate::track::{Codec, Container, Track};
use crate::{matroska, mp4};

/// The properties of a video, as vLLM with OpenCV sees them.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct VideoProperties {
    /// The number of frames that vLLM samples from. Can differ from the number of visible frames
    /// by one, and by more if the frame rate varies, as vLLM's count does.
    pub frames: u64,
    /// The frames that can be decoded.
    pub visible_frames: u64,
    /// Frames per second.
    pub fps: f64,
    /// Pixels per row of a decoded frame, after rotation.
    pub width: u32,
    /// Rows of a decoded frame, after rotation.
    pub height: u32,
    /// Degrees, as OpenCV's `CAP_PROP_ORIENTATION_META` gives them: 0, 90, 180 or 270.
    pub rotation: u16,
    /// The codec.
    pub codec: Codec,
    /// The container.
    pub container: Container,
    /// The number of samples, hidden ones included.
    pub samples: u64,
    /// The number of samples from which decoding can start.
    pub safe_starts: u64,
    /// The number of samples that no other sample needs.
    pub droppable_samples: u64,
}

/// The index of a video file. Does not borrow the file.
#[derive(Clone, Debug)]
pub struct VideoIndex {
    pub(crate) track: Track,
    /// A role per sample.
    pub(crate) roles: Vec<SampleRole>,
    /// The positions of the visible samples in presentation order.
    pub(crate) order: Vec<u32>,
    /// The length of the file.
    pub(crate) file_bytes: usize,
    pub(crate) length_size: u8,
    pub(crate) has_duplicate_times: bool,
    pub(crate) has_changing_sets: bool,
    properties: VideoProperties,
}

impl VideoIndex {
    /// Reads the index of a file. Decodes nothing and copies no samples.
    ///
    /// Time and memory are at most proportional to the number of samples and of NAL units.
    ///
    /// # Errors
    ///
    /// Returns the reason if the frame count, the rate or the size cannot be vouched for.
    pub fn read(file: &[u8]) -> Result<Self, IndexError> {
        let track = if matroska::accepts(file) {
            matroska::read(file)?
        } else if mp4::accepts(file) {
            mp4::read(file)?
        } else {
            return Err(IndexError::Container);
        };
        let contents = read_contents(file, &track)?;
        check_first(&track, &contents.roles)?;
        let order = presentation_order(&track);
        let times: Vec<i64> =
            order.iter().map(|&index| track.samples[index as usize].pts).collect();
        let frames = FrameCounter::new(&track, &times).frames().ok_or(IndexError::FrameCount)?;
        let is_upright = track.rotation % 180 == 0;
        let width = contents.width;
        let height = contents.height;
        let (width, height) = if is_upright { (width, height) } else { (height, width) };
        let count = |matches: fn(&SampleRole) -> bool| {
            contents.roles.iter().filter(|role| matches(role)).count() as u64
        };
        let properties = VideoProperties {
            frames,
            visible_frames: order.len() as u64,
            fps: track.timing.fps,
            width,
            height,
            rotation: track.rotation,
            codec: track.codec,
            container: track.container,
            samples: track.samples.len() as u64,
            safe_starts: count(|role| role.start != RandomAccess::No),
            droppable_samples: count(|role| role.is_droppable),
        };
        Ok(Self {
            has_duplicate_times: times.windows(2).any(|pair| pair[0] == pair[1]),
            has_changing_sets: contents.has_changing_sets,
            length_size: contents.length_size,
            file_bytes: file.len(),
            roles: contents.roles,
            order,
            track,
            properties,
        })
    }

    /// Returns the properties of the video.
    pub fn properties(&self) -> VideoProperties {
        self.properties
    }

    /// Returns the cost of decoding the whole file: samples times pixels.
    ///
    /// Comparable with [`Cut::decode_cost`](crate::Cut::decode_cost). OpenCV decodes each frame up
    /// to the last wanted one.
    pub fn decode_cost(&self) -> u64 {
        self.properties.samples.saturating_mul(self.pixels())
    }

    /// Returns the pixels of a frame.
    pub(crate) fn pixels(&self) -> u64 {
        u64::from(self.properties.width) * u64::from(self.properties.height)
    }
}

/// Checks that the first sample that OpenCV decodes is a safe start, and that no frame is shown
/// before it: OpenCV skips such frames, which shifts the numbers of all later ones.
fn check_first(track: &Track, roles: &[SampleRole]) -> Result<(), IndexError> {
    let first = track.kept.start;
    let (Some(sample), Some(role)) = (track.samples.get(first), roles.get(first)) else {
        return Err(IndexError::FirstSample);
    };
    let is_first_shown =
        track.samples.iter().all(|other| !other.is_visible || other.pts >= sample.pts);
    if role.start == RandomAccess::No || role.start == RandomAccess::Open && !is_first_shown {
        return Err(IndexError::FirstSample);
    }
    Ok(())
}

/// Returns the positions of the visible samples in presentation order.
fn presentation_order(track: &Track) -> Vec<u32> {
    let visible = (0u32..).zip(&track.samples).filter(|(_, sample)| sample.is_visible);
    let mut order: Vec<u32> = visible.map(|(index, _)| index).collect();
    order.sort_by_key(|&index| track.samples[index as usize].pts);
    order
}
