//! Finds the Python of a version of vLLM, in an environment for tests or for inspection.

use std::fs;
use std::path::{Path, PathBuf};

use crate::keyed_dir;
use crate::vllm_env::VllmEnv;
use crate::vllm_overlay::INSPECTION_PREFIX;
use crate::workspace::Workspace;

/// Returns the cache folder for files that belong neither to an environment nor to the repository.
pub(super) fn work_folder(workspace: &Workspace) -> PathBuf {
    workspace.cache.join("drift")
}

/// Returns the folder of packages in an environment that contains `vllm/`.
pub(super) fn packages(env: &VllmEnv) -> Option<PathBuf> {
    packages_in(env.path())
}

fn packages_in(environment: &Path) -> Option<PathBuf> {
    let libraries = fs::read_dir(environment.join("lib")).into_iter().flatten().flatten();
    let mut folders: Vec<PathBuf> =
        libraries.map(|entry| entry.path().join("site-packages")).collect();
    folders.push(environment.join("site"));
    folders.into_iter().find(|folder| folder.join("vllm").is_dir())
}

/// Returns the packages of a version if a complete environment with it is in the cache.
pub(super) fn cached_packages(workspace: &Workspace, version: &str) -> Option<PathBuf> {
    let prefixes = ["vllm-", INSPECTION_PREFIX].map(|prefix| format!("{prefix}{version}-"));
    let mut environments: Vec<PathBuf> = fs::read_dir(&workspace.cache)
        .ok()?
        .flatten()
        .filter(|entry| {
            prefixes.iter().any(|prefix| entry.file_name().to_string_lossy().starts_with(prefix))
        })
        .map(|entry| entry.path())
        .collect();
    environments.sort();
    environments
        .iter()
        .rev()
        .filter(|path| keyed_dir::is_complete(path))
        .find_map(|path| packages_in(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packages_are_found_in_complete_environments() {
        let dir = tempfile::tempdir().unwrap();
        let workspace = Workspace { root: PathBuf::from("/nowhere"), cache: dir.path().to_owned() };
        for (environment, packages) in [
            ("vllm-0.32.0-aa", "lib/python3.11/site-packages/vllm"),
            ("vllm-0.33.0-bb", "site/vllm"),
            ("drift-0.34.0-cc", "site/vllm"),
            ("vllm-0.35.0-dd", "site"),
        ] {
            fs::create_dir_all(dir.path().join(environment).join(packages)).unwrap();
            fs::write(dir.path().join(environment).join(".complete"), "").unwrap();
        }
        // An environment that is not complete.
        fs::create_dir_all(dir.path().join("vllm-0.33.0-ee/site/vllm")).unwrap();
        let found = |version| cached_packages(&workspace, version);
        assert_eq!(
            found("0.32.0"),
            Some(dir.path().join("vllm-0.32.0-aa/lib/python3.11/site-packages"))
        );
        assert_eq!(found("0.33.0"), Some(dir.path().join("vllm-0.33.0-bb/site")));
        assert_eq!(found("0.34.0"), Some(dir.path().join("drift-0.34.0-cc/site")));
        assert_eq!((found("0.35.0"), found("0.3")), (None, None));
    }
}
