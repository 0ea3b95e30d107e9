//! What a request's prompt is made of, for servers of which nothing is known: pieces of its text, and of the hashes of its media items.

use chiasm_types::TokenId;
use serde_json::{Map, Value};

/// The parts of a body that come before each other in a prompt, whatever their order in the body is.
const PARTS: [&str; 6] = ["tools", "system", "instructions", "messages", "input", "prompt"];
/// Pieces of four bytes that a media item counts for: about the tokens of a picture.
const PIECES_OF_ITEM: usize = 1024;
/// How URLs begin that are media items themselves.
const DATA: &str = "data:";

/// What a request's prompt is made of, in pieces of four bytes. Each text begins with a piece, so that what is added to a conversation
/// leaves the pieces before it as they are.
pub(super) fn pieces(fields: &Map<String, Value>) -> Vec<TokenId> {
    let mut pieces = Vec::new();
    for part in PARTS {
        if let Some(value) = fields.get(part) {
            push_text(&mut pieces, part);
            push(&mut pieces, value);
        }
    }
    pieces
}

fn push(pieces: &mut Vec<TokenId>, value: &Value) {
    match value {
        Value::String(text) if text.starts_with(DATA) => push_item(pieces, text),
        Value::String(text) => push_text(pieces, text),
        Value::Array(values) => values.iter().for_each(|value| push(pieces, value)),
        Value::Object(fields) => {
            for (name, value) in fields {
                push_text(pieces, name);
                push(pieces, value);
            }
        }
        other => push_text(pieces, &other.to_string()),
    }
}

fn push_text(pieces: &mut Vec<TokenId>, text: &str) {
    let piece = |bytes: &[u8]| {
        let mut piece = [0; 4];
        piece[..bytes.len()].copy_from_slice(bytes);
        TokenId(u32::from_le_bytes(piece))
    };
    pieces.extend(text.as_bytes().chunks(4).map(piece));
}

/// Equal items are equal pieces, and others differ from the first piece on.
fn push_item(pieces: &mut Vec<TokenId>, url: &str) {
    let mut bytes = [0; 4 * PIECES_OF_ITEM];
    blake3::Hasher::new().update(url.as_bytes()).finalize_xof().fill(&mut bytes);
    let piece = |bytes: &[u8]| bytes.try_into().map(u32::from_le_bytes).map(TokenId).ok();
    pieces.extend(bytes.chunks_exact(4).filter_map(piece));
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn of(body: &Value) -> Vec<TokenId> {
        pieces(body.as_object().unwrap())
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
}
