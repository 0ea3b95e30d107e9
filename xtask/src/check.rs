//! The short form of `test`, for the time of writing: format, lints, and the unit tests of crates that have changed.

use std::collections::BTreeSet;
use std::time::Instant;

use crate::child;
use crate::error::Error;
use crate::test_run::cargo;
use crate::vllm_env::Setup;

/// Checks the working tree against the commit at which it left `main`.
pub(crate) fn run(setup: &Setup) -> Result<(), Error> {
    let run = |arguments: &[&str]| {
        let start = Instant::now();
        let line = arguments.join(" ");
        println!("==> cargo {line}");
        child::run(cargo(&setup.workspace).args(arguments), &format!("`cargo {line}`"), &setup.output, &setup.cancel)?;
        println!("    {:.1} s", start.elapsed().as_secs_f64());
        Ok::<_, Error>(())
    };
    run(&["fmt", "--all", "--check"])?;
    run(&["clippy", "--workspace", "--all-targets", "--", "-Dwarnings"])?;
    let changed = changed_files(setup)?;
    let crates = crates(changed.lines());
    if crates.is_empty() {
        println!("no crate has changed since main");
        return Ok(());
    }
    // One after the other: dependencies of a crate are built with its own features, as `cargo test -p` has them.
    for name in crates {
        let has_library = setup.workspace.root.join("crates").join(name).is_dir();
        run(&["test", "--package", name, if has_library { "--lib" } else { "--bins" }])?;
    }
    Ok(())
}

/// Returns the paths of changed and new files, one in a line.
fn changed_files(setup: &Setup) -> Result<String, Error> {
    let git = |arguments: &[&str]| {
        let mut git = std::process::Command::new("git");
        git.args(arguments).current_dir(&setup.workspace.root);
        child::read(&mut git, "git")
    };
    let base = git(&["merge-base", "HEAD", "main"]).or_else(|_| git(&["merge-base", "HEAD", "origin/main"]))?;
    let changed = git(&["diff", "--name-only", base.trim()])?;
    let new = git(&["ls-files", "--others", "--exclude-standard"])?;
    Ok([changed, new].join("\n"))
}

/// Returns the packages of these files.
fn crates<'a>(paths: impl Iterator<Item = &'a str>) -> BTreeSet<&'a str> {
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
    fn files_belong_to_the_crate_of_their_folder() {
        let paths = ["crates/chiasm-kv/src/lib.rs", "README.md", "crates/chiasm-kv/Cargo.toml", "xtask/src/main.rs"];
        assert_eq!(crates(paths.into_iter()), BTreeSet::from(["chiasm-kv", "xtask"]));
        assert!(crates(["docs/a.md", "crates"].into_iter()).is_empty());
    }
}
