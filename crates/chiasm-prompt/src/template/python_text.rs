//! Python's text forms of values: `str()` for printed values, `repr()` for values in containers.

use std::fmt::Write;

use minijinja::value::{Tuple, ValueKind};
use minijinja::{Error, ErrorKind, Value};

/// Returns `true` for white space of Python's `str.strip()`: Unicode's white space and the four
/// separators U+001C to U+001F.
pub(super) fn is_python_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// Returns `str(value)`.
pub(super) fn python_str(value: &Value) -> Result<String, Error> {
    match value.as_str() {
        Some(text) => Ok(text.to_owned()),
        None if value.is_undefined() => Ok(String::new()),
        None => {
            let mut out = String::new();
            write_repr(&mut out, value)?;
            Ok(out)
        }
    }
}

/// Writes `repr(value)` for the kinds of values that occur in chat templates. Other objects are
/// written in minijinja's format.
fn write_repr(out: &mut String, value: &Value) -> Result<(), Error> {
    match value.kind() {
        ValueKind::Undefined => out.push_str("Undefined"),
        ValueKind::Number if !value.is_integer() => match f64::try_from(value.clone()) {
            Ok(number) => out.push_str(&python_float(number)),
            Err(_) => write_display(out, value)?,
        },
        ValueKind::String => match value.as_str() {
            Some(text) => write_string_repr(out, text),
            None => write_display(out, value)?,
        },
        ValueKind::Seq => {
            let is_tuple = value.downcast_object_ref::<Tuple>().is_some();
            out.push(if is_tuple { '(' } else { '[' });
            let mut count = 0;
            for item in value.try_iter()?.checked() {
                if count > 0 {
                    out.push_str(", ");
                }
                write_repr(out, &item?)?;
                count += 1;
            }
            out.push_str(match (is_tuple, count) {
                (true, 1) => ",)",
                (true, _) => ")",
                (false, _) => "]",
            });
        }
        ValueKind::Map => {
            out.push('{');
            for (index, key) in value.try_iter()?.checked().enumerate() {
                let key = key?;
                if index > 0 {
                    out.push_str(", ");
                }
                write_repr(out, &key)?;
                out.push_str(": ");
                write_repr(out, &value.get_item(&key)?)?;
            }
            out.push('}');
        }
        _ => write_display(out, value)?,
    }
    Ok(())
}

/// Writes a value in minijinja's format.
fn write_display(out: &mut String, value: &Value) -> Result<(), Error> {
    write!(out, "{value}")
        .map_err(|_| Error::new(ErrorKind::BadSerialization, "cannot print this value"))
}

/// Writes the `repr` of a string. The quotes are single ones, unless the string contains single but
/// no double quotes.
fn write_string_repr(out: &mut String, text: &str) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\\' => out.push_str("\\\\"),
            _ if c == quote => {
                out.push('\\');
                out.push(c);
            }
            _ if is_printable(c) => out.push(c),
            _ => {
                let code = u32::from(c);
                // Writing to a String can't fail.
                let _ = match code {
                    0..=0xff => write!(out, "\\x{code:02x}"),
                    0x100..=0xffff => write!(out, "\\u{code:04x}"),
                    _ => write!(out, "\\U{code:08x}"),
                };
            }
        }
    }
    out.push(quote);
}

/// Implements `str.isprintable`, except for characters that Unicode has not assigned.
fn is_printable(c: char) -> bool {
    let invisible = matches!(c,
        '\u{ad}' | '\u{600}'..='\u{605}' | '\u{61c}' | '\u{6dd}' | '\u{70f}' | '\u{180e}'
        | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}'
        | '\u{fff9}'..='\u{fffb}' | '\u{e000}'..='\u{f8ff}' | '\u{e0000}'..);
    c == ' ' || !(c.is_control() || c.is_whitespace() || invisible)
}

/// Returns the `repr` of a float: the shortest digits that parse to the same number, with an
/// exponent below 1e-4 and from 1e16 on.
pub(super) fn python_float(number: f64) -> String {
    if number.is_nan() {
        return "nan".to_owned();
    }
    if number.is_infinite() {
        return if number > 0.0 { "inf" } else { "-inf" }.to_owned();
    }
    let scientific = format!("{number:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let plain = format!("{number}");
        return if plain.contains('.') { plain } else { plain + ".0" };
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_are_written_as_in_python() {
        for (number, text) in [
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (1.0, "1.0"),
            (0.1, "0.1"),
            (1e-4, "0.0001"),
            (1e-5, "1e-05"),
            (1.5e-7, "1.5e-07"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (-2.5e300, "-2.5e+300"),
            (f64::NEG_INFINITY, "-inf"),
        ] {
            assert_eq!(python_float(number), text);
        }
    }

    #[test]
    fn containers_are_written_as_in_python() {
        let value = Value::from(minijinja::value::Serde(
            serde_json::json!({"a": [1, 2.0, "it's", null, true], "b\n": {}}),
        ));
        assert_eq!(
            python_str(&value).unwrap(),
            r#"{'a': [1, 2.0, "it's", None, True], 'b\n': {}}"#
        );
    }
}
