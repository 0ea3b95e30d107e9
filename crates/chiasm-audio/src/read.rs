//! Reading a file of any format.

use crate::error::LengthError;
use crate::loader::Loader;
use crate::recording::Recording;
use crate::{aac, flac, mp3, wav};

impl Recording {
    /// Reads a recording's length. Decodes nothing.
    ///
    /// Time is at most proportional to the size of the file. Memory is bounded by the number of
    /// packets of an mp4, and is constant for other formats.
    ///
    /// # Errors
    ///
    /// Returns the reason if the length that `loader` decodes cannot be vouched for.
    pub fn read(file: &[u8], loader: &Loader) -> Result<Self, LengthError> {
        let recording = if wav::accepts(file) {
            wav::read(file, loader)?
        } else if flac::accepts(file) {
            flac::read(file, loader)?
        } else if aac::accepts(file) {
            aac::read(file, loader)?
        } else if mp3::accepts(file) {
            mp3::read(file, loader)?
        } else {
            return Err(LengthError::Container);
        };
        if recording.samples == 0 { Err(LengthError::Empty) } else { Ok(recording) }
    }
}
