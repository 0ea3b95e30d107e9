//! The `tojson` filter of `transformers`: Python's `json.dumps`, not Jinja's HTML-safe filter.

use std::fmt::Write;

use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{Error, ErrorKind, Value};

use super::python_filters::arguments;
use super::python_text::python_float;

/// The arguments of `json.dumps` that the filter takes, in the order of their positions.
const ARGUMENTS: [&str; 4] = ["ensure_ascii", "indent", "separators", "sort_keys"];

/// `tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False)`
/// (`transformers/utils/chat_template_utils.py`).
pub(super) fn tojson(
    value: &Value,
    positional: Rest<Value>,
    named: Kwargs,
) -> Result<String, Error> {
    let [ensure_ascii, indent, separators, sort_keys] = arguments(ARGUMENTS, &positional, &named)?;
    let is_true = |value: Option<Value>| value.is_some_and(|value| value.is_true());
    let indent = indent.as_ref().map(indent_text).transpose()?.flatten();
    let (item_separator, key_separator) = match separators.filter(|value| !value.is_none()) {
        Some(pair) => {
            let pair: Vec<Value> = pair.try_iter()?.collect();
            match pair.as_slice() {
                [item, key] => (item.to_string(), key.to_string()),
                _ => {
                    return Err(Error::new(
                        ErrorKind::InvalidOperation,
                        "separators must be a pair",
                    ));
                }
            }
        }
        // With an indent a line break follows the comma, so Python omits the space.
        None => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
    };
    let mut writer = Writer {
        out: String::new(),
        ensure_ascii: is_true(ensure_ascii),
        indent,
        item_separator,
        key_separator,
        sort_keys: is_true(sort_keys),
    };
    writer.value(value, 0)?;
    Ok(writer.out)
}

/// Returns the text of one indentation level; `None` for Python's `None`.
fn indent_text(indent: &Value) -> Result<Option<String>, Error> {
    if indent.is_none() {
        return Ok(None);
    }
    if let Some(text) = indent.as_str() {
        return Ok(Some(text.to_owned()));
    }
    let width = i64::try_from(indent.clone())?;
    Ok(Some(" ".repeat(width.clamp(0, 64) as usize)))
}

/// A JSON writer with the formatting options of `json.dumps`.
struct Writer {
    out: String,
    ensure_ascii: bool,
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
    sort_keys: bool,
}

impl Writer {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.number(value)?,
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq => {
                let items: Vec<Value> = value.try_iter()?.checked().collect::<Result<_, _>>()?;
                self.container('[', ']', items.len(), depth, |writer, index| {
                    writer.value(&items[index], depth + 1)
                })?;
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.checked().collect::<Result<_, _>>()?;
                if self.sort_keys {
                    keys.sort();
                }
                self.container('{', '}', keys.len(), depth, |writer, index| {
                    writer.map_key(&keys[index])?;
                    writer.out.push_str(&writer.key_separator.clone());
                    writer.value(&value.get_item(&keys[index])?, depth + 1)
                })?;
            }
            kind => {
                let reason = format!("object of type {kind} is not JSON serializable");
                return Err(Error::new(ErrorKind::BadSerialization, reason));
            }
        }
        Ok(())
    }

    fn container(
        &mut self,
        open: char,
        close: char,
        length: usize,
        depth: usize,
        mut write: impl FnMut(&mut Self, usize) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.out.push(open);
        for index in 0..length {
            if index > 0 {
                self.out.push_str(&self.item_separator.clone());
            }
            self.line_break(depth + 1);
            write(self, index)?;
        }
        if length > 0 {
            self.line_break(depth);
        }
        self.out.push(close);
        Ok(())
    }

    fn line_break(&mut self, depth: usize) {
        if let Some(indent) = &self.indent {
            self.out.push('\n');
            (0..depth).for_each(|_| self.out.push_str(indent));
        }
    }

    fn map_key(&mut self, key: &Value) -> Result<(), Error> {
        match key.kind() {
            ValueKind::String => self.string(key.as_str().unwrap_or_default()),
            ValueKind::None | ValueKind::Bool | ValueKind::Number => {
                self.out.push('"');
                self.value(key, 0)?;
                self.out.push('"');
            }
            kind => {
                let reason = format!("keys must be str, int, float, bool or None, not {kind}");
                return Err(Error::new(ErrorKind::BadSerialization, reason));
            }
        }
        Ok(())
    }

    fn number(&mut self, value: &Value) -> Result<(), Error> {
        if value.is_integer() {
            self.out.push_str(&value.to_string());
            return Ok(());
        }
        let number = f64::try_from(value.clone())?;
        match number {
            _ if number.is_nan() => self.out.push_str("NaN"),
            f64::INFINITY => self.out.push_str("Infinity"),
            f64::NEG_INFINITY => self.out.push_str("-Infinity"),
            _ => self.out.push_str(&python_float(number)),
        }
        Ok(())
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        for c in text.chars() {
            match c {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                '\0'..='\u{1f}' => self.escape(c),
                '\u{7f}'.. if self.ensure_ascii && c != '\u{7f}' => self.escape(c),
                _ => self.out.push(c),
            }
        }
        self.out.push('"');
    }

    fn escape(&mut self, c: char) {
        for unit in c.encode_utf16(&mut [0; 2]) {
            // Writing to a String can't fail.
            let _ = write!(self.out, "\\u{unit:04x}");
        }
    }
}
