//! Reads how long a recording is, and how many tokens it takes, without decoding it.
//!
//! [`Recording::read`] reads the sample rate and the number of samples of a WAV, FLAC or MP3 file,
//! or of AAC in mp4, exactly as vLLM's loader decodes them. [`AudioModel::size`] computes from them
//! the tokens and the size of the tensors, as vLLM's processor makes them.
//!
//! Everything is bounded: time is at most proportional to the size of the file. No bytes cause a
//! panic. A length that cannot be vouched for is an error with a stable name
//! ([`LengthError::cause`]); vLLM's own processor decodes the recording then, before its request is
//! routed.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use chiasm_audio::{Loader, Recording};
//!
//! let loader = Loader::Sndfile { sndfile: "1.2.2".to_owned(), avformat: Some(62) };
//! let recording = Recording::read(&std::fs::read("speech.wav")?, &loader)?;
//! println!("{} samples at {} Hz", recording.samples, recording.rate);
//! # Ok(())
//! # }
//! ```
//!
//! There is no dependency on a demuxer crate: what counts is not the length of the sound but what
//! libsndfile, mpg123 and FFmpeg make of the file, down to mpg123's estimate for an MP3 file
//! without a tag.
//!
//! | module | contents |
//! |---|---|
//! | `recording`, `read` | [`Recording`]: from any file to its length |
//! | `loader` | [`Loader`]: the libraries whose lengths are reproduced |
//! | `wav`, `flac`, `mp3`, `aac` | formats |
//! | `resample` | the length after resampling |
//! | `model` | [`AudioModel`]: tokens and tensors of the families |
//! | `error` | the reasons to decode first |
//! | `bytes` | integers |

mod aac;
mod bytes;
mod error;
mod flac;
mod loader;
mod model;
mod mp3;
mod read;
mod recording;
mod resample;
mod wav;

pub use error::LengthError;
pub use loader::Loader;
pub use model::{AudioFamily, AudioModel, AudioSize, Extractor};
pub use recording::{Format, Recording};
