//! A body without the bulk of its longest strings, which the parser reads faster.
//!
//! Most bytes of a request with pictures are base64 in a few strings. The parser looks at each of
//! them for quotes, escapes and control characters, and then for UTF-8, eight bytes at a time at
//! best: 31 % of the instructions that such a request takes where its image is known (364 kB, one
//! image). Here vector code finds where such strings end, and the parser gets their beginnings
//! only.

use std::ops::Range;

use bytes::Bytes;
use memchr::{memchr, memchr2};

/// Strings of fewer bytes stay as they are. Fields that take one of some words don't take longer
/// ones. In tests nearly all strings are long.
const LONG: usize = if cfg!(test) { 24 } else { 8 << 10 };
/// Bytes of a long string that stay, for errors that quote it.
const KEPT: usize = if cfg!(test) { 8 } else { 64 };
/// One byte of so many may be left of a body; else it is read as it came, which takes no memory.
const LEAST: usize = if cfg!(test) { 1 } else { 4 };

/// The JSON of a body, with the beginnings of its long strings only.
pub(super) struct Shortened {
    pub(super) json: Bytes,
    /// They are in the order of the body.
    cuts: Vec<Cut>,
}

struct Cut {
    /// Where the beginning starts in the shortened JSON.
    at: usize,
    /// The whole string in the body.
    whole: Range<usize>,
}

impl Shortened {
    /// `None` if it would not be much shorter.
    ///
    /// It is valid JSON if and only if the body is: only characters go that stand for themselves,
    /// within strings.
    pub(super) fn of(body: &[u8]) -> Option<Self> {
        let long = long_strings(body)?;
        let mut json = Vec::with_capacity(
            body.len() - long.iter().map(|whole| whole.len() - KEPT).sum::<usize>(),
        );
        let (mut cuts, mut done) = (Vec::with_capacity(long.len()), 0);
        for whole in long {
            json.extend_from_slice(&body[done..whole.start + KEPT]);
            done = whole.end;
            cuts.push(Cut { at: json.len() - KEPT, whole });
        }
        json.extend_from_slice(&body[done..]);
        Some(Self { json: json.into(), cuts })
    }

    /// Bytes on the heap.
    pub(super) fn bytes(&self) -> u64 {
        (self.json.len() + self.cuts.capacity() * size_of::<Cut>()) as u64
    }

    /// Where a string that the parser borrowed from the JSON is whole in the body; `None` if
    /// nothing of it is missing.
    pub(super) fn whole(&self, text: &str) -> Option<Range<usize>> {
        let at = (text.as_ptr() as usize).checked_sub(self.json.as_ptr() as usize)?;
        let cut = self.cuts.binary_search_by_key(&at, |cut| cut.at).ok()?;
        Some(self.cuts[cut].whole.clone())
    }

    /// Where the body has what is here in the JSON.
    pub(super) fn place(&self, at: usize) -> usize {
        let before = self.cuts.iter().take_while(|cut| cut.at + KEPT <= at);
        at + before.map(|cut| cut.whole.len() - KEPT).sum::<usize>()
    }

    /// The column in the body of what is in this one of the JSON, both in bytes. The lines are the
    /// same.
    pub(super) fn column(&self, line: usize, column: usize) -> usize {
        let lines = self.json.split(|byte| *byte == b'\n');
        let start = lines.take(line.saturating_sub(1)).map(|line| line.len() + 1).sum();
        self.place(start + column) - self.place(start)
    }
}

/// The long strings of a body that has little else; `None` if there is more, or if a string has no
/// end. Gives up as soon as too much would be left, so that other bodies are gone through in small
/// part.
fn long_strings(body: &[u8]) -> Option<Vec<Range<usize>>> {
    if body.len() < LONG {
        return None;
    }
    let (mut long, mut end, mut room) = (Vec::new(), 0, body.len() / LEAST);
    while let Some(before) = memchr(b'"', &body[end..]) {
        room = room.checked_sub(before + 2)?;
        let start = end + before + 1;
        let (length, is_escaped) = string(&body[start..], room)?;
        let (text, after) = (&body[start..start + length], &body[start + length + 1..]);
        if !is_escaped && length >= LONG && is_plain(text) && !is_name(after) {
            long.push(start..start + length);
            room = room.checked_sub(KEPT)?;
        } else {
            room = room.checked_sub(length)?;
        }
        end = start + length + 1;
    }
    (!long.is_empty() && body.len() - end <= room).then_some(long)
}

/// The length of the string that JSON goes on with, to its closing quote, and whether there are
/// escapes in it; `None` if it has no end, or is longer than `room` with escapes.
fn string(json: &[u8], room: usize) -> Option<(usize, bool)> {
    let (mut length, mut is_escaped) = (0, false);
    loop {
        length += memchr2(b'"', b'\\', json.get(length..)?)?;
        if json[length] == b'"' {
            return Some((length, is_escaped));
        }
        is_escaped = true;
        length += 2;
        if length > room {
            return None;
        }
    }
}

/// Whether there are only characters that need neither a decoder for UTF-8 nor, in JSON, an escape.
fn is_plain(text: &[u8]) -> bool {
    // Piece by piece, so that compilers can look at many bytes at once.
    text.chunks(128)
        .all(|piece| piece.iter().fold(true, |plain, byte| plain & (0x20..0x7f).contains(byte)))
}

