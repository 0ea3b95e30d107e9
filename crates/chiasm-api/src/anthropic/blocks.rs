//! The blocks of a message's content.

use std::fmt;

use chiasm_request::MediaRef;
use chiasm_types::Modality;
use serde::de::{Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Value, json};

use super::result_content::{ResultContent, unsupported};
use super::sources::{Passage, Source};
use crate::error::{ApiError, excerpt};
use crate::openai::intake::{Intake, Seed};
use crate::openai::messages::read_list;

/// A block of a message's content.
pub(super) enum Block {
    Text(String),
    Image(MediaRef),
    /// The type of a document or a search result, and its text for the prompt.
    Passage(&'static str, String),
    Thinking(String),
    /// Reasoning whose text is withheld.
    RedactedThinking,
    /// A call in the format for chat templates.
    ToolUse(Value),
    ToolResult {
        id: String,
        content: ResultContent,
    },
}

impl Block {
    /// Returns the block's type in requests.
    pub(super) fn kind(&self) -> &'static str {
        match self {
            Self::Text(_) => "text",
            Self::Image(_) => "image",
            Self::Passage(kind, _) => kind,
            Self::Thinking(_) => "thinking",
            Self::RedactedThinking => "redacted_thinking",
            Self::ToolUse(_) => "tool_use",
            Self::ToolResult { .. } => "tool_result",
        }
    }
}

/// A block within a result: text, a passage or an image.
struct ResultBlock(Block);

/// The fields of a block that have an effect. The type decides which of them are allowed, and may
/// come last.
#[derive(Default)]
struct BlockFields {
    kind: Option<String>,
    text: Option<String>,
    thinking: Option<String>,
    source: Option<Source>,
    title: Option<String>,
    context: Option<String>,
    citations: Option<Value>,
    id: Option<String>,
    name: Option<String>,
    input: Option<Value>,
    tool_use_id: Option<String>,
    content: Option<ResultContent>,
}

impl<'de> Visitor<'de> for Seed<'_, Block> {
    type Value = Block;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Block, A::Error> {
        let intake = self.intake;
        intake.count_part()?;
        let mut fields = BlockFields::default();
        let mut unknown = None;
        while let Some(name) = intake.next_name(&mut map)? {
            let outer = intake.enter(format_args!(".{name}"));
            match &*name {
                "type" => fields.kind = intake.next_text(&mut map)?,
                "text" => fields.text = prompt_text(intake, &mut map)?,
                "thinking" => fields.thinking = prompt_text(intake, &mut map)?,
                "source" => fields.source = map.next_value_seed(intake.seed::<Option<Source>>())?,
                "title" => fields.title = prompt_text(intake, &mut map)?,
                "context" => fields.context = prompt_text(intake, &mut map)?,
                "citations" => {
                    fields.citations = Some(map.next_value_seed(intake.seed::<Value>())?)
                }
                "id" => fields.id = intake.next_text(&mut map)?,
                "name" => fields.name = intake.next_text(&mut map)?,
                "input" => {
                    fields.input = Some(map.next_value_seed(intake.seed::<Value>())?)
                        .filter(|input| !input.is_null())
                }
                "tool_use_id" => fields.tool_use_id = intake.next_text(&mut map)?,
                "content" => {
                    fields.content = map.next_value_seed(intake.seed::<Option<ResultContent>>())?
                }
                // These do not change the prompt.
                "signature" | "data" => drop(intake.next_str(&mut map)?),
                "cache_control" | "caller" | "is_error" => {
                    drop(map.next_value_seed(intake.seed::<Value>())?)
                }
                _ => intake.skip_unknown(&mut map, &mut unknown)?,
            }
            intake.leave(outer);
        }
        let block = fields.take_block(intake)?;
        intake.refuse_unknown(
            unknown.or(fields.remaining_field().map(|field| intake.child_path(field))),
        )?;
        Ok(block)
    }
}

impl BlockFields {
    /// Takes the fields of a block of this type.
    fn take_block<E: Error>(&mut self, intake: &mut Intake) -> Result<Block, E> {
        let kind = self.kind.take().ok_or_else(|| intake.missing(".type"))?;
        Ok(match kind.as_str() {
            "text" => Block::Text(self.text.take().ok_or_else(|| intake.missing(".text"))?),
            "thinking" => {
                Block::Thinking(self.thinking.take().ok_or_else(|| intake.missing(".thinking"))?)
            }
            "redacted_thinking" => Block::RedactedThinking,
            "image" => {
                let source = self.take_source(intake)?.into_image(intake)?;
                let field = intake.child_path(".source");
                Block::Image(MediaRef {
                    modality: Modality::Image,
                    source: Some(source),
                    uuid: None,
                    field,
                })
            }
            "document" => {
                let text = self.take_source(intake)?.into_document(intake)?;
                let source = self.title.take();
                let context = self.context.take();
                let passage = Passage { kind: "document", source, title: None, context, text };
                Block::Passage("document", self.passage_text(intake, &passage)?)
            }
            "search_result" => {
                let source = self.take_source(intake)?.into_origin(intake)?;
                let title = self.title.take().ok_or_else(|| intake.missing(".title"))?;
                let content = self.content.take().ok_or_else(|| intake.missing(".content"))?;
                let text = content.into_text(intake)?;
                let kind = "search_result";
                let passage =
                    Passage { kind, source: Some(source), title: Some(title), context: None, text };
                Block::Passage(kind, self.passage_text(intake, &passage)?)
            }
            "tool_use" => Block::ToolUse(self.take_call(intake)?),
            "tool_result" => {
                let id = self.tool_use_id.take().ok_or_else(|| intake.missing(".tool_use_id"))?;
                let content = self.content.take().unwrap_or_default();
                // The result becomes a message, and its images become another one.
                intake.count_message()?;
                if !content.images.is_empty() {
                    intake.count_message()?;
                }
                Block::ToolResult { id, content }
            }
            other => {
                let known = "text, image, document, search_result, thinking, \
                             redacted_thinking, tool_use or tool_result";
                let other = excerpt(other);
                let message = format!("blocks of type '{other}' are not supported; use {known}");
                return Err(intake.refuse(unsupported(intake.child_path(".type"), message)));
            }
        })
    }

