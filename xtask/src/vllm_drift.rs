//! Detects changes in a version of vLLM that affect Chiasm: `cargo xtask vllm-drift VERSION`.
//!
//! It reads facts from that version's Python and compares them with a manifest in the repository.
//! Then it exchanges messages with that version's types in both directions. Each difference is a
//! failure until a developer has reviewed it and written the version's manifest.
//!
//! | part | contents |
//! |---|---|
//! | `python/vllm_drift/relied_on.py` | the table of the facts that Chiasm relies on, and of our files that do |
//! | `facts` | the facts of a version |
//! | `manifest` | facts as a text file, and the changes between two manifests |
//! | `sources` | the location of a version's Python |
//! | `exchange` | messages to and from a version's types |

mod exchange;
mod facts;
mod manifest;
mod sources;

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::child;
use crate::error::Error;
use crate::setup::Setup;
use crate::vllm_env::VllmEnv;
use crate::vllm_overlay::VERSIONS;
use crate::{vllm_env, vllm_overlay};
use exchange::Exchange;
use facts::Group;
use manifest::{Change, Manifest};

/// The folder of the scripts.
const FOLDER: &str = "python/vllm_drift";
/// The maximum number of diffs of changed functions to print. The names of all are printed.
const MAX_DIFFS: usize = 40;

/// Checks a version and returns `true` if it passed. With `write`, writes its facts as the manifest
/// of its minor version instead of comparing them.
pub(crate) fn run(setup: &Setup, version: &str, write: bool) -> Result<bool, Error> {
    let base = vllm_env::ensure(setup)?;
    test_scripts(setup, &base)?;
    let env = if VERSIONS.contains(&version) {
        vllm_overlay::ensure_version(setup, &base, version)?
    } else {
        vllm_overlay::ensure_for_inspection(setup, &base, version)?
    };
    let packages = sources::packages(&env)
        .ok_or_else(|| Error::MissingFile { path: env.path().join("site/vllm") })?;
    let requirements = facts::requirements(setup, &base, version)?;
    let groups = facts::read(setup, &base, &packages, &requirements)?;
    let found = Manifest::from_groups(version, &groups);
    let number = found.facts().count();

    let is_same = if write {
        let path = manifest::folder(&setup.workspace).join(manifest::file_name(version));
        fs::write(&path, found.to_string()).map_err(Error::io("write", &path))?;
        setup.output.print_line(&format!("wrote {number} facts to {}", path.display()))?;
        true
    } else {
        let known = Manifest::nearest(&setup.workspace, version)?;
        let changes = manifest::changes(&known, &found);
        let report = report(&groups, &changes);
        setup.output.print_line(&format!(
            "vLLM {version}: {number} facts, compared with those of {}{report}",
            known.version
        ))?;
        if changes.is_empty() {
            setup.output.print_line("nothing that Chiasm relies on has changed")?;
        } else {
            show_code(setup, &base, &known.version, &packages, &changes)?;
        }
        changes.is_empty()
    };

    let exchanged = exchange::run(setup, &env, version)?;
    setup.output.print_line(&exchanged.to_string())?;
    let passed = is_same && !matches!(exchanged, Exchange::Wrong(_));
    if !passed {
        setup.output.print_line(&format!(
            "\nvLLM {version} differs: review each line, \
             then run `cargo xtask vllm-drift {version} --write`"
        ))?;
    }
    Ok(passed)
}

/// Runs the tests of the scripts. A digest that misses changes would report no differences here.
fn test_scripts(setup: &Setup, base: &VllmEnv) -> Result<(), Error> {
    let mut python = script(setup, base);
    python.args(["-m", "unittest", "discover", "--quiet", "-s", FOLDER]);
    child::run(&mut python, "the tests of python/vllm_drift", &setup.output, &setup.cancel)
}

/// Returns a Python command in the repository's root. `-B` avoids `__pycache__` beside the scripts.
fn script(setup: &Setup, env: &VllmEnv) -> Command {
    let mut python = env.python_command();
    python.arg("-B").current_dir(&setup.workspace.root).stdin(Stdio::null());
    python
}

