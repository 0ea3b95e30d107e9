//! Shared memory for engines: who gets how much, and what happens to engines that can't use it.

use std::time::Duration;

use chiasm_engine::{AttachError, EngineClient};
use chiasm_types::WorkerId;

use super::FleetError;

/// How long an engine may take to open its arena. It answers between two steps.
const ATTACH_TIMEOUT: Duration = Duration::from_secs(30);

/// Whether engines get arenas, shared memory that tensors are written into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArenaPolicy {
    /// No.
    Never,
    /// Yes, with room for so many bytes; an engine that can't use one gets everything in messages.
    Preferred {
        /// Size of each.
        bytes: u64,
    },
    /// Yes, with room for so many bytes; an engine that can't use one is not used.
    Required {
        /// Size of each.
        bytes: u64,
    },
}

impl ArenaPolicy {
    /// The size, if there are to be arenas.
    pub fn bytes(self) -> Option<u64> {
        match self {
            Self::Never => None,
            Self::Preferred { bytes } | Self::Required { bytes } => Some(bytes),
        }
    }

    /// Looks at `/dev/shm` before the first engine is started: removes what killed processes have left there, and says so
    /// if the arenas of so many engines can outgrow it.
    pub(super) fn check(self, engines: usize) -> Result<(), FleetError> {
        let Some(bytes) = self.bytes() else { return Ok(()) };
        chiasm_transfer::sweep();
        let wanted = bytes.saturating_mul(engines as u64);
        let free = chiasm_transfer::free_shm_bytes().unwrap_or(0);
        if wanted <= free {
            return Ok(());
        }
        let too_small = FleetError::ShmTooSmall { free: gib(free), engines, each: gib(bytes) };
        match self {
            Self::Required { .. } => Err(too_small),
            _ => {
                tracing::warn!("{too_small}; images that find no room travel in messages");
                Ok(())
            }
        }
    }

    /// Gives a new engine its arena. `Err` says why the engine can't be used.
    pub(super) async fn attach(self, id: WorkerId, client: &EngineClient) -> Result<(), AttachError> {
        let Some(bytes) = self.bytes() else { return Ok(()) };
        match client.attach_arena(bytes, ATTACH_TIMEOUT).await {
            Ok(plugin) => {
                tracing::info!("{id}: takes images in shared memory, up to {} MiB, by plugin {plugin}", bytes >> 20);
            }
            Err(error) if matches!(self, Self::Required { .. }) => return Err(error),
            Err(error) => tracing::warn!("{id}: takes images in messages only: {error}"),
        }
        Ok(())
    }
}

fn gib(bytes: u64) -> f64 {
    bytes as f64 / (1_u64 << 30) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arenas_that_can_not_fit_are_told_before_the_start() {
        let bytes = 1 << 60;
        let error = ArenaPolicy::Required { bytes }.check(2).unwrap_err().to_string();
        assert!(error.contains("--mm-arena-gb") && error.contains("2 engines"), "{error}");
        assert!(ArenaPolicy::Preferred { bytes }.check(2).is_ok());
        assert!(ArenaPolicy::Required { bytes: 4096 }.check(1).is_ok());
        assert!(ArenaPolicy::Never.check(1).is_ok());
    }
}
