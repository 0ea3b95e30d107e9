//! The path of the `vllm` program.

use std::path::{Path, PathBuf};

/// Resolves the program that `--vllm` names.
///
/// A bare name is first looked up beside this program: pip installs both into one environment,
/// which need not be in the PATH. Otherwise the name stays bare and is looked up in the PATH.
pub(crate) fn locate(given: &Path) -> PathBuf {
    std::env::current_exe().map_or_else(|_| given.to_owned(), |own| sibling_or_given(&own, given))
}

fn sibling_or_given(own: &Path, given: &Path) -> PathBuf {
    let sibling = own.with_file_name(given);
    if given.components().count() == 1 && sibling.is_file() { sibling } else { given.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bare_name_resolves_beside_this_program_first() {
        let bin = tempfile::tempdir().unwrap();
        let own = bin.path().join("chiasm");
        assert_eq!(sibling_or_given(&own, Path::new("vllm")), Path::new("vllm"));
        std::fs::write(bin.path().join("vllm"), "").unwrap();
        assert_eq!(sibling_or_given(&own, Path::new("vllm")), bin.path().join("vllm"));
        assert_eq!(sibling_or_given(&own, Path::new("./vllm")), Path::new("./vllm"));
        assert_eq!(sibling_or_given(&own, Path::new("/opt/vllm")), Path::new("/opt/vllm"));
    }
}
