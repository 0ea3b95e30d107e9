//! A quick check while editing: format, lints, and the unit tests of the crates that differ from
//! `main`.

use std::collections::BTreeSet;
use std::time::Instant;

use crate::cargo::cargo;
use crate::child;
use crate::error::Error;
use crate::setup::Setup;

/// Checks the working tree. Changed files are those since the merge base with `main`.
pub(crate) fn run(setup: &Setup) -> Result<(), Error> {
    let run = |arguments: &[&str]| {
        let start = Instant::now();
        let line = arguments.join(" ");
        println!("==> cargo {line}");
        child::run(
            cargo(&setup.workspace).args(arguments),
            &format!("`cargo {line}`"),
            &setup.output,
            &setup.cancel,
        )?;
        println!("    {:.1} s", start.elapsed().as_secs_f64());
        Ok::<_, Error>(())
    };
    run(&["fmt", "--all", "--check"])?;
    run(&["clippy", "--workspace", "--all-targets", "--", "-Dwarnings"])?;
    let changed = changed_files(setup)?;
    let is_crate =
        |name: &&str| setup.workspace.root.join("crates").join(name).join("Cargo.toml").is_file();
    // One cargo call per crate, with the same features as `cargo test --package`.
    for name in changed_crates(changed.lines()) {
        if is_crate(&name) {
            run(&["test", "--package", name, "--lib"])?;
        } else if name == "xtask" {
            run(&["test", "--package", name, "--bins"])?;
        }
    }
    Ok(())
}

/// Returns the paths of changed and new files, one per line.
fn changed_files(setup: &Setup) -> Result<String, Error> {
    let git = |arguments: &[&str]| {
        let mut git = std::process::Command::new("git");
        git.args(arguments).current_dir(&setup.workspace.root);
        child::read(&mut git, "git")
    };
    let base = git(&["merge-base", "HEAD", "main"])
        .or_else(|_| git(&["merge-base", "HEAD", "origin/main"]))?;
    let changed = git(&["diff", "--name-only", base.trim()])?;
    let new = git(&["ls-files", "--others", "--exclude-standard"])?;
    Ok([changed, new].join("\n"))
}

/// Returns the names of the packages that contain these files.
fn changed_crates<'a>(paths: impl Iterator<Item = &'a str>) -> BTreeSet<&'a str> {
    let package = |path: &'a str| match path.split_once('/')? {
        ("crates", rest) => rest.split_once('/').map(|(name, _)| name),
        ("xtask", _) => Some("xtask"),
        _ => None,
    };
    paths.filter_map(package).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_map_to_crate_of_their_folder() {
        let paths = [
            "crates/chiasm-kv/src/lib.rs",
            "README.md",
            "crates/chiasm-kv/Cargo.toml",
            "xtask/src/main.rs",
        ];
        assert_eq!(changed_crates(paths.into_iter()), BTreeSet::from(["chiasm-kv", "xtask"]));
        assert!(changed_crates(["docs/a.md", "crates"].into_iter()).is_empty());
    }
}
