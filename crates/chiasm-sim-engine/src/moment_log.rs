//! Logs of times, for measurements.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::time::SystemTime;

use crate::error::SimError;

/// A file with eight bytes per logged time.
#[derive(Debug)]
pub(crate) struct MomentLog(File);

impl MomentLog {
    pub(crate) fn create(path: &Path) -> Result<Self, SimError> {
        let file = File::create(path)
            .map_err(|source| SimError::MomentLog { path: path.to_owned(), source })?;
        Ok(Self(file))
    }

    /// Appends a time.
    pub(crate) fn write(&self, moment: SystemTime) {
        let since = moment
            .duration_since(SystemTime::UNIX_EPOCH)
            .map_or(0, |since| since.as_nanos() as u64);
        // The reader of the file will miss this time.
        if let Err(error) = (&self.0).write_all(&since.to_le_bytes()) {
            tracing::warn!(%error, "a time is missing in the log");
        }
    }
}