/// Whether a string was the name of a field, by what comes after it.
fn is_name(after: &[u8]) -> bool {
    after.iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b':')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::Value;

    use super::*;

    /// The strings of a JSON value in order, those that are names aside.
    fn strings<'a>(value: &'a Value, found: &mut Vec<&'a str>) {
        match value {
            Value::String(text) => found.push(text),
            Value::Array(list) => list.iter().for_each(|value| strings(value, found)),
            Value::Object(fields) => fields.values().for_each(|value| strings(value, found)),
            _ => {}
        }
    }

    fn of_text(body: &str) -> Option<Shortened> {
        Shortened::of(body.as_bytes())
    }

    #[test]
    fn long_strings_keep_their_beginnings() {
        let (one, two) = ("data:image/png;base64,AAAA", "x".repeat(60));
        let body = format!(r#"["{one}", "short", "{two}"]"#);
        let short = of_text(&body).unwrap();
        assert_eq!(short.json, r#"["data:ima", "short", "xxxxxxxx"]"#);
        let read: Vec<&str> = serde_json::from_slice(&short.json).unwrap();
        let whole = |text| short.whole(text).map(|whole| &body[whole]);
        assert_eq!(read.into_iter().map(whole).collect::<Vec<_>>(), [Some(one), None, Some(&two)]);
        assert_eq!(whole("data:ima"), None, "it is not from there");
    }

    #[test]
    fn names_and_what_is_escaped_or_not_plain_stay() {
        let long = "n".repeat(LONG);
        for body in [
            format!(r#"{{"{long}": 1}}"#),
            format!("{{\"{long}\" \n : 1}}"),
            format!(r#"["{long}\n"]"#),
            format!(r#"["\"{long}"]"#),
            format!(r#"["{long}\\"]"#),
            format!(r#"["{long}é"]"#),
            format!("[\"{long}\u{7f}\"]"),
            format!("[\"{long}\n\"]"),
            format!(r#"["{long}"#),
            format!(r#"["{long}\"#),
            format!(r#"["{long}\""#),
            "[1, 2]".to_owned(),
            String::new(),
        ] {
            assert!(of_text(&body).is_none(), "{body}");
        }
        assert!(of_text(&format!(r#"["\\", "{long}"]"#)).is_some());
    }

    #[test]
    fn places_in_the_json_are_those_in_the_body() {
        let long = "l".repeat(LONG + 10);
        let body = format!("{{\"a\": \"{long}\",\n \"b\": \"{long}\", \"c\": \"{long}\", ?\n}}");
        let short = of_text(&body).unwrap();
        let (expected, error) = (
            serde_json::from_str::<Value>(&body).unwrap_err(),
            serde_json::from_slice::<Value>(&short.json).unwrap_err(),
        );
        assert_ne!((expected.line(), expected.column()), (error.line(), error.column()));
        let column = short.column(error.line(), error.column());
        assert_eq!((expected.line(), expected.column()), (error.line(), column));
    }

    proptest! {
        #[test]
        fn the_whole_strings_are_those_of_the_body(
            texts in prop::collection::vec(prop_oneof!["[ -~]{0,60}", ".{0,40}", "[A-Za-z0-9+/]{20,90}"], 1..8),
            names in prop::collection::vec("[a-z]{1,40}", 8),
        ) {
            let fields = names.into_iter().zip(texts.into_iter().map(Value::String)).collect();
            let body = Value::Array(vec![Value::Object(fields), "end".into()]).to_string();
            let Some(short) = of_text(&body) else { return Ok(()) };
            prop_assert!(short.json.len() < body.len());
            let (whole, read): (Value, Value) =
                (serde_json::from_str(&body).unwrap(), serde_json::from_slice(&short.json).unwrap());
            let (mut expected, mut found) = (Vec::new(), Vec::new());
            strings(&whole, &mut expected);
            strings(&read, &mut found);
            prop_assert_eq!(expected.len(), found.len());
            let mut cuts = short.cuts.iter();
            for (expected, found) in expected.into_iter().zip(found) {
                if expected != found {
                    prop_assert_eq!(expected, &body[cuts.next().unwrap().whole.clone()]);
                    prop_assert_eq!(found, &expected[..KEPT]);
                }
            }
            prop_assert!(cuts.next().is_none());
        }

        /// Whatever comes, it is as valid as it was.
        #[test]
        fn nothing_becomes_valid_or_invalid(body in r#"[\[{ ]{0,3}("[a-z\\":, ]{0,60}"[:,}\] \n]{0,3}){0,4}[\]} ]{0,3}"#) {
            if let Some(short) = of_text(&body) {
                let (whole, short_read) =
                    (serde_json::from_str::<Value>(&body), serde_json::from_slice::<Value>(&short.json));
                prop_assert_eq!(whole.is_ok(), short_read.is_ok());
                if let (Err(whole), Err(error)) = (whole, short_read) {
                    prop_assert_eq!((whole.line(), whole.column()), (error.line(), short.column(error.line(), error.column())));
                }
            }
        }
    }
}
