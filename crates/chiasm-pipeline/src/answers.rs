//! The formats of a model's answers: the markers of reasoning and the syntax of calls.

use std::str::FromStr;

use chiasm_parse::{Format, UnknownParser, detect};
pub use chiasm_parse::{reasoning_parsers, tool_parsers};
use chiasm_prompt::{ChatTemplate, Tokenizer};
use chiasm_types::TokenId;

/// The choice of a parser of calls or of reasoning, by vLLM's names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ParserChoice {
    /// The parser that the model's chat template indicates, if any.
    #[default]
    Detect,
    /// No parser.
    None,
    /// The parser with this name.
    Named(String),
}

impl FromStr for ParserChoice {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(match text {
            "auto" => Self::Detect,
            "none" => Self::None,
            name => Self::Named(name.to_owned()),
        })
    }
}

/// The formats of a model's answers, and its special tokens.
#[derive(Clone, Debug)]
pub struct AnswerFormat {
    /// The format of answers with calls in the model's own syntax.
    pub whole: Format,
    /// The format of answers whose calls are plain text.
    pub without_calls: Format,
    /// The format of answers that are a JSON list of calls.
    pub listed: Format,
    /// vLLM's name of the parser of calls.
    pub tool_parser: Option<String>,
    reasoning_parser: Option<String>,
    /// The special tokens that structure answers. They are kept in the text to parse.
    marker_tokens: Vec<TokenId>,
    /// The token that begins reasoning.
    reasoning_open: Option<TokenId>,
    /// The token that ends reasoning.
    reasoning_close: Option<TokenId>,
}

impl AnswerFormat {
    /// Finds the formats of a model with this tokenizer and this template.
    ///
    /// # Errors
    /// Returns [`UnknownParser`] if a parser has an unknown name.
    pub fn new(
        tokenizer: &Tokenizer,
        template: Option<&ChatTemplate>,
        tool_parser: &ParserChoice,
        reasoning_parser: &ParserChoice,
    ) -> Result<Self, UnknownParser> {
        let detected =
            template.map(|template| detect(template.source_for_tools())).unwrap_or_default();
        let chosen = |choice: &ParserChoice, detected: Option<&str>| match choice {
            ParserChoice::Detect => detected.map(str::to_owned),
            ParserChoice::None => None,
            ParserChoice::Named(name) => Some(name.clone()),
        };
        let tool_parser = chosen(tool_parser, detected.tool_parser);
        let is_named = *reasoning_parser != ParserChoice::Detect;
        let reasoning_parser = chosen(reasoning_parser, detected.reasoning_parser);
        let format = Format::new(tool_parser.as_deref(), reasoning_parser.as_deref())?;
        let whole = if is_named { format } else { format.with_required_open_marker() };
        let (open, close) = whole.engine_markers().unwrap_or_default();
        let markers = whole.markers();
        let is_marker = |text: &str| markers.iter().any(|marker| marker.contains(text));
        let special = tokenizer.special_tokens();
        Ok(Self {
            marker_tokens: special
                .into_iter()
                .filter(|(_, text)| is_marker(text))
                .map(|(token, _)| token)
                .collect(),
            reasoning_open: tokenizer.token_to_id(open),
            reasoning_close: tokenizer.token_to_id(close),
            without_calls: whole.without_calls(),
            listed: whole.with_listed_calls(),
            whole,
            tool_parser,
            reasoning_parser,
        })
    }

    /// Returns vLLM's name of the reasoning parser, if engines of this model can use it. The parser
    /// needs a token that ends reasoning.
    pub fn engine_parser(&self) -> Option<&str> {
        self.reasoning_parser.as_deref().filter(|_| self.reasoning_close.is_some())
    }

    /// Returns `true` if the model may think, according to its reasoning parser.
    pub fn may_think(&self) -> bool {
        self.whole.engine_markers().is_some()
    }

    /// Returns `true` if the text to parse may contain special tokens.
    pub fn has_marker_tokens(&self) -> bool {
        !self.marker_tokens.is_empty()
    }

    /// Returns `true` if a special token is kept in the text to parse.
    pub fn is_marker_token(&self, token: TokenId) -> bool {
        self.marker_tokens.contains(&token)
    }

    /// Returns `Some(true)` if a prompt ends within reasoning, and `None` if the prompt's last
    /// special token neither begins nor ends reasoning.
    pub fn is_reasoning_open(&self, tokenizer: &Tokenizer, prompt: &[TokenId]) -> Option<bool> {
        let is_relevant = |&&token: &&TokenId| {
            [self.reasoning_open, self.reasoning_close].contains(&Some(token))
                || tokenizer.is_special(token)
        };
        let last = prompt.iter().rev().find(is_relevant)?;
        match Some(*last) {
            token if token == self.reasoning_open => Some(true),
            token if token == self.reasoning_close => Some(false),
            _ => None,
        }
    }
}
