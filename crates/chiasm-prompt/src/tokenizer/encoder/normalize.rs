//! Text normalization that does not track the origin of each byte.

use std::borrow::Cow;

use serde_json::Value;
use unicode_normalization_alignments::{IsNormalized, UnicodeNormalization, is_nfc_quick};

/// The steps of a normalizer, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Normalization(Vec<Step>);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Step {
    /// Canonical composition.
    Nfc,
    /// Puts a text before every non-empty piece.
    Prepend(String),
    /// Replaces a text by another one.
    Replace { from: String, to: String },
}

impl Normalization {
    /// Parses a normalizer of `tokenizer.json`. Returns `None` for an unsupported step.
    pub(super) fn from_json(json: &Value) -> Option<Self> {
        let mut steps = Vec::new();
        collect_steps(json, &mut steps)?;
        Some(Self(steps))
    }

    /// Returns `true` if there are no steps.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns `true` if normalized texts never contain `pattern`.
    pub(super) fn removes(&self, pattern: &str) -> bool {
        let Some(Step::Replace { from, to }) = self.0.last() else { return false };
        from == pattern && pattern.len() == 1 && !to.contains(pattern)
    }

    /// Normalizes a text.
    pub(super) fn apply<'t>(&self, text: &'t str) -> Cow<'t, str> {
        self.0.iter().fold(Cow::Borrowed(text), |text, step| match step {
            Step::Nfc => nfc(text),
            Step::Prepend(prefix) if !text.is_empty() => Cow::Owned(format!("{prefix}{text}")),
            Step::Prepend(_) => text,
            Step::Replace { from, to } => Cow::Owned(text.replace(from, to)),
        })
    }
}

/// Appends the steps of a normalizer. Returns `None` for an unsupported step.
fn collect_steps(json: &Value, steps: &mut Vec<Step>) -> Option<()> {
    if json.is_null() {
        return Some(());
    }
    match json["type"].as_str()? {
        "Sequence" => {
            for step in json["normalizers"].as_array()? {
                collect_steps(step, steps)?;
            }
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

/// Applies NFC.
fn nfc(text: Cow<'_, str>) -> Cow<'_, str> {
    // Characters below U+0300 are composed already and none of them combines. Their UTF-8 bytes are
    // below 0xCC.
    if text.bytes().all(|byte| byte < 0xcc) || is_nfc_quick(text.chars()) == IsNormalized::Yes {
        return text;
    }
    Cow::Owned(text.chars().nfc().map(|(c, _)| c).collect())
}

/// The pre-tokenizer of SentencePiece's vocabularies: replaces spaces by another character, and may
/// put that character before a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Metaspace {
    pub(super) replacement: char,
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
    /// Parses a Metaspace pre-tokenizer of `tokenizer.json`. Returns `None` for an unsupported
    /// setting.
    pub(super) fn from_json(json: &Value) -> Option<Self> {
        let replacement = json["replacement"].as_str()?.chars().next()?;
        let prepend = match json["prepend_scheme"].as_str()? {
            "never" => Prepend::Never,
            "first" => Prepend::First,
            "always" => Prepend::Always,
            _ => return None,
        };
        Some(Self { replacement, prepend })
    }

    /// Applies the pre-tokenizer to a piece. `at_start` is `true` if the piece begins the text.
    pub(super) fn apply(&self, text: &str, at_start: bool) -> String {
        let prepends = match self.prepend {
            Prepend::Never => false,
            Prepend::First => at_start,
            Prepend::Always => true,
        };
        let mut out = String::with_capacity(2 * text.len());
        if prepends && !text.starts_with([' ', self.replacement]) {
            out.push(self.replacement);
        }
        out.extend(text.chars().map(|c| if c == ' ' { self.replacement } else { c }));
        out
    }
}
