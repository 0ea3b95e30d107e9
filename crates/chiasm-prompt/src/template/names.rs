//! Names that a template writes: roles that it knows and fields that it reads. They are looked up
//! for each message and part of a request, so they are found once.

use std::collections::HashSet;

/// The names of one template.
#[derive(Clone, Debug, Default)]
pub(super) struct Names {
    quoted: HashSet<Box<str>>,
    attributes: HashSet<Box<str>>,
}

impl Names {
    pub(super) fn of(source: &str) -> Self {
        let mut names = Self::default();
        for quote in ['\'', '"'] {
            // What is between two strings is taken for one too, and is no name.
            let mut between = source.split(quote).skip(1).peekable();
            while let Some(text) = between.next() {
                if between.peek().is_some() && !text.is_empty() {
                    names.quoted.insert(text.into());
                }
            }
        }
        for (dot, _) in source.match_indices('.') {
            let behind = &source[dot + 1..];
            let end =
                behind.find(|c: char| c != '_' && !c.is_alphanumeric()).unwrap_or(behind.len());
            if end > 0 {
                names.attributes.insert(behind[..end].into());
            }
        }
        names
    }

    /// Whether it writes `'name'` or `"name"`.
    pub(super) fn quotes(&self, name: &str) -> bool {
        self.quoted.contains(name)
    }

    /// Whether it writes one of these, or `x.name`.
    pub(super) fn reads(&self, name: &str) -> bool {
        self.quotes(name) || self.attributes.contains(name)
    }
}
