//! The syntax in which a model writes reasoning and calls, under vLLM's names of the parsers.

use std::fmt;

use serde_json::Value;

use crate::calls::section;
use crate::pending::Markers;
use crate::syntax::{Calls, Kind, Reasoning};
use crate::table;
use crate::tag::Function;

/// The error for a parser name that is not known here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownParser(
    /// The name.
    pub String,
);

impl fmt::Display for UnknownParser {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tools: Vec<_> = tool_parsers().collect();
        let reasoning: Vec<_> = reasoning_parsers().collect();
        write!(
            f,
            "unknown parser '{}'; known tool parsers: {}; known reasoning parsers: {}",
            self.0,
            tools.join(", "),
            reasoning.join(", ")
        )
    }
}

impl std::error::Error for UnknownParser {}

/// The syntax in which a model writes reasoning and calls. Each served model has one, which the
/// parsers of its answers share.
#[derive(Clone, Debug)]
pub struct Format {
    pub(crate) reasoning: Option<&'static Reasoning>,
    /// Reasoning that stays in the text.
    pub(crate) text_reasoning: Option<&'static Reasoning>,
    pub(crate) calls: Option<&'static Calls>,
    /// `true` if only text after the reasoning marker, in the prompt or in the answer, is
    /// reasoning.
    requires_open_marker: bool,
    /// The markers to look for in text: those that begin calls and, depending on the format, the
    /// beginning of reasoning and a stray end of it.
    pub(crate) markers_in_text: Markers,
    /// The markers to look for in reasoning: its end, a repeated beginning, and the beginnings of
    /// calls if they end reasoning.
    pub(crate) markers_in_reasoning: Markers,
}

/// The state in which an answer begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// Within reasoning.
    Reasoning,
    /// Within text for the user.
    Text,
    /// Within text that contains no reasoning, because reasoning was turned off.
    NoReasoning,
}

impl Format {
    /// Returns the format that vLLM reads with these parsers. `None` means that calls, or
    /// reasoning, are not parsed.
    ///
    /// # Errors
    /// [`UnknownParser`] for a name that is not in [`tool_parsers`] or [`reasoning_parsers`].
    pub fn new(
        tool_parser: Option<&str>,
        reasoning_parser: Option<&str>,
    ) -> Result<Self, UnknownParser> {
        let calls = tool_parser.map(|name| find(table::CALLS, name)).transpose()?;
        let reasoning = reasoning_parser.map(|name| find(table::REASONING, name)).transpose()?;
        Ok(Self::from_parts(reasoning, calls, false))
    }

    /// Returns this format, except that reasoning has to begin with its marker, in the prompt or in
    /// the answer.
    #[must_use]
    pub fn with_required_open_marker(&self) -> Self {
        Self::from_parts(self.any_reasoning(), self.calls, true)
    }

    /// Returns `true` if calls are parsed.
    pub fn has_calls(&self) -> bool {
        self.calls.is_some()
    }

    /// Returns this format for an answer that a schema constrains to a JSON list of calls.
    #[must_use]
    pub fn with_listed_calls(&self) -> Self {
        Self::from_parts(self.any_reasoning(), Some(&table::LISTED), self.requires_open_marker)
    }

    /// Returns this format without calls.
    #[must_use]
    pub fn without_calls(&self) -> Self {
        Self::from_parts(self.any_reasoning(), None, self.requires_open_marker)
    }

    /// Returns this format for a request that turned reasoning off.
    #[must_use]
    pub fn without_reasoning(&self) -> Self {
        Self::from_parts(self.text_reasoning, self.calls, self.requires_open_marker)
    }

