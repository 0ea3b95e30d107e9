//! Finds the repository and the user's cache.

use std::env;
use std::path::{Path, PathBuf};

use crate::error::Error;

/// The version of all packages in this workspace.
pub(crate) const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The two directories that every command works in.
#[derive(Clone, Debug)]
pub(crate) struct Workspace {
    /// The repository's root.
    pub(crate) root: PathBuf,
    /// The directory `chiasm` in the user's cache directory; may not exist yet.
    pub(crate) cache: PathBuf,
}

impl Workspace {
    /// Finds the repository that `cargo xtask` was called in, and this user's cache.
    pub(crate) fn find() -> Result<Self, Error> {
        // cargo sets the variable at run time too. The compiled-in value would be stale in a
        // checkout that was moved.
        let manifest = env::var_os("CARGO_MANIFEST_DIR")
            .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
        let root = manifest.parent().unwrap_or(&manifest).to_path_buf();
        let cache = cache_dir(
            env::var_os("XDG_CACHE_HOME").map(PathBuf::from),
            env::var_os("HOME").map(PathBuf::from),
        )?;
        Ok(Self { root, cache })
    }

    /// Returns the full path of a file of the repository.
    ///
    /// # Errors
    /// `MissingFile` if the file does not exist.
    pub(crate) fn file(&self, path: &str) -> Result<PathBuf, Error> {
        let path = self.root.join(path);
        if path.is_file() { Ok(path) } else { Err(Error::MissingFile { path }) }
    }
}

/// Returns the cache directory by the XDG rule, which ignores a relative XDG_CACHE_HOME.
fn cache_dir(xdg: Option<PathBuf>, home: Option<PathBuf>) -> Result<PathBuf, Error> {
    let absolute = |path: &PathBuf| Path::is_absolute(path);
    xdg.filter(absolute)
        .or_else(|| home.filter(absolute).map(|home| home.join(".cache")))
        .map(|cache| cache.join("chiasm"))
        .ok_or(Error::NoCacheDir)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cache(xdg: Option<&str>, home: Option<&str>) -> Option<PathBuf> {
        cache_dir(xdg.map(PathBuf::from), home.map(PathBuf::from)).ok()
    }

    #[test]
    fn cache_follows_xdg_rule() {
        assert_eq!(cache(Some("/x"), Some("/h")), Some("/x/chiasm".into()));
        assert_eq!(cache(None, Some("/h")), Some("/h/.cache/chiasm".into()));
        assert_eq!(cache(Some("rel"), Some("/h")), Some("/h/.cache/chiasm".into()));
        assert_eq!(cache(Some(""), Some("/h")), Some("/h/.cache/chiasm".into()));
        assert_eq!(cache(None, None), None);
    }
}
