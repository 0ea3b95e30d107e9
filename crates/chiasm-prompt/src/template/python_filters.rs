//! Jinja's filters for which minijinja differs in white space, undefined values or arguments.

use minijinja::value::{Kwargs, Rest};
use minijinja::{Error, ErrorKind, Value};

use super::python_strings::strip;
use super::python_text::python_str;

/// The maximum width of an indentation in spaces. A request may set the width.
const MAX_INDENT_WIDTH: usize = 256;

/// `trim(chars=None)`: `str(value).strip(chars)`.
pub(super) fn trim(value: &Value, chars: Option<String>) -> Result<String, Error> {
    Ok(strip(&python_str(value)?, chars.as_deref(), true, true).to_owned())
}

/// `string`: `str(value)`.
pub(super) fn string(value: &Value) -> Result<String, Error> {
    python_str(value)
}

/// `length`: an undefined value has length 0.
pub(super) fn length(value: &Value) -> Result<usize, Error> {
    match value.len() {
        Some(length) => Ok(length),
        None if value.is_undefined() => Ok(0),
        None => Err(Error::new(
            ErrorKind::InvalidOperation,
            format!("object of type {} has no length", value.kind()),
        )),
    }
}

/// `default(default_value='', boolean=false)`.
pub(super) fn default(
    value: &Value,
    positional: Rest<Value>,
    named: Kwargs,
) -> Result<Value, Error> {
    let [fallback, boolean] = arguments(["default_value", "boolean"], &positional, &named)?;
    let boolean = boolean.is_some_and(|boolean| boolean.is_true());
    if value.is_undefined() || (boolean && !value.is_true()) {
        return Ok(fallback.unwrap_or_else(|| Value::from("")));
    }
    Ok(value.clone())
}

/// `indent(width=4, first=false, blank=false)`. The width may be a number or the indentation
/// itself.
pub(super) fn indent(
    value: &Value,
    positional: Rest<Value>,
    named: Kwargs,
) -> Result<String, Error> {
    let [width, first, blank] = arguments(["width", "first", "blank"], &positional, &named)?;
    let indentation = match width {
        None => "    ".to_owned(),
        Some(text) if text.as_str().is_some() => text.to_string(),
        Some(width) => {
            let width = width.as_usize().filter(|width| *width <= MAX_INDENT_WIDTH);
            " ".repeat(width.ok_or_else(|| {
                Error::new(
                    ErrorKind::InvalidOperation,
                    format!("indent takes a width of up to {MAX_INDENT_WIDTH}"),
                )
            })?)
        }
    };
    let is_true = |value: Option<Value>| value.is_some_and(|value| value.is_true());
    let first = is_true(first);
    let blank = is_true(blank);
    let mut out = String::new();
    for (index, line) in python_str(value)?.split('\n').enumerate() {
        if index > 0 {
            out.push('\n');
        }
        let is_indented = if index == 0 { first } else { blank || !line.is_empty() };
        if is_indented {
            out.push_str(&indentation);
        }
        out.push_str(line);
    }
    Ok(out)
}

/// Returns the arguments of a filter, which may be passed by position or by name.
pub(super) fn arguments<const N: usize>(
    names: [&str; N],
    positional: &[Value],
    named: &Kwargs,
) -> Result<[Option<Value>; N], Error> {
    if positional.len() > N {
        return Err(Error::new(
            ErrorKind::TooManyArguments,
            format!("expected up to {N} arguments"),
        ));
    }
    let mut found = [const { None }; N];
    for ((slot, name), index) in found.iter_mut().zip(names).zip(0..) {
        *slot = match positional.get(index) {
            Some(value) => Some(value.clone()),
            None => named.get::<Option<Value>>(name)?,
        };
    }
    named.assert_all_used()?;
    Ok(found)
}
