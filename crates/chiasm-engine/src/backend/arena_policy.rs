//! Shared memory for engines: who gets how much, and what happens to engines that can't use it.

use std::time::Duration;

use chiasm_types::WorkerId;

use crate::{AttachError, EngineClient, Plugin};

/// How long an engine may take to open its arena. It answers between two steps.
const ATTACH_TIMEOUT: Duration = Duration::from_secs(30);

/// Arenas are demanded and could outgrow `/dev/shm`.
#[derive(Debug, thiserror::Error)]
#[error(
    "/dev/shm has {free:.2} GiB free, {engines} engines may use {each:.2} GiB each; enlarge it (docker: --shm-size) or lower \
     --mm-arena-gb"
)]
pub struct ShmTooSmall {
    /// GiB that are free.
    pub free: f64,
    /// Number of engines.
    pub engines: usize,
    /// GiB for each.
    pub each: f64,
}

/// Whether an engine gets an arena, shared memory that tensors are written into.
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

    /// Looks at `/dev/shm` before the first engine is started: removes what killed processes have
    /// left there, and warns if the arenas of so many engines can outgrow it.
    ///
    /// # Errors
    /// [`ShmTooSmall`] instead of the warning where arenas are required.
    pub fn check(self, engines: usize) -> Result<(), ShmTooSmall> {
        let Some(bytes) = self.bytes() else { return Ok(()) };
        chiasm_transfer::sweep();
        let wanted = bytes.saturating_mul(engines as u64);
        let free = chiasm_transfer::free_shm_bytes().unwrap_or(0);
        if wanted <= free {
            return Ok(());
        }
        let too_small = ShmTooSmall { free: gib(free), engines, each: gib(bytes) };
        match self {
            Self::Required { .. } => Err(too_small),
            _ => {
                tracing::warn!(%too_small, "media items that find no room travel in messages");
                Ok(())
            }
        }
    }

    /// Gives a new engine its arena; what its plugin says, if it has taken it. `Err` says why the
    /// engine can't be used.
    pub(super) async fn attach(
        self,
        id: WorkerId,
        client: &EngineClient,
    ) -> Result<Option<Plugin>, AttachError> {
        let Some(bytes) = self.bytes() else { return Ok(None) };
        match client.attach_arena(bytes, ATTACH_TIMEOUT).await {
            Ok(plugin) => {
                tracing::info!(worker = %id, mib = bytes >> 20, plugin = plugin.version, "takes media in shared memory");
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
    fn arenas_that_can_not_fit_are_told_before_the_start() {
        let bytes = 1 << 60;
        let error = ArenaPolicy::Required { bytes }.check(2).unwrap_err().to_string();
        assert!(error.contains("--mm-arena-gb") && error.contains("2 engines"), "{error}");
        assert!(ArenaPolicy::Preferred { bytes }.check(2).is_ok());
        assert!(ArenaPolicy::Required { bytes: 4096 }.check(1).is_ok());
        assert!(ArenaPolicy::Never.check(1).is_ok());
    }
}
