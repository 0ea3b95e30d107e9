//! How models write reasoning and calls, under vLLM's names of the parsers that read it.

use std::fmt;

use serde_json::Value;

use crate::calls::section;
use crate::pending::Markers;
use crate::syntax::{Calls, Kind, Reasoning};
use crate::table;
use crate::tag::Function;

/// A name that is none of a parser that is known here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownParser(
    /// The name.
    pub String,
);

impl fmt::Display for UnknownParser {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (tools, reasoning): (Vec<_>, Vec<_>) =
            (tool_parsers().collect(), reasoning_parsers().collect());
        let (name, tools, reasoning) = (&self.0, tools.join(", "), reasoning.join(", "));
        write!(
            f,
            "'{name}' is none of the known parsers: {tools} for calls, {reasoning} for reasoning"
        )
    }
}

impl std::error::Error for UnknownParser {}

/// How a model writes reasoning and calls. One is made for a served model; parsers of its answers
/// share it.
#[derive(Clone, Debug)]
pub struct Format {
    pub(crate) reasoning: Option<&'static Reasoning>,
    /// Reasoning that stays in the text.
    pub(crate) in_text_alone: Option<&'static Reasoning>,
    pub(crate) calls: Option<&'static Calls>,
    /// Reasoning is only what the prompt or the answer has begun by its marker.
    is_careful: bool,
    /// What may begin within text: calls, then reasoning again and an end of reasoning that means
    /// nothing, where there is that.
    pub(crate) in_text: Markers,
    /// What may begin within reasoning: its end, its beginning once more, and calls where they end
    /// it.
    pub(crate) in_reasoning: Markers,
}

/// Where an answer begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// Within reasoning.
    Reasoning,
    /// Within text for the user.
    Text,
    /// Within text, in which nothing is reasoning: the model was told not to think.
    NoReasoning,
}

impl Format {
    /// The format that vLLM reads with these parsers; none reads no calls, or no reasoning.
    ///
    /// # Errors
    /// [`UnknownParser`] for a name that is not in [`tool_parsers`] or [`reasoning_parsers`].
    pub fn new(
        tool_parser: Option<&str>,
        reasoning_parser: Option<&str>,
    ) -> Result<Self, UnknownParser> {
        let calls = tool_parser.map(|name| find(table::CALLS, name)).transpose()?;
        let reasoning = reasoning_parser.map(|name| find(table::REASONING, name)).transpose()?;
        Ok(Self::of(reasoning, calls, false))
    }

    /// The same format, but nothing is taken for reasoning that neither the prompt nor the answer
    /// has begun by its marker.
    #[must_use]
    pub fn careful(&self) -> Self {
        Self::of(self.any_reasoning(), self.calls, true)
    }

    /// Whether calls are read.
    pub fn has_calls(&self) -> bool {
        self.calls.is_some()
    }

    /// The same format of an answer that was made to be a JSON list of calls, by a schema.
    #[must_use]
    pub fn with_listed_calls(&self) -> Self {
        Self::of(self.any_reasoning(), Some(&table::LISTED), self.is_careful)
    }

    /// The same format without calls.
    #[must_use]
    pub fn without_calls(&self) -> Self {
        Self::of(self.any_reasoning(), None, self.is_careful)
    }

    /// The same format of a model that was told not to think.
    #[must_use]
    pub fn without_reasoning(&self) -> Self {
        Self::of(self.in_text_alone, self.calls, self.is_careful)
    }

