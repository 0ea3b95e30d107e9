//! The threads that do the work.

use std::fmt;

/// The threads that [`crate::VisionModel::process_with`] uses. The bits do not depend on them.
///
/// Rows of patches and rows of tiles are shared out; an image that becomes a single tile is written
/// by one thread.
#[derive(Clone, Copy, Default)]
pub enum Parallelism<'a> {
    /// The caller's thread alone.
    #[default]
    Single,
    /// The threads of a pool that the host owns. The caller waits.
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
