//! Which `vllm` is meant.

use std::path::{Path, PathBuf};

/// The program that `--vllm` names. A bare name is first looked for beside this program, where pip
/// puts both of one environment, so that the two fit together without a PATH that says so; else it
/// stays bare and is looked for in the PATH.
pub(crate) fn locate(given: &Path) -> PathBuf {
    std::env::current_exe().map_or_else(|_| given.to_owned(), |own| beside(&own, given))
}

fn beside(own: &Path, given: &Path) -> PathBuf {
    let sibling = own.with_file_name(given);
    if given.components().count() == 1 && sibling.is_file() { sibling } else { given.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bare_name_is_first_looked_for_beside_this_program() {
        let bin = tempfile::tempdir().unwrap();
        let own = bin.path().join("chiasm");
        assert_eq!(beside(&own, Path::new("vllm")), Path::new("vllm"));
        std::fs::write(bin.path().join("vllm"), "").unwrap();
        assert_eq!(beside(&own, Path::new("vllm")), bin.path().join("vllm"));
        assert_eq!(beside(&own, Path::new("./vllm")), Path::new("./vllm"));
        assert_eq!(beside(&own, Path::new("/opt/vllm")), Path::new("/opt/vllm"));
    }
}
