//! Normalisation of a text without a record of where each byte came from.

use std::borrow::Cow;

use serde_json::Value;
use unicode_normalization_alignments::{IsNormalized, UnicodeNormalization, is_nfc_quick};

/// The steps of a normaliser, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Normalization(Vec<Step>);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Step {
    /// Canonical composition.
    Nfc,
    /// Text before every piece that is not empty.
    Prepend(String),
    /// One text for another.
    Replace { from: String, to: String },
}

impl Normalization {
    /// Reads the normaliser as `tokenizer.json` writes it; `None` if a step is not known.
    pub(super) fn of(json: &Value) -> Option<Self> {
        let mut steps = Vec::new();
        collect(json, &mut steps)?;
        Some(Self(steps))
    }

    pub(super) fn is_nothing(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether no text that was normalised contains `pattern`.
    pub(super) fn removes(&self, pattern: &str) -> bool {
        let last = self.0.last();
        matches!(last, Some(Step::Replace { from, to }) if from == pattern && pattern.len() == 1 && !to.contains(pattern))
    }

    pub(super) fn apply<'t>(&self, text: &'t str) -> Cow<'t, str> {
        self.0.iter().fold(Cow::Borrowed(text), |text, step| match step {
            Step::Nfc => nfc(text),
            Step::Prepend(prefix) if !text.is_empty() => Cow::Owned(format!("{prefix}{text}")),
            Step::Prepend(_) => text,
            Step::Replace { from, to } => Cow::Owned(text.replace(from, to)),
        })
    }
}

fn collect(json: &Value, steps: &mut Vec<Step>) -> Option<()> {
    if json.is_null() {
        return Some(());
    }
    match json["type"].as_str()? {
        "Sequence" => {
            json["normalizers"].as_array()?.iter().try_for_each(|step| collect(step, steps))?
        }
        "NFC" => steps.push(Step::Nfc),
        "Prepend" => steps.push(Step::Prepend(json["prepend"].as_str()?.to_owned())),
        "Replace" => {
            let from = json["pattern"]["String"].as_str()?.to_owned();
            if from.is_empty() {
                return None;
            }
            steps.push(Step::Replace { from, to: json["content"].as_str()?.to_owned() });
        }
        _ => return None,
    }
    Some(())
}

fn nfc(text: Cow<'_, str>) -> Cow<'_, str> {
    // Below U+0300 every character is its own composition and none combines. In UTF-8 these begin
    // below 0xCC.
    if text.bytes().all(|byte| byte < 0xcc) || is_nfc_quick(text.chars()) == IsNormalized::Yes {
        return text;
    }
    Cow::Owned(text.chars().nfc().map(|(c, _)| c).collect())
}

/// The pre-tokenizer of SentencePiece's vocabularies: another sign for spaces, and one before a
/// text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Metaspace {
    pub(super) sign: char,
    prepend: Prepend,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Prepend {
    Never,
    /// Only before the piece that begins the text.
    First,
    Always,
}

impl Metaspace {
    /// `None` if a setting is not known.
    pub(super) fn of(json: &Value) -> Option<Self> {
        let mut sign = json["replacement"].as_str()?.chars();
        let prepend = match json["prepend_scheme"].as_str()? {
            "never" => Prepend::Never,
            "first" => Prepend::First,
            "always" => Prepend::Always,
            _ => return None,
        };
        Some(Self { sign: sign.next()?, prepend })
    }

    /// `first`: whether the piece begins the text.
    pub(super) fn apply(&self, text: &str, first: bool) -> String {
        let before = match self.prepend {
            Prepend::Never => false,
            Prepend::First => first,
            Prepend::Always => true,
        };
        let mut out = String::with_capacity(2 * text.len());
        out.extend((before && !text.starts_with([' ', self.sign])).then_some(self.sign));
        out.extend(text.chars().map(|c| if c == ' ' { self.sign } else { c }));
        out
    }
}
