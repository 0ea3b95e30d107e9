//! The frames of a video, which a child decodes one by one.

use std::io;
use std::sync::Arc;

use bytes::Bytes;

use crate::child::{MAX_INLINE_COPY_BYTES, TimeBudget};
use crate::memory::Memory;
use crate::message::{Call, Reply};
use crate::processor::{ChildLease, unexpected_reply};
use crate::{Processor, ProcessorError};

/// The maximum number of frames in the memory: one that is read, one that waits, and one that is
/// written.
const MAX_SLOTS: usize = 3;

/// The bytes of a pixel in RGB.
const PIXEL_BYTES: u64 = 3;

/// One part of a cut: a small mp4 of which some frames are wanted.
#[derive(Clone, Debug)]
pub struct FramesCall {
    /// The file: the pieces in order.
    pub pieces: Vec<Bytes>,
    /// The number of samples of the file, all of which must decode.
    pub samples: u64,
    /// The positions of the wanted frames among the decoded ones, ascending.
    pub positions: Vec<u64>,
    /// The width of the frames as they are delivered, after rotation.
    pub width: u32,
    /// The height of the frames as they are delivered, after rotation.
    pub height: u32,
}

impl Processor {
    /// Begins to decode a file with OpenCV, as vLLM does. Waits for a free child as
    /// [`item`](Self::item) does, and bytes count towards the same limits.
    ///
    /// The child belongs to the reader until the last frame is read. A caller with open readers
    /// must go on reading from them while it waits for another one; otherwise callers may wait for
    /// each other's children for ever.
    ///
    /// # Errors
    /// Any [`ProcessorError`]. [`ProcessorError::OtherFrames`] if the positions are not ascending
    /// or not below the number of samples.
    pub async fn frames(&self, call: FramesCall) -> Result<FrameReader, ProcessorError> {
        let FramesCall { pieces, samples, positions, width, height } = call;
        let length = pieces.iter().map(|piece| piece.len() as u64).sum();
        let ring = Ring::new(length, samples, positions, (width, height), self.item_bytes())?;
        let lease = self.lease_child().await?;
        let mut budget = lease.budget();
        let (mut lease, memory) = lease.allocate(pieces).await?;
        let positions = &ring.positions;
        let call = Call::Frames { length, samples, positions, width, height, slots: ring.slots };
        lease.child.send(&call, memory.file(), &mut budget).await?;
        let decoding = Decoding { lease, memory: Arc::new(memory), ring, budget };
        Ok(FrameReader { decoding: Some(decoding), is_complete: false })
    }
}

/// The frames of a file. Dropping it before the last frame ends the child.
pub struct FrameReader {
    /// `None` after the last frame, after an error, and while a frame is awaited.
    decoding: Option<Decoding>,
    is_complete: bool,
}

/// A call in progress.
struct Decoding {
    lease: ChildLease,
    memory: Arc<Memory>,
    ring: Ring,
    budget: TimeBudget,
}

impl FrameReader {
    /// Returns the next wanted frame as RGB rows (width × height × 3 bytes), or `None` after the
    /// last one.
    ///
    /// Frames are provisional until `None`, which confirms the number of frames in the file.
    /// Dropping the future ends the child.
    ///
    /// # Errors
    /// Any [`ProcessorError`]. [`ProcessorError::OtherFrames`] if the file decodes to another
    /// number of frames, or to frames of another size: the whole video must be processed instead.
    /// No frames follow an error.
    pub async fn next(&mut self) -> Result<Option<Bytes>, ProcessorError> {
        // Taken, so that an error or a dropped future ends the child.
        let Some(mut decoding) = self.decoding.take() else {
            let reason = "decoding has ended with an error".to_owned();
            return if self.is_complete {
                Ok(None)
            } else {
                Err(ProcessorError::Unavailable(reason))
            };
        };
        let frame = decoding.next().await?;
        if frame.is_some() {
            self.decoding = Some(decoding);
        } else {
            self.is_complete = true;
            let Decoding { lease, memory, .. } = decoding;
            // The child's next call may use the memory again.
            drop(memory);
            lease.give_back();
        }
        Ok(frame)
    }
}

impl Decoding {
    async fn next(&mut self) -> Result<Option<Bytes>, ProcessorError> {
        match self.lease.child.receive(&mut self.budget).await? {
            Reply::Frame { position, offset } => {
                self.ring.validate(position, offset)?;
                let frame = self.copy(offset).await?;
                self.ring.frames_read += 1;
                if self.ring.is_slot_needed() {
                    self.lease.child.send(&Call::Taken, None, &mut self.budget).await?;
                }
                Ok(Some(frame))
            }
            Reply::Decoded if self.ring.is_complete() => Ok(None),
            Reply::Different { reason } => Err(ProcessorError::OtherFrames(reason)),
            _ => Err(unexpected_reply("a video")),
        }
    }

