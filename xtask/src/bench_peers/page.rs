//! What the notes of several benches are written with.

use std::fmt::Write;

/// Adds a piece.
pub(crate) fn push(text: &mut String, line: std::fmt::Arguments<'_>) {
    // Writing to a String can't fail.
    let _ = text.write_fmt(line);
}

/// Three digits, which are what a run with several processes can tell.
pub(crate) fn number(number: Option<f64>) -> String {
    match number {
        None => "–".to_owned(),
        Some(number) if number >= 100.0 => format!("{number:.0}"),
        Some(number) if number >= 10.0 => format!("{number:.1}"),
        Some(number) => format!("{number:.2}"),
    }
}
