//! The threads that process an image.

use std::fmt;

/// The threads that [`crate::VisionModel::process_with`] uses. The output bits do not depend on
/// them.
///
/// The unit of work is a row of patches or a row of tiles, so an image that becomes a single tile
/// is written by one thread.
#[derive(Clone, Copy, Default)]
pub enum Parallelism<'a> {
    /// Only the caller's thread.
    #[default]
    Single,
    /// The threads of the caller's pool. The calling thread blocks until they are done.
    Pool(&'a rayon::ThreadPool),
}

impl fmt::Debug for Parallelism<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Single => f.write_str("Single"),
            Self::Pool(pool) => write!(f, "Pool({} threads)", pool.current_num_threads()),
        }
    }
}
