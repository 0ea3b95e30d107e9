//! The facts of a version as a text file with readable diffs, and the changes between two such
//! files.
//!
//! A line is `NAME = VALUE`. `[GROUP]` starts a group, `#` a comment. The first line names the
//! version.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::path::PathBuf;

use super::facts::Group;
use crate::error::Error;
use crate::workspace::Workspace;

/// The text in front of the version in the first line.
const VERSION_PREFIX: &str = "# vLLM ";

/// The facts of one version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Manifest {
    /// The full release number, such as `0.33.0`.
    pub(super) version: String,
    /// The facts by group, both in the table's order.
    groups: Vec<(String, Vec<(String, String)>)>,
}

/// A fact that differs between two versions. At least one of the values is present.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Change {
    pub(super) group: String,
    pub(super) fact: String,
    pub(super) old: Option<String>,
    pub(super) new: Option<String>,
}

/// Returns the folder of the manifests.
pub(super) fn folder(workspace: &Workspace) -> PathBuf {
    workspace.root.join(super::FOLDER).join("manifests")
}

/// Returns the file name for a version: `0.33.txt` for 0.33.0 and its patches.
pub(super) fn file_name(version: &str) -> String {
    let (major, minor) = minor(version).unwrap_or_default();
    format!("{major}.{minor}.txt")
}

/// Parses the major and minor version of a release number or file name.
fn minor(version: &str) -> Option<(u32, u32)> {
    let mut numbers = version.trim_end_matches(".txt").split('.').map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

impl Manifest {
    /// Creates the manifest of a version from its facts.
    pub(super) fn from_groups(version: &str, groups: &[Group]) -> Self {
        let groups = groups.iter().map(|group| (group.name.clone(), group.facts.clone())).collect();
        Self { version: version.to_owned(), groups }
    }

    /// Reads the manifest of the same minor version, or else the newest older manifest.
    pub(super) fn nearest(workspace: &Workspace, version: &str) -> Result<Self, Error> {
        let folder = folder(workspace);
        let names = fs::read_dir(&folder).map_err(Error::io("list", &folder))?;
        let names: Vec<String> = names
            .flatten()
            .filter_map(|entry| entry.file_name().into_string().ok())
            .filter(|name| name.ends_with(".txt"))
            .collect();
        let nearest = choose(&names, version)
            .ok_or_else(|| Error::NoManifest { version: version.to_owned() })?;
        let path = folder.join(nearest);
        let text = fs::read_to_string(&path).map_err(Error::io("read", &path))?;
        Self::parse(&text).ok_or_else(|| Error::Unreadable {
            what: path.display().to_string(),
            printed: first_line(&text),
        })
    }

    fn parse(text: &str) -> Option<Self> {
        let version = text.strip_prefix(VERSION_PREFIX)?.split(':').next()?.to_owned();
        let mut groups: Vec<(String, Vec<(String, String)>)> = Vec::new();
        for line in text.lines().filter(|line| !line.starts_with('#') && !line.is_empty()) {
            if let Some(name) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
                groups.push((name.to_owned(), Vec::new()));
            } else {
                let (name, value) = line.split_once(" = ")?;
                groups.last_mut()?.1.push((name.to_owned(), value.to_owned()));
            }
        }
        Some(Self { version, groups })
    }

    /// Returns the group, name and value of each fact.
    pub(super) fn facts(&self) -> impl Iterator<Item = (&str, &str, &str)> {
        self.groups.iter().flat_map(|(group, facts)| {
            facts.iter().map(move |(name, value)| (group.as_str(), name.as_str(), value.as_str()))
        })
    }
}

fn first_line(text: &str) -> String {
    text.lines().next().unwrap_or_default().to_owned()
}

/// Returns the file of the same minor version, or else the file of the newest older version.
fn choose<'a>(names: &'a [String], version: &str) -> Option<&'a String> {
    let wanted = minor(version)?;
    names
        .iter()
        .filter(|name| minor(name).is_some_and(|found| found <= wanted))
        .max_by_key(|name| minor(name))
}

impl fmt::Display for Manifest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let version = &self.version;
        writeln!(
            f,
            "{VERSION_PREFIX}{version}: what Chiasm relies on. \
             Written by `cargo xtask vllm-drift {version} --write`."
        )?;
        for (name, facts) in &self.groups {
            writeln!(f, "\n[{name}]")?;
            for (name, value) in facts {
                writeln!(f, "{name} = {}", value.replace('\n', " "))?;
            }
        }
        Ok(())
    }
}

/// Returns all changes: first the new and changed facts in the order of `new`, then the removed
/// facts.
pub(super) fn changes(old: &Manifest, new: &Manifest) -> Vec<Change> {
    let index = |manifest: &'_ Manifest| -> BTreeMap<(String, String), String> {
        manifest
            .facts()
            .map(|(group, fact, value)| ((group.to_owned(), fact.to_owned()), value.to_owned()))
            .collect()
    };
    let before = index(old);
    let after = index(new);
    let mut changes = Vec::new();
    for (group, fact, value) in new.facts() {
        let key = (group.to_owned(), fact.to_owned());
        let old = before.get(&key);
        if old.is_none_or(|old| old != value) {
            let (group, fact) = key;
            changes.push(Change { group, fact, old: old.cloned(), new: Some(value.to_owned()) });
        }
    }
    for (group, fact, value) in old.facts() {
        let key = (group.to_owned(), fact.to_owned());
        if !after.contains_key(&key) {
            let (group, fact) = key;
            changes.push(Change { group, fact, old: Some(value.to_owned()), new: None });
        }
    }
    changes
}