    fn any_reasoning(&self) -> Option<&'static Reasoning> {
        self.reasoning.or(self.in_text_alone)
    }

    /// Whether the model thinks where neither of the template's variables `thinking` and
    /// `enable_thinking` is set. `None` if these do not decide of how its answers are read.
    pub fn thinks_untold(&self) -> Option<bool> {
        self.reasoning?.thinks_untold
    }

    fn of(
        reasoning: Option<&'static Reasoning>,
        calls: Option<&'static Calls>,
        is_careful: bool,
    ) -> Self {
        let (in_text_alone, reasoning) = (
            reasoning.filter(|reasoning| reasoning.stays_text),
            reasoning.filter(|reasoning| !reasoning.stays_text),
        );
        let openings =
            || calls.into_iter().flat_map(|calls| calls.openings).map(|(marker, _)| *marker);
        let again = reasoning.filter(|reasoning| {
            reasoning.may_follow_text || !reasoning.begins_inside || is_careful
        });
        let stray = reasoning.filter(|reasoning| reasoning.drops_stray_ends);
        let in_text = openings()
            .chain(again.map(|reasoning| reasoning.open))
            .chain(stray.map(|reasoning| reasoning.close))
            .filter(|marker| !marker.is_empty());
        // Thoughts may have brackets.
        let ends = reasoning.filter(|reasoning| reasoning.ends_at_calls);
        let ends = ends.map(|_| openings().filter(|marker| marker.len() > 1));
        let in_reasoning = reasoning
            .into_iter()
            .flat_map(|reasoning| [reasoning.close, reasoning.open])
            .filter(|marker| !marker.is_empty())
            .chain(ends.into_iter().flatten());
        let (in_text, in_reasoning) = (Markers::new(in_text), Markers::new(in_reasoning));
        Self { reasoning, in_text_alone, calls, is_careful, in_text, in_reasoning }
    }

    /// Where an answer begins. `is_open`: what the prompt's end says, if it says anything: whether
    /// it opened reasoning or closed it.
    pub fn start(&self, is_open: Option<bool>) -> Start {
        let inside = self.reasoning.is_some_and(|reasoning| {
            is_open.unwrap_or(reasoning.begins_inside && !self.is_careful)
        });
        if inside { Start::Reasoning } else { Start::Text }
    }

    /// What begins and what ends reasoning. The first may be empty.
    pub fn reasoning_markers(&self) -> Option<(&'static str, &'static str)> {
        self.reasoning.map(|reasoning| (reasoning.open, reasoning.close))
    }

    /// What an engine looks for that holds an answer to something behind its reasoning, also where
    /// this stays in the text.
    pub fn engine_markers(&self) -> Option<(&'static str, &'static str)> {
        self.any_reasoning().map(|reasoning| (reasoning.open, reasoning.close))
    }

    /// Returns the token that a model must have for a [structural tag](Self::structural_tag), if
    /// one is needed.
    pub fn tag_token(&self) -> Option<&'static str> {
        let form = self.calls?.tag?;
        Some(form.token).filter(|token| !token.is_empty())
    }

    /// The structural tag that an engine holds an answer to, in which these functions are called.
    /// `has_to_call`: the answer is calls and nothing else; otherwise it may be text, within which
    /// calls are held to their schemas. `is_one`: there is one call at most. `None` for a format
    /// that xgrammar can't describe.
    pub fn structural_tag(
        &self,
        functions: &[Function<'_>],
        has_to_call: bool,
        is_one: bool,
    ) -> Option<Value> {
        let form = self.calls?.tag?;
        Some(form.structural_tag(functions, has_to_call, is_one))
    }

    /// All texts that structure an answer. Those that are special tokens of a model have to be in
    /// the text that is parsed.
    pub fn markers(&self) -> Vec<&'static str> {
        let of_calls =
            self.calls.into_iter().flat_map(|calls| calls.openings).flat_map(|(open, kind)| {
                let mut markers = vec![*open];
                match kind {
                    Kind::Json(form) => markers.push(form.close),
                    Kind::Section(form) => {
                        markers.extend([form.open, form.call]);
                        markers.extend(form.arguments.iter().chain(form.end).chain(form.close));
                        if let section::NamePlace::Behind(marker)
                        | section::NamePlace::Before(marker) = form.name
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
        let of_reasoning = self
            .any_reasoning()
            .into_iter()
            .flat_map(|reasoning| [reasoning.open, reasoning.close]);
        let mut markers: Vec<_> =
            of_calls.chain(of_reasoning).filter(|marker| !marker.is_empty()).collect();
        markers.sort_unstable();
        markers.dedup();
        markers
    }
}

/// The names of the tool parsers that are known here; several may be the same.
pub fn tool_parsers() -> impl Iterator<Item = &'static str> {
    table::CALLS.iter().flat_map(|(names, _)| *names).copied()
}

/// The names of the reasoning parsers that are known here.
pub fn reasoning_parsers() -> impl Iterator<Item = &'static str> {
    table::REASONING.iter().flat_map(|(names, _)| *names).copied()
}

fn find<T>(all: &'static [(&[&str], T)], name: &str) -> Result<&'static T, UnknownParser> {
    let found = all.iter().find(|(names, _)| names.contains(&name));
    found.map(|(_, form)| form).ok_or_else(|| UnknownParser(name.to_owned()))
}