    fn any_reasoning(&self) -> Option<&'static Reasoning> {
        self.reasoning.or(self.text_reasoning)
    }

    /// Returns `true` if the model reasons when the request sets neither of the template's
    /// variables `thinking` and `enable_thinking`. `None` if these variables do not control how
    /// answers are parsed.
    pub fn thinks_by_default(&self) -> Option<bool> {
        self.reasoning?.thinks_by_default
    }

    fn from_parts(
        any_reasoning: Option<&'static Reasoning>,
        calls: Option<&'static Calls>,
        requires_open_marker: bool,
    ) -> Self {
        let text_reasoning = any_reasoning.filter(|reasoning| reasoning.stays_in_text);
        let reasoning = any_reasoning.filter(|reasoning| !reasoning.stays_in_text);
        let openings =
            || calls.into_iter().flat_map(|calls| calls.openings).map(|(marker, _)| *marker);
        let opened_in_text = reasoning.filter(|reasoning| {
            reasoning.may_follow_text || !reasoning.begins_inside || requires_open_marker
        });
        let stray = reasoning.filter(|reasoning| reasoning.drops_stray_ends);
        let in_text = openings()
            .chain(opened_in_text.map(|reasoning| reasoning.open))
            .chain(stray.map(|reasoning| reasoning.close))
            .filter(|marker| !marker.is_empty());
        // A single bracket does not end reasoning, which may contain brackets.
        let ended_by_calls = reasoning.filter(|reasoning| reasoning.ends_at_calls);
        let ends = ended_by_calls.map(|_| openings().filter(|marker| marker.len() > 1));
        let in_reasoning = reasoning
            .into_iter()
            .flat_map(|reasoning| [reasoning.close, reasoning.open])
            .filter(|marker| !marker.is_empty())
            .chain(ends.into_iter().flatten());
        Self {
            reasoning,
            text_reasoning,
            calls,
            requires_open_marker,
            markers_in_text: Markers::new(in_text),
            markers_in_reasoning: Markers::new(in_reasoning),
        }
    }

    /// Returns the state in which an answer begins. `is_open` is `true` if the prompt ends within
    /// reasoning, `false` if the prompt closed it, and `None` if the prompt has no reasoning.
    pub fn start(&self, is_open: Option<bool>) -> Start {
        let inside = self.reasoning.is_some_and(|reasoning| {
            is_open.unwrap_or(reasoning.begins_inside && !self.requires_open_marker)
        });
        if inside { Start::Reasoning } else { Start::Text }
    }

    /// Returns the markers that begin and end reasoning. The first one may be empty.
    pub fn reasoning_markers(&self) -> Option<(&'static str, &'static str)> {
        self.reasoning.map(|reasoning| (reasoning.open, reasoning.close))
    }

    /// Returns the reasoning markers for an engine that constrains only the text after reasoning.
    /// Unlike [`Self::reasoning_markers`], includes those of reasoning that stays in the text.
    pub fn engine_markers(&self) -> Option<(&'static str, &'static str)> {
        self.any_reasoning().map(|reasoning| (reasoning.open, reasoning.close))
    }

    /// Returns the token that a model must have for a [structural tag](Self::structural_tag), if
    /// one is needed.
    pub fn tag_token(&self) -> Option<&'static str> {
        let form = self.calls?.tag?;
        Some(form.token).filter(|token| !token.is_empty())
    }

    /// Returns the structural tag that constrains an engine to calls of these functions. `None` if
    /// xgrammar can't describe the format.
    ///
    /// With `must_call`, the answer consists of calls only. Otherwise it may be text, in which
    /// calls have to follow their schemas. `is_single` allows at most one call.
    pub fn structural_tag(
        &self,
        functions: &[Function<'_>],
        must_call: bool,
        is_single: bool,
    ) -> Option<Value> {
        let form = self.calls?.tag?;
        Some(form.structural_tag(functions, must_call, is_single))
    }

    /// Returns all texts that structure an answer. Those that are special tokens of a model must
    /// not be removed from the text before it is parsed.
    pub fn markers(&self) -> Vec<&'static str> {
        let call_markers =
            self.calls.into_iter().flat_map(|calls| calls.openings).flat_map(|(open, kind)| {
                let mut markers = vec![*open];
                match kind {
                    Kind::Json(form) => markers.push(form.close),
                    Kind::Section(form) => {
                        markers.extend([form.open, form.call]);
                        markers.extend(form.arguments.iter().chain(form.end).chain(form.close));
                        if let section::NamePosition::After(marker)
                        | section::NamePosition::Before(marker) = form.name
                        {
                            markers.push(marker);
                        }
                    }
                    Kind::Tagged(form) => markers.extend(form.markers()),
                    Kind::Python(open, close) => markers.extend([*open, *close]),
                    Kind::Braces(form) => markers.extend([form.open, form.quote, form.close]),
                    Kind::Dropped => {}
                }
                markers
            });
        let reasoning_markers = self
            .any_reasoning()
            .into_iter()
            .flat_map(|reasoning| [reasoning.open, reasoning.close]);
        let mut markers: Vec<_> =
            call_markers.chain(reasoning_markers).filter(|marker| !marker.is_empty()).collect();
        markers.sort_unstable();
        markers.dedup();
        markers
    }
}

/// Returns the names of the known tool parsers. Several names may have the same format.
pub fn tool_parsers() -> impl Iterator<Item = &'static str> {
    table::CALLS.iter().flat_map(|(names, _)| *names).copied()
}

/// Returns the names of the known reasoning parsers.
pub fn reasoning_parsers() -> impl Iterator<Item = &'static str> {
    table::REASONING.iter().flat_map(|(names, _)| *names).copied()
}

fn find<T>(table: &'static [(&[&str], T)], name: &str) -> Result<&'static T, UnknownParser> {
    let entry = table.iter().find(|(names, _)| names.contains(&name));
    entry.map(|(_, form)| form).ok_or_else(|| UnknownParser(name.to_owned()))
}
