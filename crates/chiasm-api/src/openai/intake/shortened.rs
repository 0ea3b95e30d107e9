//! A copy of a body with its longest strings shortened, which parses faster.
//!
//! Most bytes of a request with pictures are base64 in a few strings. The parser checks each byte
//! for quotes, escapes and control characters, and then for UTF-8, eight bytes at a time at best.
//! These checks took 31 % of the instructions of a request whose image was known (364 kB, one
//! image). Here vector code finds the ends of such strings, and the parser sees only their
//! beginnings.

use std::ops::Range;

use bytes::Bytes;
use memchr::{memchr, memchr2};

/// The minimum length of a string that is shortened. It is longer than any value of an enumeration.
/// In tests nearly all strings are long.
const MIN_LONG_BYTES: usize = if cfg!(test) { 24 } else { 8 << 10 };
/// The number of bytes kept of a long string, for errors that quote it.
const KEPT_BYTES: usize = if cfg!(test) { 8 } else { 64 };
/// The minimum ratio between the body and its shortened copy. Below it the body itself is parsed,
/// which takes no memory.
const MIN_RATIO: usize = if cfg!(test) { 1 } else { 4 };

/// The JSON of a body with its long strings cut to their beginnings.
pub(super) struct Shortened {
    pub(super) json: Bytes,
    /// The cuts, in the order of the body.
    cuts: Vec<Cut>,
}

/// A string that was shortened.
struct Cut {
    /// The offset of the string's beginning in the shortened JSON.
    start: usize,
    /// The range of the full string in the body.
    full: Range<usize>,
}

impl Shortened {
    /// Shortens a body; `None` if the copy would not be much shorter.
    ///
    /// The copy is valid JSON if and only if the body is: only unescaped characters inside strings
    /// are removed.
    pub(super) fn new(body: &[u8]) -> Option<Self> {
        let long = long_strings(body)?;
        let removed: usize = long.iter().map(|full| full.len() - KEPT_BYTES).sum();
        let mut json = Vec::with_capacity(body.len() - removed);
        let mut cuts = Vec::with_capacity(long.len());
        let mut copied = 0;
        for full in long {
            json.extend_from_slice(&body[copied..full.start + KEPT_BYTES]);
            copied = full.end;
            cuts.push(Cut { start: json.len() - KEPT_BYTES, full });
        }
        json.extend_from_slice(&body[copied..]);
        Some(Self { json: json.into(), cuts })
    }

    /// Returns the bytes on the heap.
    pub(super) fn heap_bytes(&self) -> u64 {
        (self.json.len() + self.cuts.capacity() * size_of::<Cut>()) as u64
    }

    /// Returns the body's range of a string that the parser borrowed from the JSON; `None` if the
    /// string was not shortened.
    pub(super) fn full_range(&self, text: &str) -> Option<Range<usize>> {
        let start = (text.as_ptr() as usize).checked_sub(self.json.as_ptr() as usize)?;
        let index = self.cuts.binary_search_by_key(&start, |cut| cut.start).ok()?;
        Some(self.cuts[index].full.clone())
    }

    /// Maps an offset in the shortened JSON to the offset in the body.
    pub(super) fn body_offset(&self, offset: usize) -> usize {
        let before = self.cuts.iter().take_while(|cut| cut.start + KEPT_BYTES <= offset);
        offset + before.map(|cut| cut.full.len() - KEPT_BYTES).sum::<usize>()
    }

    /// Maps a column of the shortened JSON to the column of the body, both in bytes. Lines have the
    /// same numbers in both.
    pub(super) fn body_column(&self, line: usize, column: usize) -> usize {
        let lines = self.json.split(|byte| *byte == b'\n');
        let start = lines.take(line.saturating_sub(1)).map(|line| line.len() + 1).sum();
        self.body_offset(start + column) - self.body_offset(start)
    }
}

/// Returns the long strings of a body that consists mostly of them; `None` for other bodies, and if
/// a string has no end.
///
/// Stops as soon as too many bytes would remain, so that only a small part of other bodies is
/// scanned.
fn long_strings(body: &[u8]) -> Option<Vec<Range<usize>>> {
    if body.len() < MIN_LONG_BYTES {
        return None;
    }
    let mut long = Vec::new();
    let mut end = 0;
    let mut room = body.len() / MIN_RATIO;
    while let Some(before) = memchr(b'"', &body[end..]) {
        room = room.checked_sub(before + 2)?;
        let start = end + before + 1;
        let (length, is_escaped) = scan_string(&body[start..], room)?;
        let text = &body[start..start + length];
        let after = &body[start + length + 1..];
        if !is_escaped && length >= MIN_LONG_BYTES && is_plain(text) && !is_name(after) {
            long.push(start..start + length);
            room = room.checked_sub(KEPT_BYTES)?;
        } else {
            room = room.checked_sub(length)?;
        }
        end = start + length + 1;
    }
    (!long.is_empty() && body.len() - end <= room).then_some(long)
}