    fn take_source<E: Error>(&mut self, intake: &mut Intake) -> Result<Source, E> {
        self.source.take().ok_or_else(|| intake.missing(".source"))
    }

    /// Returns the text of a passage for the prompt.
    ///
    /// # Errors
    /// Fails if the block asks for citations, which no answer has.
    fn passage_text<E: Error>(&self, intake: &mut Intake, passage: &Passage) -> Result<String, E> {
        if self.citations.as_ref().is_some_and(|citations| citations["enabled"] == true) {
            let name = intake.child_path(".citations.enabled");
            let message = format!("'{name}' must be false: citations are not supported");
            return Err(intake.refuse(unsupported(name, message)));
        }
        let text = passage.to_prompt_text();
        intake.reserve(text.len() as u64)?;
        Ok(text)
    }

    /// Takes a call, in the format for chat templates.
    fn take_call<E: Error>(&mut self, intake: &mut Intake) -> Result<Value, E> {
        let id = self.id.take().ok_or_else(|| intake.missing(".id"))?;
        let name = self.name.take().ok_or_else(|| intake.missing(".name"))?;
        let input = self.input.take().unwrap_or_else(|| json!({}));
        if !input.is_object() {
            let field = intake.child_path(".input");
            let error = ApiError::invalid(&field, format!("'{field}' must be an object"));
            return Err(intake.refuse(error));
        }
        let arguments = input.to_string();
        intake.reserve(arguments.len() as u64)?;
        let function = json!({"name": name, "arguments": arguments});
        Ok(json!({"id": id, "type": "function", "function": function}))
    }

    /// Returns a field that has not been taken.
    fn remaining_field(&self) -> Option<&'static str> {
        let fields = [
            (".text", self.text.is_some()),
            (".thinking", self.thinking.is_some()),
            (".source", self.source.is_some()),
            (".title", self.title.is_some()),
            (".context", self.context.is_some()),
            (".id", self.id.is_some()),
            (".name", self.name.is_some()),
            (".input", self.input.is_some()),
            (".tool_use_id", self.tool_use_id.is_some()),
            (".content", self.content.is_some()),
        ];
        fields.into_iter().find_map(|(name, is_present)| is_present.then_some(name))
    }
}

/// Reads a field's text, which becomes a part of the prompt; `None` for null.
fn prompt_text<'de, A: MapAccess<'de>>(
    intake: &mut Intake,
    map: &mut A,
) -> Result<Option<String>, A::Error> {
    intake.next_str(map)?.map(|text| intake.copy_prompt(&text)).transpose()
}

impl<'de> Visitor<'de> for Seed<'_, ResultBlock> {
    type Value = ResultBlock;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<ResultBlock, A::Error> {
        let intake = self.intake;
        match intake.seed::<Block>().visit_map(map)? {
            block @ (Block::Text(_) | Block::Image(_) | Block::Passage(..)) => {
                Ok(ResultBlock(block))
            }
            other => {
                let message = format!(
                    "only text, images, documents and search results are allowed here, not '{}'",
                    other.kind()
                );
                Err(intake.refuse(unsupported(intake.child_path(".type"), message)))
            }
        }
    }
}

impl<'de> Visitor<'de> for Seed<'_, Option<ResultContent>> {
    type Value = Option<ResultContent>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string or a list of blocks")
    }

    fn visit_unit<E: Error>(self) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Self::Value, E> {
        let text = self.intake.copy_prompt(text)?;
        Ok(Some(ResultContent { text, images: Vec::new() }))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        let intake = self.intake;
        let mut texts = Vec::new();
        let mut images = Vec::new();
        for ResultBlock(block) in read_list(intake, &mut seq)? {
            match block {
                Block::Text(text) | Block::Passage(_, text) => intake.push(&mut texts, text)?,
                Block::Image(image) => intake.push(&mut images, image)?,
                _ => {}
            }
        }
        Ok(Some(ResultContent { text: texts.join("\n"), images }))
    }
}
