//! The folder of POSIX shared memory.

use std::io;

/// The folder of POSIX shared memory on Linux, a file system in memory.
pub const SHM_DIR: &str = "/dev/shm";

/// Returns the number of bytes that can still be reserved in [`SHM_DIR`].
///
/// # Errors
/// The system's error if there is no such folder.
pub fn free_shm_bytes() -> io::Result<u64> {
    let stat = rustix::fs::statvfs(SHM_DIR)?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}
