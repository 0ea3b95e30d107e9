//! An approximation of a request's prompt, for servers that don't say what they hold: pieces of its
//! text, and of the hashes of its media items.

use std::collections::HashMap;

use chiasm_types::TokenId;
use serde_json::{Map, Value};

use crate::openai::media_parts::MediaKind;

/// The parts of a body that come before each other in a prompt, whatever their order in the body
/// is.
const PARTS: [&str; 6] = ["tools", "system", "instructions", "messages", "input", "prompt"];
/// The parts that have media items.
const MESSAGES: [&str; 2] = ["messages", "input"];
/// The pieces that a media item counts for if its tokens are not known: about as many as a picture
/// has tokens.
const PIECES_OF_ITEM: usize = 1024;
/// The beginning of URLs that are media items themselves.
const DATA: &str = "data:";

/// Returns a request's prompt in pieces of four bytes. Each text starts a new piece, so a longer
/// conversation keeps the pieces of its beginning.
///
/// `items` has the token count of each media item in the messages, if these are known. They make
/// the prompt about as long here as for workers that count its tokens.
pub fn pieces(fields: &Map<String, Value>, items: &[usize]) -> Vec<TokenId> {
    let mut texts = Vec::new();
    MESSAGES
        .iter()
        .filter_map(|list| fields.get(*list))
        .for_each(|messages| find_items(messages, &mut texts));
    let counts = texts.iter().enumerate().map(|(at, text)| {
        let known = items.get(at).filter(|_| items.len() == texts.len());
        (text.as_ptr(), known.copied().unwrap_or(PIECES_OF_ITEM))
    });
    let mut pieces = Pieces { made: Vec::new(), items: counts.collect() };
    for part in PARTS {
        if let Some(value) = fields.get(part) {
            pieces.push_text(part);
            pieces.push(value);
        }
    }
    pieces.made
}

/// Collects the texts of media items, in order of appearance.
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

/// Returns the text of a part's media item: its URL, or the item itself. `None` if the part has
/// none.
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
    made: Vec<TokenId>,
    /// The number of pieces of each media item, by the address of its text.
    items: HashMap<*const u8, usize>,
}

impl Pieces {
    fn push(&mut self, value: &Value) {
        match value {
            Value::String(text) => match self.items.get(&text.as_ptr()) {
                Some(&count) => self.push_item(text, count),
                None if text.starts_with(DATA) => self.push_item(text, PIECES_OF_ITEM),
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
        self.made.extend(pieces.iter().map(|piece| TokenId(u32::from_le_bytes(*piece))));
        if !rest.is_empty() {
            let mut piece = [0; 4];
            piece[..rest.len()].copy_from_slice(rest);
            self.made.push(TokenId(u32::from_le_bytes(piece)));
        }
    }

    /// Appends the pieces of an item. Different items differ from the first piece on.
    fn push_item(&mut self, url: &str, count: usize) {
        let mut bytes = vec![0; 4 * count];
        blake3::Hasher::new().update(url.as_bytes()).finalize_xof().fill(&mut bytes);
        let (pieces, _) = bytes.as_chunks();
        self.made.extend(pieces.iter().map(|piece| TokenId(u32::from_le_bytes(*piece))));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn of(body: &Value) -> Vec<TokenId> {
        pieces(body.as_object().unwrap(), &[])
    }

    #[test]
    fn what_is_added_to_a_conversation_leaves_what_was_before_it() {
        let picture = |data: &str| json!({"type": "image_url", "image_url": {"url": format!("data:image/png;base64,{data}")}});
        let first = json!({"role": "user", "content": [picture("AAAA"), {"type": "text", "text": "what?"}]});
        let one = of(&json!({"messages": [first], "max_tokens": 5, "stream": true}));
        let two = of(
            &json!({"stream": false, "messages": [first, {"role": "assistant", "content": "it is"}]}),
        );
        assert!(two.len() > one.len() && two.starts_with(&one));
        let mut other = first.clone();
        other["content"][0] = picture("AAAB");
        let other = of(&json!({"messages": [other]}));
        let same = one.iter().zip(&other).take_while(|(one, other)| one == other).count();
        assert!(same < 40, "another picture is another prompt from there on: {same}");
        assert!(one.len() > PIECES_OF_ITEM);
    }

    #[test]
    fn an_image_is_as_long_as_its_tokens_where_they_are_known() {
        let part = |data: &str| json!({"type": "image_url", "image_url": {"url": format!("data:image/png;base64,{data}")}});
        let body = json!({"messages": [{"role": "user", "content": [part("AAAA"), part("AAAB")]}]});
        let fields = body.as_object().unwrap();
        let count = |images: &[usize]| pieces(fields, images).len();
        assert_eq!(count(&[]) - count(&[10, 30]), 2 * PIECES_OF_ITEM - 40);
        assert_eq!(count(&[10]), count(&[]), "there are others than those that are known");
    }

    #[test]
    fn item_counts_the_same_however_it_is_sent() {
        let data = "A".repeat(100_000);
        let body = |part: Value| json!({"messages": [{"role": "user", "content": [part]}]});
        let image = |url: &str| body(json!({"type": "image_url", "image_url": {"url": url}}));
        let expected = of(&image(&format!("data:image/png;base64,{data}"))).len();
        for part in [
            image("http://a/b.png"),
            body(json!({"image_url": "http://a/b.png"})),
            body(json!({"type": "video_url", "video_url": {"url": "http://a/b.mp4"}})),
            body(json!({"type": "input_audio", "input_audio": {"data": data, "format": "wav"}})),
            body(
                json!({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}),
            ),
            body(json!({"type": "image", "source": {"type": "url", "url": "http://a/b.png"}})),
            json!({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://a"}]}]}),
        ] {
            let pieces = of(&part).len();
            assert!(
                pieces.abs_diff(expected) < 40 && pieces > PIECES_OF_ITEM,
                "{pieces}, not {expected}: {part}"
            );
        }
        let text = body(
            json!({"type": "document", "source": {"type": "text", "data": "word ".repeat(8000)}}),
        );
        assert!(of(&text).len() > 10_000, "a text is one");
    }

    #[test]
    fn schema_of_a_tool_is_no_item() {
        let schema = json!({"image_url": {"type": "string", "url": "x".repeat(8)}});
        let body = json!({"tools": [{"function": {"parameters": {"properties": schema}}}]});
        assert!(of(&body).len() < 100);
    }
}
