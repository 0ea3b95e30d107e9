//! What a request's prompt is made of, for servers of which nothing is known: pieces of its text, and of the hashes of its media items.

use chiasm_types::TokenId;
use serde_json::{Map, Value};

use super::named::image_urls;

/// The parts of a body that come before each other in a prompt, whatever their order in the body is.
const PARTS: [&str; 6] = ["tools", "system", "instructions", "messages", "input", "prompt"];
/// Pieces of four bytes that a media item counts for where its tokens are not known: about those of a picture.
const PIECES_OF_ITEM: usize = 1024;
/// How URLs begin that are media items themselves.
const DATA: &str = "data:";

/// What a request's prompt is made of, in pieces of four bytes. Each text begins with a piece, so that what is added to a conversation
/// leaves the pieces before it as they are. `images` are the tokens of each image in its messages, if they are known: beside workers that
/// count a prompt's tokens it has to be about as long for all.
pub(super) fn pieces(fields: &Map<String, Value>, images: &[usize]) -> Vec<TokenId> {
    let urls: Vec<&str> = image_urls(fields).collect();
    let known: Vec<(&str, usize)> = match urls.len() == images.len() {
        true => urls.into_iter().zip(images.iter().copied()).collect(),
        false => Vec::new(),
    };
    let mut pieces = Pieces { made: Vec::new(), known };
    for part in PARTS {
        if let Some(value) = fields.get(part) {
            pieces.push_text(part);
            pieces.push(value);
        }
    }
    pieces.made
}

/// Pieces so far, and the images whose tokens are known.
struct Pieces<'a> {
    made: Vec<TokenId>,
    known: Vec<(&'a str, usize)>,
}

impl Pieces<'_> {
    fn push(&mut self, value: &Value) {
        match value {
            Value::String(text) if text.starts_with(DATA) => {
                let known = self.known.iter().find(|(url, _)| std::ptr::eq(*url, text.as_str()));
                let count = known.map_or(PIECES_OF_ITEM, |(_, tokens)| *tokens);
                self.push_item(text, count);
            }
            Value::String(text) => self.push_text(text),
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

    /// Equal items are equal pieces, and others differ from the first piece on.
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
        let picture =
            |data: &str| json!({"type": "image_url", "image_url": {"url": format!("data:image/png;base64,{data}")}});
        let first = json!({"role": "user", "content": [picture("AAAA"), {"type": "text", "text": "what?"}]});
        let one = of(&json!({"messages": [first], "max_tokens": 5, "stream": true}));
        let two = of(&json!({"stream": false, "messages": [first, {"role": "assistant", "content": "it is"}]}));
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
        let part =
            |data: &str| json!({"type": "image_url", "image_url": {"url": format!("data:image/png;base64,{data}")}});
        let body = json!({"messages": [{"role": "user", "content": [part("AAAA"), part("AAAB")]}]});
        let fields = body.as_object().unwrap();
        let count = |images: &[usize]| pieces(fields, images).len();
        assert_eq!(count(&[]) - count(&[10, 30]), 2 * PIECES_OF_ITEM - 40);
        assert_eq!(count(&[10]), count(&[]), "there are others than those that are known");
    }
}
