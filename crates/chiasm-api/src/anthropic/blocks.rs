//! Blocks of a message's content.

use std::fmt;

use chiasm_request::MediaRef;
use chiasm_types::Modality;
use serde::de::{Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Value, json};

use super::result_content::{ResultContent, unsupported};
use super::sources::{Passage, Source};
use crate::error::ApiError;
use crate::openai::intake::{Intake, Seed};
use crate::openai::messages::elements;

/// One block.
pub(super) enum Block {
    Text(String),
    Image(MediaRef),
    /// A document or a search result as it is written in the prompt, and its type.
    Passage(&'static str, String),
    Thinking(String),
    /// What the model thought, and nobody may know.
    RedactedThinking,
    /// A call as chat templates are given it.
    ToolUse(Value),
    ToolResult {
        id: String,
        content: ResultContent,
    },
}

impl Block {
    /// Its type in requests.
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

/// A block of that: text, a passage or an image.
struct ResultBlock(Block);

/// The fields of a block that mean something. Which of them it may have is known with its type,
/// which may come last.
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
        let (mut fields, mut unknown) = (BlockFields::default(), None);
        while let Some(name) = intake.name(&mut map)? {
            let outer = intake.enter(format_args!(".{name}"));
            match &*name {
                "type" => fields.kind = intake.text(&mut map)?,
                "text" => fields.text = prompt_text(intake, &mut map)?,
                "thinking" => fields.thinking = prompt_text(intake, &mut map)?,
                "source" => fields.source = map.next_value_seed(intake.seed::<Option<Source>>())?,
                "title" => fields.title = prompt_text(intake, &mut map)?,
                "context" => fields.context = prompt_text(intake, &mut map)?,
                "citations" => {
                    fields.citations = Some(map.next_value_seed(intake.seed::<Value>())?)
                }
                "id" => fields.id = intake.text(&mut map)?,
                "name" => fields.name = intake.text(&mut map)?,
                "input" => {
                    fields.input = Some(map.next_value_seed(intake.seed::<Value>())?)
                        .filter(|input| !input.is_null())
                }
                "tool_use_id" => fields.tool_use_id = intake.text(&mut map)?,
                "content" => {
                    fields.content = map.next_value_seed(intake.seed::<Option<ResultContent>>())?
                }
                // They do not change the prompt.
                "signature" | "data" => drop(intake.borrowed(&mut map)?),
                "cache_control" | "caller" | "is_error" => {
                    drop(map.next_value_seed(intake.seed::<Value>())?)
                }
                _ => intake.unknown(&mut map, &mut unknown)?,
            }
            intake.leave(outer);
        }
        let block = fields.take_block(intake)?;
        intake.refuse_unknown(unknown.or(fields.left().map(|field| intake.below(field))))?;
        Ok(block)
    }
}

impl BlockFields {
    /// Takes what a block of this type needs.
    fn take_block<E: Error>(&mut self, intake: &mut Intake) -> Result<Block, E> {
        let kind = self.kind.take().ok_or_else(|| intake.missing(".type"))?;
        Ok(match kind.as_str() {
            "text" => Block::Text(self.text.take().ok_or_else(|| intake.missing(".text"))?),
            "thinking" => {
                Block::Thinking(self.thinking.take().ok_or_else(|| intake.missing(".thinking"))?)
            }
            "redacted_thinking" => Block::RedactedThinking,
            "image" => {
                let source = self.take_source(intake)?.of_image(intake)?;
                let field = intake.below(".source");
                Block::Image(MediaRef {
                    modality: Modality::Image,
                    source: Some(source),
                    uuid: None,
                    field,
                })
            }
            "document" => {
                let text = self.take_source(intake)?.of_document(intake)?;
                let (source, context) = (self.title.take(), self.context.take());
                let passage = Passage { kind: "document", source, title: None, context, text };
                Block::Passage("document", self.written(intake, &passage)?)
            }
            "search_result" => {
                let source = self.take_source(intake)?.of_search_result(intake)?;
                let title = self.title.take().ok_or_else(|| intake.missing(".title"))?;
                let content = self.content.take().ok_or_else(|| intake.missing(".content"))?;
                let text = content.text_alone(intake)?;
                let kind = "search_result";
                let passage =
                    Passage { kind, source: Some(source), title: Some(title), context: None, text };
                Block::Passage(kind, self.written(intake, &passage)?)
            }
            "tool_use" => Block::ToolUse(self.take_call(intake)?),
            "tool_result" => {
                let id = self.tool_use_id.take().ok_or_else(|| intake.missing(".tool_use_id"))?;
                let content = self.content.take().unwrap_or_default();
                // It becomes a message of its own, and its images another one.
                intake.count_message()?;
                if !content.images.is_empty() {
                    intake.count_message()?;
                }
                Block::ToolResult { id, content }
            }
            other => {
                let known = "text, image, document, search_result, thinking, redacted_thinking, tool_use or tool_result";
                let message = format!("blocks of type '{other}' are not supported; use {known}");
                return Err(intake.refuse(unsupported(intake.below(".type"), message)));
            }
        })
    }

    fn take_source<E: Error>(&mut self, intake: &mut Intake) -> Result<Source, E> {
        self.source.take().ok_or_else(|| intake.missing(".source"))
    }

    /// A passage as it is written. Models here can't cite it.
    fn written<E: Error>(&self, intake: &mut Intake, passage: &Passage) -> Result<String, E> {
        if self.citations.as_ref().is_some_and(|citations| citations["enabled"] == true) {
            let name = intake.below(".citations.enabled");
            let message = format!("'{name}' can't be true: no answer here has citations");
            return Err(intake.refuse(unsupported(name, message)));
        }
        let written = passage.written();
        intake.take(written.len() as u64)?;
        Ok(written)
    }

    fn take_call<E: Error>(&mut self, intake: &mut Intake) -> Result<Value, E> {
        let id = self.id.take().ok_or_else(|| intake.missing(".id"))?;
        let name = self.name.take().ok_or_else(|| intake.missing(".name"))?;
        let input = self.input.take().unwrap_or_else(|| json!({}));
        if !input.is_object() {
            let field = intake.below(".input");
            let error = ApiError::invalid(&field, format!("'{field}' must be an object"));
            return Err(intake.refuse(error));
        }
        let arguments = input.to_string();
        intake.take(arguments.len() as u64)?;
        Ok(
            json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}),
        )
    }

    /// A field that has not been taken.
    fn left(&self) -> Option<&'static str> {
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
        fields.into_iter().find_map(|(name, is_left)| is_left.then_some(name))
    }
}

fn prompt_text<'de, A: MapAccess<'de>>(
    intake: &mut Intake,
    map: &mut A,
) -> Result<Option<String>, A::Error> {
    intake.borrowed(map)?.map(|text| intake.own_prompt(&text)).transpose()
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
                    "here is text and are images, documents and search results, not '{}'",
                    other.kind()
                );
                Err(intake.refuse(unsupported(intake.below(".type"), message)))
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
        let text = self.intake.own_prompt(text)?;
        Ok(Some(ResultContent { text, images: Vec::new() }))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        let intake = self.intake;
        let (mut texts, mut images) = (Vec::new(), Vec::new());
        for ResultBlock(block) in elements(intake, &mut seq)? {
            match block {
                Block::Text(text) | Block::Passage(_, text) => intake.push(&mut texts, text)?,
                Block::Image(image) => intake.push(&mut images, image)?,
                _ => {}
            }
        }
        Ok(Some(ResultContent { text: texts.join("\n"), images }))
    }
}
