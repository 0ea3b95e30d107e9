//! What the processor's processes print: told at debug level, and the last of it in errors.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::io::{AsyncRead, AsyncReadExt};

const MOST_LINES: usize = 20;
/// Bytes of a line; what follows is left out.
const LONGEST_LINE: usize = 500;

/// The last lines that were printed.
#[derive(Clone, Default)]
pub(crate) struct LastLines(Arc<Mutex<VecDeque<String>>>);

impl LastLines {
    fn add(&self, line: String) {
        tracing::debug!(target: "chiasm_processor", "{line}");
        let mut lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        lines.push_back(line);
        if lines.len() > MOST_LINES {
            lines.pop_front();
        }
    }

    /// The last lines, as one text.
    pub(crate) fn text(&self) -> String {
        let lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        lines.iter().map(String::as_str).collect::<Vec<_>>().join("\n")
    }
}

/// Reads to the end.
pub(crate) async fn follow(mut output: impl AsyncRead + Unpin, lines: LastLines) {
    let (mut buffer, mut line) = ([0; 4096], Vec::new());
    while let Ok(count @ 1..) = output.read(&mut buffer).await {
        for &byte in &buffer[..count] {
            if byte == b'\n' {
                lines.add(String::from_utf8_lossy(&line).into_owned());
                line.clear();
            } else if line.len() < LONGEST_LINE {
                line.push(byte);
            }
        }
    }
    if !line.is_empty() {
        lines.add(String::from_utf8_lossy(&line).into_owned());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_last_lines_are_kept_and_long_ones_cut() {
        let text =
            (0..30).map(|i| format!("{i}\n")).collect::<String>() + &"x".repeat(10_000) + "\nend";
        let lines = LastLines::default();
        follow(text.as_bytes(), lines.clone()).await;
        let kept = lines.text();
        let kept: Vec<&str> = kept.lines().collect();
        assert_eq!((kept.len(), kept[0], kept[MOST_LINES - 1]), (MOST_LINES, "12", "end"));
        assert_eq!(kept[MOST_LINES - 2].len(), LONGEST_LINE);
    }
}
