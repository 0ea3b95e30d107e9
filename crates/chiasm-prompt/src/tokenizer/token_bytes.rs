//! The bytes of a single token. Decoding a token loses its bytes unless they form whole characters.

use chiasm_types::TokenId;
use serde_json::Value;
use tokenizers::{Model, Tokenizer};

/// The form in which a tokenizer's vocabulary holds bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ByteForm {
    /// Each byte is a printable character, as in GPT-2.
    ByteLevel {
        /// `true` if decoding only joins the bytes.
        joins_only: bool,
    },
    /// Text, with `▁` for a space and `<0xE2>` for a byte that has no token, as in Llama 2.
    ByteFallback,
    /// Plain text, or something else.
    Text,
}

impl ByteForm {
    /// Derives the form from the tokenizer's decoder.
    pub(super) fn detect(tokenizer: &Tokenizer) -> Self {
        let decoder =
            tokenizer.get_decoder().and_then(|decoder| serde_json::to_value(decoder).ok());
        let mut kinds = Vec::new();
        collect_kinds(&decoder.unwrap_or_default(), &mut kinds);
        if kinds.iter().any(|kind| kind == "ByteLevel") {
            Self::ByteLevel { joins_only: kinds.len() == 1 }
        } else if kinds.iter().any(|kind| kind == "ByteFallback") {
            Self::ByteFallback
        } else {
            Self::Text
        }
    }

    /// Returns the text of a token if it decodes to the same text in every context: the token is in
    /// the model's own vocabulary, consists of whole characters, and decoding only joins bytes.
    pub(super) fn context_free_text(self, tokenizer: &Tokenizer, token: TokenId) -> Option<String> {
        let added = tokenizer.get_added_vocabulary().get_added_tokens_decoder();
        if self != (Self::ByteLevel { joins_only: true }) || added.contains_key(&token.0) {
            return None;
        }
        let text = tokenizer.get_model().id_to_token(token.0)?;
        String::from_utf8(decode_byte_level(&text).unwrap_or_else(|| text.into_bytes())).ok()
    }

    /// Returns the bytes of a token; an empty list for an unknown id.
    pub(super) fn bytes(self, tokenizer: &Tokenizer, token: TokenId) -> Vec<u8> {
        let Some(text) = tokenizer.id_to_token(token.0) else { return Vec::new() };
        if tokenizer.get_added_vocabulary().get_added_tokens_decoder().contains_key(&token.0) {
            return text.into_bytes();
        }
        match self {
            Self::ByteLevel { .. } => decode_byte_level(&text).unwrap_or_else(|| text.into_bytes()),
            Self::ByteFallback => match fallback_byte(&text) {
                Some(byte) => vec![byte],
                None => text.replace('▁', " ").into_bytes(),
            },
            Self::Text => tokenizer.decode(&[token.0], false).unwrap_or(text).into_bytes(),
        }
    }
}

fn collect_kinds(decoder: &Value, kinds: &mut Vec<String>) {
    kinds.extend(decoder["type"].as_str().map(str::to_owned));
    for inner in decoder["decoders"].as_array().into_iter().flatten() {
        collect_kinds(inner, kinds);
    }
}

/// Maps characters back to bytes by GPT-2's table. `None` if a character is not in the table.
///
/// Printable Latin-1 characters stand for themselves. The characters from U+0100 on stand for the
/// other 68 bytes, in order.
fn decode_byte_level(text: &str) -> Option<Vec<u8>> {
    text.chars()
        .map(|c| match u32::from(c) {
            code @ (0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff) => u8::try_from(code).ok(),
            code @ 0x100..=0x120 => u8::try_from(code - 0x100).ok(),
            code @ 0x121..=0x142 => u8::try_from(code - 0x121 + 0x7f).ok(),
            0x143 => Some(0xad),
            _ => None,
        })
        .collect()
}

/// Returns GPT-2's table: the character of each byte.
pub(super) fn byte_letters() -> [char; 256] {
    let mut shifted = '\u{100}'..;
    std::array::from_fn(|byte| match byte {
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => char::from(byte as u8),
        _ => shifted.next().unwrap_or_default(),
    })
}

/// Returns the byte of a token such as `<0xE2>`.
pub(super) fn fallback_byte(text: &str) -> Option<u8> {
    let digits = text.strip_prefix("<0x")?.strip_suffix('>')?;
    let is_byte = digits.len() == 2 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    if is_byte { u8::from_str_radix(digits, 16).ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_level_table_covers_every_byte_once() {
        let letters = byte_letters();
        for byte in 0..=255u8 {
            let letter = letters[usize::from(byte)];
            assert_eq!(decode_byte_level(&letter.to_string()), Some(vec![byte]), "{letter}");
        }
        // From GPT-2's `encoder.py`: a space, a line feed and a letter.
        assert_eq!((letters[0x20], letters[0x0a], letters[0x41]), ('Ġ', 'Ċ', 'A'));
        assert_eq!(decode_byte_level("€"), None);
    }

    #[test]
    fn fallback_token_is_one_byte() {
        assert_eq!(fallback_byte("<0xE2>"), Some(0xe2));
        assert_eq!(fallback_byte("<0xE2"), None);
        assert_eq!(fallback_byte("▁the"), None);
    }
}
