//! The output of the processor's processes. It is logged at debug level, and its last line is
//! reported in errors.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::io::{AsyncRead, AsyncReadExt};

/// The number of lines that are kept.
const MAX_LINES: usize = 20;
/// The length at which lines are cut.
const MAX_LINE_BYTES: usize = 500;

/// The last lines of the output.
#[derive(Clone, Default)]
pub(crate) struct OutputTail(Arc<Mutex<VecDeque<String>>>);

impl OutputTail {
    /// Logs a line and keeps it.
    fn add(&self, line: String) {
        tracing::debug!(target: "chiasm_processor", "{line}");
        let mut lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        lines.push_back(line);
        if lines.len() > MAX_LINES {
            lines.pop_front();
        }
    }

    /// Returns the last lines as one text.
    pub(crate) fn text(&self) -> String {
        let lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        lines.iter().map(String::as_str).collect::<Vec<_>>().join("\n")
    }
}

/// Reads the output to its end and adds its lines to `tail`.
pub(crate) async fn read_lines(mut output: impl AsyncRead + Unpin, tail: OutputTail) {
    let mut buffer = [0; 4096];
    let mut line = Vec::new();
    while let Ok(count @ 1..) = output.read(&mut buffer).await {
        for &byte in &buffer[..count] {
            if byte == b'\n' {
                tail.add(String::from_utf8_lossy(&line).into_owned());
                line.clear();
            } else if line.len() < MAX_LINE_BYTES {
                line.push(byte);
            }
        }
    }
    if !line.is_empty() {
        tail.add(String::from_utf8_lossy(&line).into_owned());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn last_lines_are_kept_with_a_maximum_length() {
        let text =
            (0..30).map(|i| format!("{i}\n")).collect::<String>() + &"x".repeat(10_000) + "\nend";
        let tail = OutputTail::default();
        read_lines(text.as_bytes(), tail.clone()).await;
        let kept = tail.text();
        let kept: Vec<&str> = kept.lines().collect();
        assert_eq!((kept.len(), kept[0], kept[MAX_LINES - 1]), (MAX_LINES, "12", "end"));
        assert_eq!(kept[MAX_LINES - 2].len(), MAX_LINE_BYTES);
    }
}
