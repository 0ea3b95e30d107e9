//! Flags of how answers are read and shown.

use chiasm_server::ReasoningFields;
use chiasm_server::answers::ParserChoice;
use clap::{Args, ValueEnum};

#[derive(Debug, Args)]
pub(crate) struct AnswerArgs {
    /// How the model writes tool calls: a name of vLLM's parsers, auto for what its chat template speaks of, or none
    #[arg(long, env = "CHIASM_TOOL_CALL_PARSER", value_name = "NAME", default_value = "auto")]
    pub(crate) tool_call_parser: ParserChoice,
    /// How the model writes reasoning: a name of vLLM's parsers, which engines are told too, auto for what its chat template speaks of,
    /// or none
    #[arg(long, env = "CHIASM_REASONING_PARSER", value_name = "NAME", default_value = "auto")]
    pub(crate) reasoning_parser: ParserChoice,
    /// The fields of messages that have reasoning: vLLM's, the older name that many clients read, or both
    #[arg(long, env = "CHIASM_REASONING_FIELDS", value_enum, default_value = "both")]
    pub(crate) reasoning_fields: FieldChoice,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum FieldChoice {
    Both,
    Reasoning,
    #[value(name = "reasoning_content")]
    ReasoningContent,
}

impl From<FieldChoice> for ReasoningFields {
    fn from(choice: FieldChoice) -> Self {
        match choice {
            FieldChoice::Both => Self { reasoning: true, reasoning_content: true },
            FieldChoice::Reasoning => Self { reasoning: true, reasoning_content: false },
            FieldChoice::ReasoningContent => Self { reasoning: false, reasoning_content: true },
        }
    }
}
