//! How a model's answers are read: what of them is reasoning, and how calls are written.

use std::str::FromStr;

use chiasm_parse::{Format, UnknownParser, detect};
use chiasm_prompt::{ChatTemplate, Tokenizer};
use chiasm_types::TokenId;

/// Which of vLLM's parsers reads something of an answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ParserChoice {
    /// The one that the model's chat template speaks of, if any.
    #[default]
    Detect,
    /// None: it is text.
    None,
    /// This one.
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
    /// The format of answers with calls as the model writes them.
    pub whole: Format,
    /// The format of answers whose calls are plain text.
    pub without_calls: Format,
    /// The format of answers that are a JSON list of calls.
    pub listed: Format,
    /// vLLM's name of the parser of calls.
    pub tool_parser: Option<String>,
    reasoning_parser: Option<String>,
    /// The special tokens that structure answers: they are in the text that is parsed.
    shown: Vec<TokenId>,
    /// The tokens that begin and end reasoning.
    open: Option<TokenId>,
    close: Option<TokenId>,
}

impl AnswerFormat {
    /// Finds the formats of a model with this tokenizer and this template.
    ///
    /// # Errors
    /// [`UnknownParser`] for a name that is none of a known parser.
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
        let whole = if is_named { format } else { format.careful() };
        let (open, close) = whole.engine_markers().unwrap_or_default();
        let markers = whole.markers();
        let is_shown = |text: &str| markers.iter().any(|marker| marker.contains(text));
        let special = tokenizer.special_tokens();
        Ok(Self {
            shown: special
                .into_iter()
                .filter(|(_, text)| is_shown(text))
                .map(|(token, _)| token)
                .collect(),
            open: tokenizer.token_to_id(open),
            close: tokenizer.token_to_id(close),
            without_calls: whole.without_calls(),
            listed: whole.with_listed_calls(),
            whole,
            tool_parser,
            reasoning_parser,
        })
    }

    /// vLLM's name of the parser of reasoning, if an engine of this model can have it: it looks for
    /// the tokens.
    pub fn engine_parser(&self) -> Option<&str> {
        self.reasoning_parser.as_deref().filter(|_| self.close.is_some())
    }

    /// Returns `true` if the model may think, by its reasoning parser.
    pub fn may_think(&self) -> bool {
        self.whole.engine_markers().is_some()
    }

    /// Returns `true` if the text that is parsed has special tokens.
    pub fn shows_any(&self) -> bool {
        !self.shown.is_empty()
    }

    /// Returns `true` if a special token is part of the text that is parsed.
    pub fn shows(&self, token: TokenId) -> bool {
        self.shown.contains(&token)
    }

    /// Returns whether a prompt ends within reasoning. `None` if neither token of reasoning is the
    /// prompt's last special token.
    pub fn is_open(&self, tokenizer: &Tokenizer, prompt: &[TokenId]) -> Option<bool> {
        let says = |&&token: &&TokenId| {
            [self.open, self.close].contains(&Some(token)) || tokenizer.is_special(token)
        };
        let last = prompt.iter().rev().find(says)?;
        match Some(*last) {
            token if token == self.open => Some(true),
            token if token == self.close => Some(false),
            _ => None,
        }
    }
}