impl Change {
    /// Returns `true` if the body or signature of a function changed, so that there is a diff to
    /// show.
    pub(super) fn is_code(&self) -> bool {
        [&self.old, &self.new]
            .into_iter()
            .all(|value| value.as_ref().is_some_and(|value| value.contains(" #")))
    }
}

/// Returns a value without the file that its definition has moved to.
fn without_file(value: &str) -> &str {
    value
        .rsplit_once(" (in ")
        .filter(|(_, file)| file.ends_with(".py)"))
        .map_or(value, |(value, _)| value)
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fact = &self.fact;
        match (&self.old, &self.new) {
            (Some(old), Some(new)) if without_file(old) == without_file(new) => {
                write!(f, "  moved   {fact} = {new}")
            }
            (Some(old), Some(new)) => {
                write!(f, "  changed {fact}\n      from {old}\n      to   {new}")
            }
            (None, Some(new)) => write!(f, "  new     {fact} = {new}"),
            (Some(old), None) => write!(f, "  gone    {fact}, was {old}"),
            (None, None) => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::vllm_overlay::VERSIONS;

    fn manifest(version: &str, groups: &[(&str, &[(&str, &str)])]) -> Manifest {
        let text = |text: &str| text.to_owned();
        let facts = |facts: &[(&str, &str)]| {
            facts.iter().map(|(name, value)| (text(name), text(value))).collect()
        };
        Manifest {
            version: text(version),
            groups: groups.iter().map(|(name, list)| (text(name), facts(list))).collect(),
        }
    }

    fn repository() -> Workspace {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        Workspace { root: root.to_owned(), cache: PathBuf::from("/nowhere") }
    }

    #[test]
    fn written_manifest_parses_to_same_facts() {
        let written = manifest(
            "0.33.1",
            &[("wire: a", &[("x.py:S", "class(a=1) = 2"), ("x.py:f", "(a) #12")]), ("b", &[])],
        );
        assert_eq!(Manifest::parse(&written.to_string()), Some(written));
        assert_eq!(Manifest::parse("no manifest\n"), None);
        assert_eq!(Manifest::parse("# vLLM 0.1.0: x\nfact = outside of a group\n"), None);
    }

    #[test]
    fn changes_distinguish_changed_new_gone_by_group() {
        let old = manifest(
            "0.1.0",
            &[("a", &[("same", "1"), ("other", "1"), ("gone", "1")]), ("b", &[("same", "1")])],
        );
        let new = manifest(
            "0.2.0",
            &[("a", &[("same", "1"), ("other", "2"), ("new", "1")]), ("b", &[("same", "2")])],
        );
        let lines: Vec<_> = changes(&old, &new)
            .iter()
            .map(|change| (change.group.clone(), change.to_string()))
            .collect();
        let lines: Vec<_> =
            lines.iter().map(|(group, text)| (group.as_str(), text.as_str())).collect();
        assert_eq!(
            lines,
            [
                ("a", "  changed other\n      from 1\n      to   2"),
                ("a", "  new     new = 1"),
                ("b", "  changed same\n      from 1\n      to   2"),
                ("a", "  gone    gone, was 1"),
            ]
        );
        assert_eq!(changes(&old, &old), []);
    }

    #[test]
    fn moved_definition_is_reported_as_moved() {
        let old = manifest(
            "0.1.0",
            &[("a", &[("x.py:f", "(a) #12 (in y.py)"), ("x.py:g", "(a) #12 (in y.py)")])],
        );
        let new = manifest("0.2.0", &[("a", &[("x.py:f", "(a) #12"), ("x.py:g", "(a) #34")])]);
        let lines: Vec<_> = changes(&old, &new).iter().map(ToString::to_string).collect();
        assert_eq!(
            lines,
            [
                "  moved   x.py:f = (a) #12",
                "  changed x.py:g\n      from (a) #12 (in y.py)\n      to   (a) #34"
            ]
        );
    }

    #[test]
    fn nearest_manifest_is_same_minor_or_newest_older() {
        let names = ["0.31.txt", "0.9.txt", "0.33.txt", "1.0.txt"].map(String::from);
        let chosen = |version| choose(&names, version).map(String::as_str);
        assert_eq!(chosen("0.33.2"), Some("0.33.txt"));
        assert_eq!(chosen("0.32.0"), Some("0.31.txt"));
        assert_eq!(chosen("0.40.0"), Some("0.33.txt"));
        assert_eq!(chosen("1.2.0"), Some("1.0.txt"));
        assert_eq!(chosen("0.8.0"), None);
    }

    #[test]
    fn tested_versions_have_manifests() {
        for version in VERSIONS {
            let manifest = Manifest::nearest(&repository(), version).unwrap();
            assert_eq!(manifest.version, version, "cargo xtask vllm-drift {version} --write");
            assert!(manifest.facts().count() > 1000, "{version}");
        }
    }

    #[test]
    fn newest_manifest_has_all_facts() {
        let newest = Manifest::nearest(&repository(), crate::vllm_overlay::NEWEST).unwrap();
        // Inherited methods are missing in the class itself.
        let inherited = [".supports_mm_device_do_normalize", ".get_placeholder_str"];
        for (group, fact, value) in newest.facts().filter(|(_, _, value)| *value == "missing") {
            assert!(inherited.iter().any(|end| fact.ends_with(end)), "{group}: {fact} is {value}");
        }
    }
}
