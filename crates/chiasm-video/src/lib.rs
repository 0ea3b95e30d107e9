//! Reads what a video is, and cuts out wanted frames, without decoding anything.
//!
//! [`VideoIndex::read`] reads the index of an mp4, mov, Matroska or WebM file: the number of frames
//! and the rate exactly as vLLM 0.32 and 0.33 with OpenCV 5.0 count them, the size of the frames,
//! the safe starts and the samples that no other one needs. [`VideoIndex::cut`] returns a small mp4
//! with the wanted frames and what they depend on. OpenCV decodes from it, bit for bit, the frames
//! that it decodes from the whole file, in a fraction of the time.
//!
//! [`SoundTrack::read`] reads the packets of an mp4's sound, for recordings.
//!
//! Everything is bounded: time and memory are proportional to the number of samples, which is at
//! most [`MAX_SAMPLES`]. No bytes cause a panic. What an index cannot vouch for is an error with a
//! stable name ([`IndexError::cause`], [`CutError::cause`]); the whole file goes to vLLM's own
//! processor then.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use chiasm_video::VideoIndex;
//!
//! let file = std::fs::read("video.mp4")?;
//! let index = VideoIndex::read(&file)?;
//! let last = index.properties().visible_frames - 1;
//! let cut = index.cut(&file, &[0, last / 2, last])?;
//! for part in &cut.parts {
//!     let small_file = part.to_vec(&file);
//!     assert!(part.frames.iter().all(|frame| frame.position < part.samples));
//!     assert_eq!(small_file.len(), part.len());
//! }
//! # Ok(())
//! # }
//! ```
//!
//! There is no dependency on a demuxer crate: none of them applies edit lists, counts as OpenCV
//! does, or leaves the samples where they are.
//!
//! | module | contents |
//! |---|---|
//! | `index` | the index, from any file to its properties |
//! | `plan` | the samples that wanted frames depend on |
//! | `cut`, `write` | the small files |
//! | `count` | the frame count, with the errors of OpenCV's seeking |
//! | `mp4`, `matroska` | containers |
//! | `codec` | headers inside samples: H.264, HEVC, VP8, VP9 |
//! | `track` | a track as any container describes it |
//! | `error` | the reasons to use the whole file |
//! | `rational`, `bytes` | fractions and integers |

mod bytes;
mod codec;
mod count;
mod cut;
mod error;
mod index;
mod matroska;
mod mp4;
mod plan;
mod rational;
mod track;
mod write;

pub use cut::{Cut, CutFrame, CutPart, Piece};
pub use error::{CutError, IndexError, SoundError};
pub use index::{VideoIndex, VideoProperties};
pub use mp4::{SoundTrack, accepts as accepts_mp4};
pub use track::{Codec, Container, MAX_SAMPLES};
