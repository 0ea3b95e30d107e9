//! Names of models and revisions on the hub.

use std::fmt;
use std::str::FromStr;

use crate::HubError;
use crate::safe_path::is_safe_path;

/// The maximum length of a model's id.
const MAX_ID_BYTES: usize = 96;
/// The maximum length of a revision's name.
const MAX_REVISION_BYTES: usize = 255;

/// A model's id on the hub, `owner/name`, or `name` for some old ones.
///
/// Follows the rules of `validate_repo_id` in `huggingface_hub`. They also make the id safe as a
/// folder's name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RepoId(String);

impl RepoId {
    /// Returns the owner and the name, or only the name.
    pub(crate) fn parts(&self) -> impl Iterator<Item = &str> {
        self.0.split('/')
    }

    /// Returns the name of the folder in the cache, such as
    /// `models--Qwen--Qwen2.5-VL-7B-Instruct`.
    pub(crate) fn folder(&self) -> String {
        format!("models--{}", self.0.replace('/', "--"))
    }
}

impl FromStr for RepoId {
    type Err = HubError;

    fn from_str(text: &str) -> Result<Self, HubError> {
        let is_plain = |char: char| char.is_ascii_alphanumeric() || matches!(char, '-' | '_' | '.');
        let is_part = |part: &str| {
            !part.is_empty()
                && part.chars().all(is_plain)
                && !part.starts_with(['-', '.'])
                && !part.ends_with(['-', '.'])
        };
        let is_id = text.len() <= MAX_ID_BYTES
            && text.split('/').count() <= 2
            && text.split('/').all(is_part)
            && !text.contains("--")
            && !text.contains("..")
            && !text.ends_with(".git");
        if is_id {
            Ok(Self(text.to_owned()))
        } else {
            Err(HubError::InvalidId { id: text.to_owned() })
        }
    }
}

impl fmt::Display for RepoId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A branch, a tag or a commit. `main` by default.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Revision(String);

impl Revision {
    /// Returns the name as given.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the commit if the revision is one. The files of a commit never change.
    pub(crate) fn commit(&self) -> Option<Commit> {
        Commit::parse(&self.0)
    }
}

impl Default for Revision {
    fn default() -> Self {
        Self("main".to_owned())
    }
}

impl FromStr for Revision {
    type Err = HubError;

    fn from_str(text: &str) -> Result<Self, HubError> {
        let is_name = text.len() <= MAX_REVISION_BYTES
            && is_safe_path(text)
            && !text.contains(char::is_whitespace);
        if is_name {
            Ok(Self(text.to_owned()))
        } else {
            Err(HubError::InvalidRevision { revision: text.to_owned() })
        }
    }
}

impl fmt::Display for Revision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The hash of a commit: 40 lower-case hexadecimal digits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Commit(String);

impl Commit {
    pub(crate) fn parse(text: &str) -> Option<Self> {
        is_hex(text, 40).then(|| Self(text.to_owned()))
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

/// Returns `true` if `text` consists of `digits` lower-case hexadecimal digits.
pub(crate) fn is_hex(text: &str, digits: usize) -> bool {
    text.len() == digits && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repo_ids_follow_rules_of_hub() {
        for id in ["Qwen/Qwen2.5-VL-7B-Instruct", "gpt2", "a/b_c.d-e", "0/1"] {
            assert_eq!(id.parse::<RepoId>().unwrap().to_string(), id);
        }
        let long = format!("a/{}", "b".repeat(95));
        for invalid in [
            "", "/", "a/", "/a", "a/b/c", "./a", "../a", "~/a", "a--b", "a..b", "a/.b", "a/b-",
            "a b", "a/b.git", "ä/b", &long,
        ] {
            assert!(
                matches!(invalid.parse::<RepoId>(), Err(HubError::InvalidId { .. })),
                "{invalid}"
            );
        }
        assert_eq!("org/name".parse::<RepoId>().unwrap().folder(), "models--org--name");
    }

    #[test]
    fn unsafe_revisions_are_refused() {
        for revision in ["main", "v1.0", "refs/pr/3", "607a30d"] {
            assert_eq!(revision.parse::<Revision>().unwrap().commit(), None, "{revision}");
        }
        assert!(
            "607a30d783dfa663caf39e06633721c8d4cfcd7e"
                .parse::<Revision>()
                .unwrap()
                .commit()
                .is_some()
        );
        for bad in ["", "..", "a/../b", "/etc", "a b", "a\n", "a//b", &"a".repeat(256)] {
            assert!(
                matches!(bad.parse::<Revision>(), Err(HubError::InvalidRevision { .. })),
                "{bad}"
            );
        }
    }
}
