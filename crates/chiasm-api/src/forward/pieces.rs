//! An approximation of a request's prompt, for servers that don't report their cache contents.
//!
//! It consists of pieces of the prompt's text and of the hashes of its media items.

use std::collections::HashMap;

use chiasm_types::TokenId;
use serde_json::{Map, Value};

use crate::openai::media_parts::MediaKind;

/// The fields that make up a prompt, in the order of the prompt. Their order in the body is
/// irrelevant.
const PROMPT_FIELDS: [&str; 6] = ["tools", "system", "instructions", "messages", "input", "prompt"];
/// The fields that may contain media items.
const MESSAGE_FIELDS: [&str; 2] = ["messages", "input"];
/// The number of pieces for a media item with an unknown number of tokens: about as many as a
/// picture has tokens.
const PIECES_PER_ITEM: usize = 1024;
/// The scheme of URLs that contain the media item itself.
const DATA_SCHEME: &str = "data:";

/// Splits a request's prompt into pieces of four bytes. Each text starts a new piece, so a
/// conversation that grows keeps its leading pieces.
///
/// `items` has the token count of each media item in the messages, if these are known. They make
/// the prompt about as long here as for workers that count its tokens.
pub fn prompt_pieces(fields: &Map<String, Value>, items: &[usize]) -> Vec<TokenId> {
    let mut texts = Vec::new();
    MESSAGE_FIELDS
        .iter()
        .filter_map(|field| fields.get(*field))
        .for_each(|messages| find_items(messages, &mut texts));
    let counts = texts.iter().enumerate().map(|(index, text)| {
        let known = items.get(index).filter(|_| items.len() == texts.len());
        (text.as_ptr(), known.copied().unwrap_or(PIECES_PER_ITEM))
    });
    let mut pieces = Pieces { pieces: Vec::new(), items: counts.collect() };
    for field in PROMPT_FIELDS {
        if let Some(value) = fields.get(field) {
            pieces.push_text(field);
            pieces.push(value);
        }
    }
    pieces.pieces
}

/// Collects the URLs or inline data of media items, in order of appearance.
fn find_items<'a>(value: &'a Value, texts: &mut Vec<&'a str>) {
    match value {
        Value::Array(values) => values.iter().for_each(|value| find_items(value, texts)),
        Value::Object(fields) => match item_text(fields) {
            Some(text) => texts.push(text),
            None => fields.values().for_each(|value| find_items(value, texts)),
        },
        _ => {}
    }
}

/// Returns the URL or the inline data of a part's media item; `None` if the part has no item.
fn item_text(part: &Map<String, Value>) -> Option<&str> {
    let text = if let Some(kind) = MediaKind::find(part) {
        let item = part.get(kind.field)?;
        item.as_str().or_else(|| item.get(if kind.is_inline { "data" } else { "url" })?.as_str())
    } else {
        // Anthropic's images and documents.
        let source = part.get("source")?;
        let is_file = matches!(source.get("type")?.as_str()?, "base64" | "url");
        source.get("data").or_else(|| source.get("url")).and_then(Value::as_str).filter(|_| is_file)
    };
    text.filter(|text| !text.is_empty())
}

/// The pieces of a prompt so far.
struct Pieces {
    pieces: Vec<TokenId>,
    /// The number of pieces of each media item, keyed by the address of its URL or data.
    items: HashMap<*const u8, usize>,
}

impl Pieces {
    fn push(&mut self, value: &Value) {
        match value {
            Value::String(text) => match self.items.get(&text.as_ptr()) {
                Some(&count) => self.push_item(text, count),
                None if text.starts_with(DATA_SCHEME) => self.push_item(text, PIECES_PER_ITEM),
                None => self.push_text(text),
            },
            Value::Array(values) => values.iter().for_each(|value| self.push(value)),
            Value::Object(fields) => {
                for (name, value) in fields {
                    self.push_text(name);
                    self.push(value);
                }
            }
            other => self.push_text(&other.to_string()),
        }
    }

    fn push_text(&mut self, text: &str) {
        let (pieces, rest) = text.as_bytes().as_chunks();
        self.pieces.extend(pieces.iter().map(|piece| TokenId(u32::from_le_bytes(*piece))));
        if !rest.is_empty() {
            let mut piece = [0; 4];
            piece[..rest.len()].copy_from_slice(rest);
            self.pieces.push(TokenId(u32::from_le_bytes(piece)));
        }
    }

