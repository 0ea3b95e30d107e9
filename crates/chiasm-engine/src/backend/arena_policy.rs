//! The policy for engines' arenas of shared memory.

use std::time::Duration;

use chiasm_types::WorkerId;

use crate::{AttachError, EngineClient, Plugin};

/// The timeout for opening an arena. The engine answers between two steps.
const ATTACH_TIMEOUT: Duration = Duration::from_secs(30);

/// `/dev/shm` is too small for the arenas, which are required.
#[derive(Debug, thiserror::Error)]
#[error(
    "/dev/shm has {free:.2} GiB free, {engines} engines may use {each:.2} GiB each; \
     enlarge it (docker: --shm-size) or lower --mm-arena-gb"
)]
pub struct ShmTooSmall {
    /// The free space in GiB.
    pub free: f64,
    /// The number of engines.
    pub engines: usize,
    /// The size of each arena in GiB.
    pub each: f64,
}

/// The policy for an engine's arena, the shared memory that tensors are written into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArenaPolicy {
    /// No engine has an arena.
    Never,
    /// Each engine gets an arena. One that can't use it gets all tensors in messages.
    Preferred {
        /// The size of each arena.
        bytes: u64,
    },
    /// Each engine gets an arena. One that can't use it is not used.
    Required {
        /// The size of each arena.
        bytes: u64,
    },
}

impl ArenaPolicy {
    /// Returns the size of an arena; `None` if there are none.
    pub fn bytes(self) -> Option<u64> {
        match self {
            Self::Never => None,
            Self::Preferred { bytes } | Self::Required { bytes } => Some(bytes),
        }
    }

    /// Prepares `/dev/shm` before the first engine is started: removes the arenas of killed
    /// processes, and warns if those of `engines` engines may not fit.
    ///
    /// # Errors
    /// [`ShmTooSmall`], instead of the warning, if arenas are required.
    pub fn check(self, engines: usize) -> Result<(), ShmTooSmall> {
        let Some(bytes) = self.bytes() else { return Ok(()) };
        chiasm_transfer::sweep();
        let needed = bytes.saturating_mul(engines as u64);
        let free = chiasm_transfer::free_shm_bytes().unwrap_or(0);
        if needed <= free {
            return Ok(());
        }
        let too_small = ShmTooSmall { free: gib(free), engines, each: gib(bytes) };
        match self {
            Self::Required { .. } => Err(too_small),
            _ => {
                tracing::warn!(%too_small, "media items that do not fit are sent in messages");
                Ok(())
            }
        }
    }

    /// Attaches an arena to a new engine. Returns the answer of its plugin, or `None` for an engine
    /// without an arena.
    ///
    /// # Errors
    /// The engine can't open its arena, which is required.
    pub(super) async fn attach(
        self,
        id: WorkerId,
        client: &EngineClient,
    ) -> Result<Option<Plugin>, AttachError> {
        let Some(bytes) = self.bytes() else { return Ok(None) };
        match client.attach_arena(bytes, ATTACH_TIMEOUT).await {
            Ok(plugin) => {
                tracing::info!(
                    worker = %id,
                    mib = bytes >> 20,
                    plugin = plugin.version,
                    "takes media in shared memory"
                );
                Ok(Some(plugin))
            }
            Err(error) if matches!(self, Self::Required { .. }) => Err(error),
            Err(error) => {
                tracing::warn!(worker = %id, %error, "takes media in messages only");
                Ok(None)
            }
        }
    }
}

fn gib(bytes: u64) -> f64 {
    bytes as f64 / (1_u64 << 30) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn required_arenas_that_do_not_fit_are_refused() {
        let bytes = 1 << 60;
        let error = ArenaPolicy::Required { bytes }.check(2).unwrap_err().to_string();
        assert!(error.contains("--mm-arena-gb") && error.contains("2 engines"), "{error}");
        assert!(ArenaPolicy::Preferred { bytes }.check(2).is_ok());
        assert!(ArenaPolicy::Required { bytes: 4096 }.check(1).is_ok());
        assert!(ArenaPolicy::Never.check(1).is_ok());
    }
}
