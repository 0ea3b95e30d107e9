//! What a version of vLLM changes of what Chiasm relies on: `cargo xtask vllm-drift VERSION`.
//!
//! Facts are read out of that version's Python and compared with a manifest in the repository; then
//! messages are exchanged with its own types, in both directions. Any difference is a failure,
//! until a person has looked and written the version's own manifest.
//!
//! | part | is |
//! |---|---|
//! | `python/vllm_drift/relied_on.py` | the table of what is relied on, and in which of our files |
//! | `facts` | that table filled in for a version |
//! | `manifest` | the facts as a text file, and what is different between two of them |
//! | `sources` | where a version's Python is |
//! | `exchange` | messages to and from its types |

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

/// Where the scripts are.
const FOLDER: &str = "python/vllm_drift";
/// Diffs of changed functions that are shown; the names of all are.
const MOST_DIFFS: usize = 40;

/// Checks a version; `write` makes its facts the manifest of its minor version instead of comparing
/// them. Whether it passed.
pub(crate) fn run(setup: &Setup, version: &str, write: bool) -> Result<bool, Error> {
    let base = vllm_env::ensure(setup)?;
    test_the_scripts(setup, &base)?;
    let env = match VERSIONS.contains(&version) {
        true => vllm_overlay::ensure_version(setup, &base, version)?,
        false => vllm_overlay::ensure_for_a_look(setup, &base, version)?,
    };
    let packages = sources::packages(&env)
        .ok_or_else(|| Error::MissingFile { path: env.path().join("site/vllm") })?;
    let requirements = facts::requirements(setup, &base, version)?;
    let groups = facts::read(setup, &base, &packages, &requirements)?;
    let found = Manifest::of(version, &groups);
    let number = found.facts().count();

    let same = if write {
        let path = manifest::folder(&setup.workspace).join(manifest::file_name(version));
        fs::write(&path, found.to_string()).map_err(Error::io("write", &path))?;
        setup.output.say(&format!("wrote {number} facts to {}", path.display()))?;
        true
    } else {
        let known = Manifest::nearest(&setup.workspace, version)?;
        let changes = manifest::changes(&known, &found);
        let report = report(&groups, &changes);
        setup.output.say(&format!(
            "vLLM {version}: {number} facts, compared with those of {}{report}",
            known.version
        ))?;
        if changes.is_empty() {
            setup.output.say("nothing that Chiasm relies on has changed")?;
        } else {
            show_code(setup, &base, &known.version, &packages, &changes)?;
        }
        changes.is_empty()
    };

    let exchanged = exchange::run(setup, &env, version)?;
    setup.output.say(&exchanged.to_string())?;
    let passed = same && !matches!(exchanged, Exchange::Wrong(_));
    if !passed {
        setup.output.say(&format!(
            "\nvLLM {version} differs: see to each line, then `cargo xtask vllm-drift {version} --write`"
        ))?;
    }
    Ok(passed)
}

/// The scripts' own tests: a digest that notices too little would find nothing here either.
fn test_the_scripts(setup: &Setup, base: &VllmEnv) -> Result<(), Error> {
    let mut python = script(setup, base);
    python.args(["-m", "unittest", "discover", "--quiet", "-s", FOLDER]);
    child::run(&mut python, "the tests of python/vllm_drift", &setup.output, &setup.cancel)
}

/// Python in the repository's root; `-B` because a `__pycache__` beside a script would be one more
/// thing to ignore.
fn script(setup: &Setup, env: &VllmEnv) -> Command {
    let mut python = env.python_command();
    python.arg("-B").current_dir(&setup.workspace.root).stdin(Stdio::null());
    python
}

/// What changed, group by group, and where it matters.
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
        let of_group: Vec<_> = changes.iter().filter(|change| change.group == name).collect();
        if of_group.is_empty() {
            continue;
        }
        let group = groups.iter().find(|group| group.name == name);
        let what = group.map_or("not in the table any more", |group| &group.what);
        lines.push(format!("\n{name}: {what}"));
        lines.extend(of_group.iter().map(ToString::to_string));
        if let Some(group) = group {
            lines.push(format!("  matters in: {}", group.ours.join(", ")));
        }
    }
    lines.iter().map(|line| format!("{line}\n")).collect()
}

/// Diffs of the functions that changed, if the other version's Python is in the cache.
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
    let Some(old) = sources::in_the_cache(&setup.workspace, known) else {
        let get = match VERSIONS.contains(&known) {
            true => format!("vllm-env --vllm {known}"),
            false => format!("vllm-drift {known}"),
        };
        return setup.output.say(&format!(
            "\nfor the code of these functions, get vLLM {known} first: cargo xtask {get}"
        ));
    };
    let mut python = script(setup, base);
    python
        .arg(format!("{FOLDER}/differences.py"))
        .arg(old)
        .arg(packages)
        .args(names.iter().take(MOST_DIFFS));
    setup.output.say(&format!("\n{}", child::read(&mut python, "differences.py")?))?;
    if names.len() > MOST_DIFFS {
        let more = names.len() - MOST_DIFFS;
        setup
            .output
            .say(&format!("… and {more} functions more: python3 {FOLDER}/differences.py"))?;
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
    fn a_report_has_the_changes_of_a_group_and_where_they_matter() {
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
        let wire = "\nwire: about wire\n  changed x.py:S.f\n      from int\n      to   str\n  new     x.py:g = new\n  matters in: a.rs, b.rs\n";
        assert!(text.starts_with(wire), "{text}");
        assert!(text.ends_with("\nold: not in the table any more\n  gone    h, was 1\n"), "{text}");
        assert!(!text.contains("start"), "{text}");
        assert_eq!(report(&groups, &[]), "");
    }

    #[test]
    fn every_place_of_ours_in_the_table_exists() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let mut places = 0;
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
                    places += 1;
                } else if word.ends_with(".rs") {
                    assert!(root.join(families).join(word).exists(), "{table}: {word}");
                    places += 1;
                }
            }
        }
        assert!(places > 50, "{places}");
    }
}