    /// Appends `count` pieces of the item's hash. Different items differ from the first piece on.
    fn push_item(&mut self, url: &str, count: usize) {
        let mut bytes = vec![0; 4 * count];
        blake3::Hasher::new().update(url.as_bytes()).finalize_xof().fill(&mut bytes);
        let (pieces, _) = bytes.as_chunks();
        self.pieces.extend(pieces.iter().map(|piece| TokenId(u32::from_le_bytes(*piece))));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pieces_of(body: &Value) -> Vec<TokenId> {
        prompt_pieces(body.as_object().unwrap(), &[])
    }

    #[test]
    fn grown_conversation_keeps_leading_pieces() {
        let picture = |data: &str| {
            let url = format!("data:image/png;base64,{data}");
            json!({"type": "image_url", "image_url": {"url": url}})
        };
        let question = json!({"type": "text", "text": "what?"});
        let first = json!({"role": "user", "content": [picture("AAAA"), question]});
        let one = pieces_of(&json!({"messages": [first], "max_tokens": 5, "stream": true}));
        let reply = json!({"role": "assistant", "content": "it is"});
        let two = pieces_of(&json!({"stream": false, "messages": [first, reply]}));
        assert!(two.len() > one.len() && two.starts_with(&one));
        let mut other = first.clone();
        other["content"][0] = picture("AAAB");
        let other = pieces_of(&json!({"messages": [other]}));
        let same = one.iter().zip(&other).take_while(|(one, other)| one == other).count();
        assert!(same < 40, "the prompts differ from the picture on: {same}");
        assert!(one.len() > PIECES_PER_ITEM);
    }

    #[test]
    fn image_with_known_tokens_has_that_many_pieces() {
        let part = |data: &str| {
            let url = format!("data:image/png;base64,{data}");
            json!({"type": "image_url", "image_url": {"url": url}})
        };
        let body = json!({"messages": [{"role": "user", "content": [part("AAAA"), part("AAAB")]}]});
        let fields = body.as_object().unwrap();
        let count = |images: &[usize]| prompt_pieces(fields, images).len();
        assert_eq!(count(&[]) - count(&[10, 30]), 2 * PIECES_PER_ITEM - 40);
        assert_eq!(count(&[10]), count(&[]), "counts for other items are ignored");
    }

    #[test]
    fn item_length_is_independent_of_its_form() {
        let data = "A".repeat(100_000);
        let body = |part: Value| json!({"messages": [{"role": "user", "content": [part]}]});
        let image = |url: &str| body(json!({"type": "image_url", "image_url": {"url": url}}));
        let expected = pieces_of(&image(&format!("data:image/png;base64,{data}"))).len();
        for part in [
            image("http://a/b.png"),
            body(json!({"image_url": "http://a/b.png"})),
            body(json!({"type": "video_url", "video_url": {"url": "http://a/b.mp4"}})),
            body(json!({"type": "input_audio", "input_audio": {"data": data, "format": "wav"}})),
            body(json!({
                "type": "image",
                "source": {"type": "base64", "media_type": "image/png", "data": data},
            })),
            body(json!({"type": "image", "source": {"type": "url", "url": "http://a/b.png"}})),
            json!({"input": [{
                "role": "user",
                "content": [{"type": "input_image", "image_url": "http://a"}],
            }]}),
        ] {
            let pieces = pieces_of(&part).len();
            assert!(
                pieces.abs_diff(expected) < 40 && pieces > PIECES_PER_ITEM,
                "{pieces}, not {expected}: {part}"
            );
        }
        let text = body(
            json!({"type": "document", "source": {"type": "text", "data": "word ".repeat(8000)}}),
        );
        assert!(pieces_of(&text).len() > 10_000, "a document's text is no item");
    }

    #[test]
    fn tool_schema_is_no_item() {
        let schema = json!({"image_url": {"type": "string", "url": "x".repeat(8)}});
        let body = json!({"tools": [{"function": {"parameters": {"properties": schema}}}]});
        assert!(pieces_of(&body).len() < 100);
    }
}