/// Returns the length of the string at the start of `json`, up to its closing quote, and whether it
/// has escapes.
///
/// Returns `None` if the string has no end, or if it has escapes and is longer than `room`.
fn scan_string(json: &[u8], room: usize) -> Option<(usize, bool)> {
    let mut length = 0;
    let mut is_escaped = false;
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

/// Returns `true` if all bytes are printable ASCII, which needs no UTF-8 validation.
///
/// The caller has excluded quotes and escapes.
fn is_plain(text: &[u8]) -> bool {
    // Chunks let the compiler check many bytes at once.
    text.chunks(128)
        .all(|piece| piece.iter().fold(true, |plain, byte| plain & (0x20..0x7f).contains(byte)))
}

/// Returns `true` if the string in front of `after` is a field's name.
fn is_name(after: &[u8]) -> bool {
    after.iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b':')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::Value;

    use super::*;

    /// Collects the strings of a JSON value in order, except for field names.
    fn collect_strings<'a>(value: &'a Value, found: &mut Vec<&'a str>) {
        match value {
            Value::String(text) => found.push(text),
            Value::Array(list) => list.iter().for_each(|value| collect_strings(value, found)),
            Value::Object(fields) => {
                fields.values().for_each(|value| collect_strings(value, found))
            }
            _ => {}
        }
    }

    fn shorten(body: &str) -> Option<Shortened> {
        Shortened::new(body.as_bytes())
    }

    #[test]
    fn long_strings_keep_their_beginnings() {
        let one = "data:image/png;base64,AAAA";
        let two = "x".repeat(60);
        let body = format!(r#"["{one}", "short", "{two}"]"#);
        let short = shorten(&body).unwrap();
        assert_eq!(short.json, r#"["data:ima", "short", "xxxxxxxx"]"#);
        let read: Vec<&str> = serde_json::from_slice(&short.json).unwrap();
        let full = |text| short.full_range(text).map(|range| &body[range]);
        assert_eq!(read.into_iter().map(full).collect::<Vec<_>>(), [Some(one), None, Some(&two)]);
        assert_eq!(full("data:ima"), None, "this string is not borrowed from the JSON");
    }

    #[test]
    fn other_strings_are_not_shortened() {
        let long = "n".repeat(MIN_LONG_BYTES);
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
            assert!(shorten(&body).is_none(), "{body}");
        }
        assert!(shorten(&format!(r#"["\\", "{long}"]"#)).is_some());
    }

    #[test]
    fn error_column_maps_to_column_of_body() {
        let long = "l".repeat(MIN_LONG_BYTES + 10);
        let body = format!("{{\"a\": \"{long}\",\n \"b\": \"{long}\", \"c\": \"{long}\", ?\n}}");
        let short = shorten(&body).unwrap();
        let expected = serde_json::from_str::<Value>(&body).unwrap_err();
        let error = serde_json::from_slice::<Value>(&short.json).unwrap_err();
        assert_ne!((expected.line(), expected.column()), (error.line(), error.column()));
        let column = short.body_column(error.line(), error.column());
        assert_eq!((expected.line(), expected.column()), (error.line(), column));
    }

    proptest! {
        #[test]
        fn full_ranges_are_the_strings_of_the_body(
            texts in prop::collection::vec(
                prop_oneof!["[ -~]{0,60}", ".{0,40}", "[A-Za-z0-9+/]{20,90}"],
                1..8,
            ),
            names in prop::collection::vec("[a-z]{1,40}", 8),
        ) {
            let fields = names.into_iter().zip(texts.into_iter().map(Value::String)).collect();
            let body = Value::Array(vec![Value::Object(fields), "end".into()]).to_string();
            let Some(short) = shorten(&body) else { return Ok(()) };
            prop_assert!(short.json.len() < body.len());
            let from_body: Value = serde_json::from_str(&body).unwrap();
            let from_copy: Value = serde_json::from_slice(&short.json).unwrap();
            let mut expected = Vec::new();
            collect_strings(&from_body, &mut expected);
            let mut found = Vec::new();
            collect_strings(&from_copy, &mut found);
            prop_assert_eq!(expected.len(), found.len());
            let mut cuts = short.cuts.iter();
            for (expected, found) in expected.into_iter().zip(found) {
                if expected != found {
                    prop_assert_eq!(expected, &body[cuts.next().unwrap().full.clone()]);
                    prop_assert_eq!(found, &expected[..KEPT_BYTES]);
                }
            }
            prop_assert!(cuts.next().is_none());
        }

        /// Shortening makes no body valid or invalid.
        #[test]
        fn shortening_preserves_validity(
            body in r#"[\[{ ]{0,3}("[a-z\\":, ]{0,60}"[:,}\] \n]{0,3}){0,4}[\]} ]{0,3}"#,
        ) {
            if let Some(short) = shorten(&body) {
                let from_body = serde_json::from_str::<Value>(&body);
                let from_copy = serde_json::from_slice::<Value>(&short.json);
                prop_assert_eq!(from_body.is_ok(), from_copy.is_ok());
                if let (Err(expected), Err(error)) = (from_body, from_copy) {
                    let column = short.body_column(error.line(), error.column());
                    prop_assert_eq!((expected.line(), expected.column()), (error.line(), column));
                }
            }
        }
    }
}