/// Returns the changes by group, with our files that they affect.
fn report(groups: &[Group], changes: &[Change]) -> String {
    let mut lines = Vec::new();
    let mut names: Vec<&str> = groups.iter().map(|group| group.name.as_str()).collect();
    names.extend(
        changes
            .iter()
            .map(|change| change.group.as_str())
            .filter(|name| !groups.iter().any(|g| g.name == *name)),
    );
    names.dedup();
    for name in names {
        let changes_of_group: Vec<_> =
            changes.iter().filter(|change| change.group == name).collect();
        if changes_of_group.is_empty() {
            continue;
        }
        let group = groups.iter().find(|group| group.name == name);
        let what = group.map_or("not in the table any more", |group| &group.what);
        lines.push(format!("\n{name}: {what}"));
        lines.extend(changes_of_group.iter().map(ToString::to_string));
        if let Some(group) = group {
            lines.push(format!("  matters in: {}", group.ours.join(", ")));
        }
    }
    lines.iter().map(|line| format!("{line}\n")).collect()
}

/// Prints the diffs of the changed functions if the Python of the version `known` is in the cache.
fn show_code(
    setup: &Setup,
    base: &VllmEnv,
    known: &str,
    packages: &Path,
    changes: &[Change],
) -> Result<(), Error> {
    let mut names: Vec<&str> = changes
        .iter()
        .filter(|change| change.is_code())
        .map(|change| change.fact.as_str())
        .collect();
    names.sort_unstable();
    names.dedup();
    if names.is_empty() {
        return Ok(());
    }
    let Some(old) = sources::cached_packages(&setup.workspace, known) else {
        let get = if VERSIONS.contains(&known) {
            format!("vllm-env --vllm {known}")
        } else {
            format!("vllm-drift {known}")
        };
        return setup.output.print_line(&format!(
            "\nto see the code of these functions, get vLLM {known} first: cargo xtask {get}"
        ));
    };
    let mut python = script(setup, base);
    python
        .arg(format!("{FOLDER}/differences.py"))
        .arg(old)
        .arg(packages)
        .args(names.iter().take(MAX_DIFFS));
    setup.output.print_line(&format!("\n{}", child::read(&mut python, "differences.py")?))?;
    if names.len() > MAX_DIFFS {
        let more = names.len() - MAX_DIFFS;
        setup
            .output
            .print_line(&format!("… and {more} functions more: python3 {FOLDER}/differences.py"))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn change(group: &str, fact: &str, old: Option<&str>, new: Option<&str>) -> Change {
        Change {
            group: group.into(),
            fact: fact.into(),
            old: old.map(Into::into),
            new: new.map(Into::into),
        }
    }

    #[test]
    fn report_lists_changes_by_group_with_our_files() {
        let group = |name: &str| Group {
            name: name.into(),
            what: format!("about {name}"),
            ours: vec!["a.rs".into(), "b.rs".into()],
            facts: Vec::new(),
        };
        let groups = [group("wire"), group("start")];
        let changes = [
            change("wire", "x.py:S.f", Some("int"), Some("str")),
            change("wire", "x.py:g", None, Some("new")),
            change("old", "h", Some("1"), None),
        ];
        let text = report(&groups, &changes);
        let wire = "\nwire: about wire\n  changed x.py:S.f\n      from int\n      to   str\n\
            \x20 new     x.py:g = new\n  matters in: a.rs, b.rs\n";
        assert!(text.starts_with(wire), "{text}");
        assert!(text.ends_with("\nold: not in the table any more\n  gone    h, was 1\n"), "{text}");
        assert!(!text.contains("start"), "{text}");
        assert_eq!(report(&groups, &[]), "");
    }

    #[test]
    fn our_files_in_tables_exist() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let mut files = 0;
        for table in ["relied_on.py", "relied_on_frontend.py", "relied_on_images.py"] {
            let text = fs::read_to_string(root.join(FOLDER).join(table)).unwrap();
            let families = "crates/chiasm-vision/src/families";
            for word in text.replace("{FAMILIES}", families).split('"') {
                if ["crates/", "python/", "docs/", "xtask/"]
                    .iter()
                    .any(|start| word.starts_with(start))
                    && !word.contains('{')
                {
                    assert!(root.join(word).exists(), "{table}: {word}");
                    files += 1;
                } else if word.ends_with(".rs") {
                    assert!(root.join(families).join(word).exists(), "{table}: {word}");
                    files += 1;
                }
            }
        }
        assert!(files > 50, "{files}");
    }
}
