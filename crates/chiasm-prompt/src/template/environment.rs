//! The Jinja environment that `transformers` renders chat templates in, built on minijinja.

use std::fmt::Write;
use std::sync::Arc;

use minijinja::machinery::ast;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::ValueKind;
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Output, State, Value};

use super::generation_tag;
use super::python_filters::{default, indent, length, string, trim};
use super::python_json::tojson;
use super::python_strings::call_method;
use super::python_text::python_str;

/// The argument of `raise_exception`. It separates refusals of the template from other errors.
#[derive(Debug)]
pub(super) struct Raised(pub(super) String);

impl std::fmt::Display for Raised {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Raised {}

/// Formats the current local time by a `strftime` format.
pub(super) type Clock = Arc<dyn Fn(&str) -> Option<String> + Send + Sync>;

/// Converts a template's source for [`build`] and [`parse`]: normalizes line breaks as Jinja does,
/// and replaces tags that minijinja lacks.
pub(super) fn prepare_source(source: &str) -> String {
    generation_tag::rewrite(&source.replace("\r\n", "\n").replace('\r', "\n"))
}

/// Builds the environment with one compiled template of the given name.
pub(super) fn build(
    name: &'static str,
    source: String,
    fuel: u64,
    clock: Clock,
) -> Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    environment.set_syntax(syntax()?);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_formatter(write_as_python);
    environment.set_unknown_method_callback(call_method);
    environment.set_fuel(Some(fuel));
    environment.add_filter("tojson", tojson);
    environment.add_filter("trim", trim);
    environment.add_filter("string", string);
    environment.add_filter("default", default);
    environment.add_filter("d", default);
    environment.add_filter("length", length);
    environment.add_filter("count", length);
    environment.add_filter("indent", indent);
    environment
        .add_test("callable", |value: &Value| value.kind() == ValueKind::Plain && !value.is_none());
    environment.add_test("sequence", is_sequence);
    environment.add_test("number", is_number);
    environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, "raised by the template")
            .with_source(Raised(message)))
    });
    environment.add_function("strftime_now", move |format: &str| {
        clock(format).ok_or_else(|| {
            Error::new(ErrorKind::InvalidOperation, "unknown directive in the time format")
        })
    });
    environment.add_template_owned(name, source)?;
    Ok(environment)
}

/// Parses a template that was converted by [`prepare_source`].
pub(super) fn parse(source: &str) -> Result<ast::Stmt<'_>, Error> {
    minijinja::machinery::parse(source, "chat_template", syntax()?)
}

/// Returns a clock of the system's local time.
pub(super) fn system_clock() -> Clock {
    Arc::new(|format| {
        let mut text = String::new();
        write!(text, "{}", chrono::Local::now().format(format)).ok()?;
        Some(text)
    })
}

fn syntax() -> Result<SyntaxConfig, Error> {
    SyntaxConfig::builder()
        .trim_blocks(true)
        .lstrip_blocks(true)
        .keep_trailing_newline(false)
        .build()
}

/// Writes a printed value as Python's `str()` does.
fn write_as_python(
    out: &mut Output<'_>,
    _: &mut State<'_, '_>,
    value: &Value,
) -> Result<(), Error> {
    let failed = |_| Error::new(ErrorKind::WriteFailure, "cannot write the prompt");
    match value.as_str() {
        Some(text) => out.write_str(text).map_err(failed),
        None => out.write_str(&python_str(value)?).map_err(failed),
    }
}

/// Implements Jinja's test `sequence`: strings and dicts pass it too, as they have a length and
/// indices.
fn is_sequence(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Map | ValueKind::Seq | ValueKind::String)
}

/// Implements Jinja's test `number`: Python's booleans are numbers.
fn is_number(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Bool | ValueKind::Number)
}
