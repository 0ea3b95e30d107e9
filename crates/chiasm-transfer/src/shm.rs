//! Where shared memory lives.

use std::io;

/// The folder of POSIX shared memory on Linux, a file system in memory.
pub const SHM_DIR: &str = "/dev/shm";

/// Bytes that can still be reserved in [`SHM_DIR`].
///
/// # Errors
/// The system's, if there is no such folder.
pub fn free_shm_bytes() -> io::Result<u64> {
    let stat = rustix::fs::statvfs(SHM_DIR)?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}
