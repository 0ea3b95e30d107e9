//! Flags for rendering conversations as prompts, and for parsing and formatting answers.

use chiasm_api::openai::ReasoningFields;
use chiasm_pipeline::answers::{ParserChoice, reasoning_parsers, tool_parsers};
use chiasm_prompt::{ContentFormat, check_template_kwargs};
use chiasm_request::ChatDefaults;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, ValueEnum};
use serde_json::{Map, Value};

use super::json_object;
use crate::error::CliError;

#[derive(Debug, Args)]
pub(crate) struct AnswerArgs {
    /// Format of the model's tool calls: the name of a vLLM parser, auto to detect it from the chat
    /// template, or none
    #[arg(
        long,
        env = "CHIASM_TOOL_CALL_PARSER",
        value_name = "NAME",
        default_value = "auto",
        value_parser = parser_choice(tool_parsers()),
        hide_possible_values = true
    )]
    pub(crate) tool_call_parser: ParserChoice,
    /// Format of the model's reasoning: the name of a vLLM parser, auto to detect it from the chat
    /// template, or none. Launched engines get the same parser
    #[arg(
        long,
        env = "CHIASM_REASONING_PARSER",
        value_name = "NAME",
        default_value = "auto",
        value_parser = parser_choice(reasoning_parsers()),
        hide_possible_values = true
    )]
    pub(crate) reasoning_parser: ParserChoice,
    /// Fields of messages for reasoning: reasoning (vLLM's name), reasoning_content (the older
    /// name, which many clients read) or both
    #[arg(long, env = "CHIASM_REASONING_FIELDS", value_enum, default_value = "both")]
    pub(crate) reasoning_fields: ReasoningFieldsChoice,
    /// Report usage in all streams of chats and completions, as if clients asked for it with
    /// stream_options
    #[arg(long, env = "CHIASM_ENABLE_FORCE_INCLUDE_USAGE")]
    pub(crate) enable_force_include_usage: bool,
}

/// Returns the parser of a choice among parsers with these names.
fn parser_choice(
    names: impl Iterator<Item = &'static str>,
) -> impl TypedValueParser<Value = ParserChoice> {
    PossibleValuesParser::new(["auto", "none"].into_iter().chain(names))
        .try_map(|name| name.parse::<ParserChoice>())
}

/// Flags of the rendering of conversations as prompts.
#[derive(Debug, Args)]
pub(crate) struct PromptArgs {
    /// Format in which the chat template gets the content of messages: string, openai (a list of
    /// parts), or auto (detected from the template)
    #[arg(long, env = "CHIASM_CHAT_TEMPLATE_CONTENT_FORMAT", value_enum, default_value = "auto")]
    pub(crate) chat_template_content_format: ContentFormatChoice,
    /// Variables for the chat template, as a JSON object; a request's chat_template_kwargs override
    /// them
    #[arg(
        long,
        env = "CHIASM_DEFAULT_CHAT_TEMPLATE_KWARGS",
        value_name = "JSON",
        value_parser = json_object,
        default_value = "{}"
    )]
    pub(crate) default_chat_template_kwargs: Map<String, Value>,
    /// Leave tools out of the prompt if tool_choice is none
    #[arg(long, env = "CHIASM_EXCLUDE_TOOLS_WHEN_TOOL_CHOICE_NONE")]
    pub(crate) exclude_tools_when_tool_choice_none: bool,
    /// Size in bytes of the cache of tokens for long pieces of prompts, such as system prompts and
    /// messages of conversations; 0 for no cache
    #[arg(long, env = "CHIASM_TOKEN_CACHE_BYTES", value_name = "BYTES", default_value_t = 64 << 20)]
    pub(crate) token_cache_bytes: u64,
}

impl PromptArgs {
    /// Returns the defaults for rendering conversations.
    ///
    /// # Errors
    /// [`CliError::Usage`] for a template variable that the flag must not set.
    pub(crate) fn chat_defaults(&self) -> Result<ChatDefaults, CliError> {
        let template_kwargs = self.default_chat_template_kwargs.clone();
        check_template_kwargs(&template_kwargs)
            .map_err(|error| CliError::Usage(format!("--default-chat-template-kwargs: {error}")))?;
        Ok(ChatDefaults {
            template_kwargs,
            excludes_uncalled_tools: self.exclude_tools_when_tool_choice_none,
        })
    }
}

/// The form of message content, under vLLM's names.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum ContentFormatChoice {
    Auto,
    String,
    Openai,
}

impl ContentFormatChoice {
    /// Returns the form, or `None` if the template decides.
    pub(crate) fn explicit(self) -> Option<ContentFormat> {
        match self {
            Self::Auto => None,
            Self::String => Some(ContentFormat::String),
            Self::Openai => Some(ContentFormat::Parts),
        }
    }
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum ReasoningFieldsChoice {
    Both,
    Reasoning,
    #[value(name = "reasoning_content")]
    ReasoningContent,
}

impl From<ReasoningFieldsChoice> for ReasoningFields {
    fn from(choice: ReasoningFieldsChoice) -> Self {
        match choice {
            ReasoningFieldsChoice::Both => Self { reasoning: true, reasoning_content: true },
            ReasoningFieldsChoice::Reasoning => Self { reasoning: true, reasoning_content: false },
            ReasoningFieldsChoice::ReasoningContent => {
                Self { reasoning: false, reasoning_content: true }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::cli::Cli;

    #[test]
    fn unknown_parser_names_flag_and_nearest_name() {
        let words = ["chiasm", "serve", "m", "--tool-call-parser", "hermse"];
        let error = Cli::parse_args(words).unwrap_err().to_string();
        for part in ["'hermse' for '--tool-call-parser", "a similar value exists: 'hermes'"] {
            assert!(error.contains(part), "{error}");
        }
        assert!(!error.contains("deepseek_r1"), "{error}");
        let words = ["chiasm", "serve", "m", "--reasoning-parser", "deepseek_r1"];
        assert!(Cli::parse_args(words).is_ok());
    }
}