    /// Copies a frame out of the memory, because the child can change the memory at any time.
    async fn copy(&self, offset: u64) -> Result<Bytes, ProcessorError> {
        let length = self.ring.frame_bytes as usize;
        let copied = if length <= MAX_INLINE_COPY_BYTES {
            self.memory.copy(offset, length)
        } else {
            let memory = self.memory.clone();
            let copied = tokio::task::spawn_blocking(move || memory.copy(offset, length)).await;
            copied.unwrap_or_else(|error| Err(io::Error::other(error)))
        };
        copied.map(Bytes::from).map_err(|error| {
            ProcessorError::InvalidReply(format!("a frame can't be read: {error}"))
        })
    }
}

/// A ring of slots for frames, right behind the file in the memory, and the positions of the wanted
/// frames.
#[derive(Debug)]
struct Ring {
    slots_offset: u64,
    frame_bytes: u64,
    slots: usize,
    positions: Vec<u64>,
    frames_read: usize,
}

impl Ring {
    /// Plans the slots behind a file of `length` bytes in a memory of `memory_bytes`.
    fn new(
        length: u64,
        samples: u64,
        positions: Vec<u64>,
        (width, height): (u32, u32),
        memory_bytes: u64,
    ) -> Result<Self, ProcessorError> {
        let is_ascending = positions.is_sorted_by(|one, next| one < next);
        if !is_ascending || positions.last().is_some_and(|&last| last >= samples) {
            let reason =
                format!("frame positions {positions:?} must ascend and be less than {samples}");
            return Err(ProcessorError::OtherFrames(reason));
        }
        let slots = positions.len().min(MAX_SLOTS);
        let pixels = u64::from(width) * u64::from(height);
        let frame_bytes = pixels.saturating_mul(PIXEL_BYTES);
        let end = frame_bytes.saturating_mul(slots as u64).saturating_add(length);
        if end > memory_bytes {
            return Err(ProcessorError::Refused(format!(
                "the video and its frames take more than {memory_bytes} bytes \
                 (--processor-item-bytes)"
            )));
        }
        Ok(Self { slots_offset: length, frame_bytes, slots, positions, frames_read: 0 })
    }

    /// Checks that a child's reply describes the next frame.
    fn validate(&self, position: u64, offset: u64) -> Result<(), ProcessorError> {
        let expected = self.positions.get(self.frames_read).map(|&expected| {
            let slot = (self.frames_read % self.slots) as u64;
            (expected, self.slots_offset + slot * self.frame_bytes)
        });
        if expected == Some((position, offset)) {
            return Ok(());
        }
        let reason = format!("a frame {position} at {offset} instead of {expected:?}");
        Err(ProcessorError::InvalidReply(reason))
    }

    /// Returns `true` if a later frame will use the slot that was just read.
    fn is_slot_needed(&self) -> bool {
        self.frames_read + self.slots <= self.positions.len()
    }

    /// Returns `true` if all wanted frames were read.
    fn is_complete(&self) -> bool {
        self.frames_read == self.positions.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ring(positions: &[u64], memory_bytes: u64) -> Result<Ring, ProcessorError> {
        Ring::new(100, 10, positions.to_vec(), (4, 2), memory_bytes)
    }

    #[test]
    fn frames_take_the_slots_in_turn() {
        let mut ring = ring(&[1, 2, 5, 7, 9], 172).unwrap();
        let mut needed = Vec::new();
        for (position, offset) in [(1, 100), (2, 124), (5, 148), (7, 100), (9, 124)] {
            assert!(!ring.is_complete());
            ring.validate(position, offset).unwrap();
            ring.frames_read += 1;
            needed.push(ring.is_slot_needed());
        }
        assert!(ring.is_complete());
        // Two of the five frames wait for a slot.
        assert_eq!(needed, [true, true, false, false, false]);
    }

    #[test]
    fn frame_at_another_place_is_invalid() {
        let mut ring = ring(&[1, 2, 5, 7], 1000).unwrap();
        ring.frames_read = 1;
        ring.validate(2, 124).unwrap();
        for (position, offset) in [(1, 124), (3, 124), (2, 100), (2, 125), (2, u64::MAX)] {
            let error = ring.validate(position, offset).unwrap_err();
            assert!(matches!(error, ProcessorError::InvalidReply(_)), "{position} {offset}");
        }
        ring.frames_read = 4;
        assert!(ring.validate(7, 100).is_err());
    }

    #[test]
    fn positions_must_be_ascending_samples() {
        for positions in [&[10][..], &[1, 1], &[2, 1], &[0, u64::MAX]] {
            let error = ring(positions, 1000).unwrap_err();
            assert!(matches!(error, ProcessorError::OtherFrames(_)), "{positions:?}");
        }
        let mut none = ring(&[], 1000).unwrap();
        assert!(none.is_complete());
        none.frames_read = 1;
        assert!(none.validate(0, 100).is_err());
    }

    #[test]
    fn frames_must_fit_into_the_memory() {
        ring(&[0, 1], 148).unwrap();
        assert!(matches!(ring(&[0, 1], 147), Err(ProcessorError::Refused(_))));
        let huge = Ring::new(100, 10, vec![0], (u32::MAX, u32::MAX), u64::MAX - 1);
        assert!(matches!(huge, Err(ProcessorError::Refused(_))));
    }
}
