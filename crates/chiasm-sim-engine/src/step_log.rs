//! The moments of steps, for measurements.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::time::SystemTime;

use crate::error::SimError;

/// A file that grows by eight bytes per step.
#[derive(Debug)]
pub(crate) struct StepLog(File);

impl StepLog {
    pub(crate) fn create(path: &Path) -> Result<Self, SimError> {
        let file = File::create(path).map_err(|source| SimError::StepLog { path: path.to_owned(), source })?;
        Ok(Self(file))
    }

    /// Outputs are ready to be sent now.
    pub(crate) fn write(&mut self) {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64);
        // Whoever reads it will miss a step.
        if let Err(error) = self.0.write_all(&now.to_le_bytes()) {
            tracing::warn!(%error, "a step is missing in the log");
        }
    }
}
