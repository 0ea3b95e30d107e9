//! The names in a template's source: roles and fields. They are looked up for each message and part
//! of a request, so the source is scanned only once.

use std::collections::HashSet;

/// The names of one template.
#[derive(Clone, Debug, Default)]
pub(super) struct Names {
    quoted: HashSet<Box<str>>,
    attributes: HashSet<Box<str>>,
}

impl Names {
    /// Collects the names of a template's source.
    pub(super) fn from_source(source: &str) -> Self {
        let mut names = Self::default();
        for quote in ['\'', '"'] {
            // The text between two strings is collected too. This is harmless, as that text is
            // never a name.
            let mut between = source.split(quote).skip(1).peekable();
            while let Some(text) = between.next() {
                if between.peek().is_some() && !text.is_empty() {
                    names.quoted.insert(text.into());
                }
            }
        }
        for (dot, _) in source.match_indices('.') {
            let rest = &source[dot + 1..];
            let end = rest.find(|c: char| c != '_' && !c.is_alphanumeric()).unwrap_or(rest.len());
            if end > 0 {
                names.attributes.insert(rest[..end].into());
            }
        }
        names
    }

    /// Returns `true` if the source contains `'name'` or `"name"`.
    pub(super) fn quotes(&self, name: &str) -> bool {
        self.quoted.contains(name)
    }

    /// Returns `true` if the source contains `x.name`, `'name'` or `"name"`.
    pub(super) fn reads(&self, name: &str) -> bool {
        self.quotes(name) || self.attributes.contains(name)
    }
}
