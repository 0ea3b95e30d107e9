//! Directories in the user's cache whose contents depend on their inputs.

use std::path::{Path, PathBuf};

use crate::error::Error;
use crate::keyed_dir::{DirLock, KeyedDir};
use crate::setup::Setup;

/// Returns a directory in the cache whose contents depend on `inputs`. Calls `make` unless the
/// directory is complete and `still_works` accepts it.
pub(crate) fn cached(
    setup: &Setup,
    name: &str,
    inputs: &[Vec<u8>],
    still_works: impl FnOnce(&Path) -> bool,
    make: impl FnOnce(&Path, &DirLock) -> Result<(), Error>,
) -> Result<PathBuf, Error> {
    let inputs: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
    let dir = KeyedDir::new(&setup.workspace.cache, name, &inputs);
    dir.ensure(&setup.output, &setup.cancel, still_works, make)?;
    Ok(dir.path().to_owned())
}
