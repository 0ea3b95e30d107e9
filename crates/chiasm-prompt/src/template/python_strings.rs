//! Python's string methods that minijinja lacks, or whose white space differs in minijinja.

use minijinja::value::{ValueKind, from_args};
use minijinja::{Error, ErrorKind, State, Value};
use minijinja_contrib::pycompat;

use super::python_text::is_python_space;

/// Calls a method of a string, list or dict: one of this module, or else one of minijinja's Python
/// compatibility.
pub(super) fn call_method(
    state: &mut State,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    if let Some(text) = value.as_str()
        && let Some(result) = string_method(text, method, args)?
    {
        return Ok(result);
    }
    if method == "copy" && matches!(value.kind(), ValueKind::Seq | ValueKind::Map) {
        let () = from_args(args)?;
        return Ok(value.clone());
    }
    if value.kind() == ValueKind::Seq && method == "index" {
        let (wanted,): (&Value,) = from_args(args)?;
        for (index, item) in value.try_iter()?.checked().enumerate() {
            if item? == *wanted {
                return Ok(Value::from(index));
            }
        }
        return Err(Error::new(ErrorKind::InvalidOperation, format!("{wanted} is not in list")));
    }
    pycompat::unknown_method_callback(state, value, method, args)
}

/// Calls a string method. Returns `None` if the method is left to minijinja.
fn string_method(text: &str, method: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    let result = match method {
        "strip" | "lstrip" | "rstrip" => {
            let (chars,): (Option<&str>,) = from_args(args)?;
            Value::from(strip(text, chars, method != "rstrip", method != "lstrip"))
        }
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            Value::from(text.strip_prefix(prefix).unwrap_or(text))
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            Value::from(text.strip_suffix(suffix).unwrap_or(text))
        }
        "split" | "rsplit" => {
            let (separator, limit): (Option<&str>, Option<i64>) = from_args(args)?;
            split(text, separator, limit.filter(|limit| *limit >= 0), method == "rsplit")?
        }
        "partition" | "rpartition" => {
            let (separator,): (&str,) = from_args(args)?;
            let cut = if method == "partition" {
                text.split_once(separator)
            } else {
                text.rsplit_once(separator)
            };
            match (cut, method) {
                (Some((before, after)), _) => Value::from_iter([before, separator, after]),
                (None, "partition") => Value::from_iter([text, "", ""]),
                (None, _) => Value::from_iter(["", "", text]),
            }
        }
        "splitlines" => {
            let (keep,): (Option<bool>,) = from_args(args)?;
            split_lines(text, keep.unwrap_or(false)).into_iter().collect()
        }
        "index" => {
            let (wanted,): (&str,) = from_args(args)?;
            let at = text
                .find(wanted)
                .ok_or_else(|| Error::new(ErrorKind::InvalidOperation, "substring not found"))?;
            Value::from(text[..at].chars().count())
        }
        "isspace" => Value::from(!text.is_empty() && text.chars().all(is_python_space)),
        _ => return Ok(None),
    };
    Ok(Some(result))
}

/// Implements `str.strip` on the chosen sides.
pub(super) fn strip<'a>(text: &'a str, chars: Option<&str>, left: bool, right: bool) -> &'a str {
    let stripped = |c: char| match chars {
        Some(chars) => chars.contains(c),
        None => is_python_space(c),
    };
    let text = if left { text.trim_start_matches(stripped) } else { text };
    if right { text.trim_end_matches(stripped) } else { text }
}

/// Implements `str.split` and `str.rsplit`.
fn split(
    text: &str,
    separator: Option<&str>,
    limit: Option<i64>,
    from_right: bool,
) -> Result<Value, Error> {
    let limit = limit.map_or(usize::MAX, |limit| usize::try_from(limit).unwrap_or(usize::MAX));
    let mut parts: Vec<&str> = Vec::new();
    match separator {
        Some("") => return Err(Error::new(ErrorKind::InvalidOperation, "empty separator")),
        Some(separator) if from_right => {
            parts.extend(text.rsplitn(limit.saturating_add(1), separator))
        }
        Some(separator) => parts.extend(text.splitn(limit.saturating_add(1), separator)),
        // The separators are runs of white space. The part beyond the limit is not trimmed at its
        // far end.
        None => {
            let mut rest = strip(text, None, !from_right, from_right);
            while !rest.is_empty() {
                let at = if from_right {
                    rest.rfind(is_python_space)
                } else {
                    rest.find(is_python_space)
                };
                let Some(at) = at.filter(|_| parts.len() < limit) else {
                    parts.push(rest);
                    break;
                };
                let (before, after) = rest.split_at(at);
                if from_right {
                    parts.push(strip(after, None, true, false));
                    rest = strip(before, None, false, true);
                } else {
                    parts.push(before);
                    rest = strip(after, None, true, false);
                }
            }
        }
    }
    if from_right {
        parts.reverse();
    }
    Ok(parts.into_iter().collect())
}

/// Implements `str.splitlines`, which knows many more line breaks than `\n`.
fn split_lines(text: &str, keep: bool) -> Vec<&str> {
    let is_end = |c: char| {
        matches!(
            c,
            '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'
                ..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}'
        )
    };
    let mut lines = Vec::new();
    let mut rest = text;
    while let Some(at) = rest.find(is_end) {
        let end = if rest[at..].starts_with("\r\n") {
            2
        } else {
            rest[at..].chars().next().map_or(0, char::len_utf8)
        };
        lines.push(&rest[..if keep { at + end } else { at }]);
        rest = &rest[at + end..];
    }
    if !rest.is_empty() {
        lines.push(rest);
    }
    lines
}
