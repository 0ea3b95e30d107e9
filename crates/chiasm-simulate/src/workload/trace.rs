//! Traces in Mooncake's format.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::Request;
use crate::error::SimulateError;
use crate::sequence::{Piece, Sequence, mix};
use crate::virtual_time::{Nanos, seconds};

/// The number of tokens per block in `hash_ids`.
const BLOCK_TOKENS: usize = 512;
/// The maximum length of a line, enough for 128 Ki `hash_ids` of seven digits.
const MAX_LINE_BYTES: u64 = 1 << 20;
/// The maximum number of tokens of a prompt, and of an answer.
const MAX_TOKENS: u64 = 4 << 20;
/// The latest time of a request: a year.
const MAX_TIME_MS: f64 = 366.0 * 86_400e3;

/// A line in the format of the traces of "Mooncake: Trading More Storage for Less Computation"
/// (FAST '25). Other fields are skipped.
#[derive(Debug, Deserialize)]
struct Line {
    /// The time of the request in milliseconds.
    timestamp: f64,
    /// Tokens of the prompt.
    input_length: u64,
    /// Tokens of the answer.
    output_length: u64,
    /// One id per 512 tokens of the prompt, including a partial last block. Equal ids mean equal
    /// tokens and equal prefixes.
    hash_ids: Vec<u64>,
}

/// The totals of a trace.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TraceSummary {
    /// The number of requests.
    pub requests: u64,
    /// The time from the first request to the last.
    pub seconds: f64,
}

/// The requests of a trace, read line by line.
pub(crate) struct Trace<R> {
    reader: R,
    path: PathBuf,
    line: Vec<u8>,
    number: u64,
    /// The time of the first request in ms.
    start: Option<f64>,
    last: Nanos,
}

impl Trace<BufReader<File>> {
    /// Opens a trace file.
    pub(crate) fn open(path: &Path) -> Result<Self, SimulateError> {
        let file = File::open(path)
            .map_err(|source| SimulateError::TraceRead { path: path.to_owned(), source })?;
        Ok(Self::new(BufReader::new(file), path))
    }
}

impl<R: BufRead> Trace<R> {
    /// Creates a trace; `path` is for error messages.
    pub(crate) fn new(reader: R, path: &Path) -> Self {
        Self { reader, path: path.to_owned(), line: Vec::new(), number: 0, start: None, last: 0 }
    }

    /// Reads the trace to its end and returns its totals.
    pub(crate) fn summary(self) -> Result<TraceSummary, SimulateError> {
        let mut summary = TraceSummary { requests: 0, seconds: 0.0 };
        for request in self {
            summary.requests += 1;
            summary.seconds = seconds(request?.at);
        }
        Ok(summary)
    }

    fn line_error(&self, problem: impl Into<String>) -> SimulateError {
        SimulateError::TraceLine { line: self.number, problem: problem.into() }
    }

    /// Reads the next line that is not empty; `None` at the end.
    fn read_line(&mut self) -> Result<Option<()>, SimulateError> {
        loop {
            self.line.clear();
            self.number += 1;
            let read = self.reader.by_ref().take(MAX_LINE_BYTES).read_until(b'\n', &mut self.line);
            match read {
                Err(source) => {
                    return Err(SimulateError::TraceRead { path: self.path.clone(), source });
                }
                Ok(0) => return Ok(None),
                Ok(read) if read as u64 == MAX_LINE_BYTES => {
                    return Err(self.line_error(format!(
                        "longer than {MAX_LINE_BYTES} bytes; give one request per line"
                    )));
                }
                Ok(_) if self.line.trim_ascii().is_empty() => {}
                Ok(_) => return Ok(Some(())),
            }
        }
    }

    /// Parses the current line.
    fn request(&mut self) -> Result<Request, SimulateError> {
        let line: Line = serde_json::from_slice(&self.line).map_err(|error| {
            self.line_error(format!(
                "{error}; expected an object with timestamp (ms), input_length, output_length and \
                 hash_ids"
            ))
        })?;
        if !(1..=MAX_TOKENS).contains(&line.input_length) || line.output_length > MAX_TOKENS {
            return Err(self.line_error(format!(
                "input_length must be 1 to {MAX_TOKENS} and output_length at most that"
            )));
        }
        let blocks = line.input_length.div_ceil(BLOCK_TOKENS as u64);
        if line.hash_ids.len() as u64 != blocks {
            let ids = line.hash_ids.len();
            let tokens = line.input_length;
            return Err(self.line_error(format!(
                "{ids} hash_ids for {tokens} tokens; expected {blocks}, one per 512 tokens"
            )));
        }
        let start = *self.start.get_or_insert(line.timestamp);
        let at = ((line.timestamp - start) * 1e6).round();
        if !(0.0..=MAX_TIME_MS * 1e6).contains(&at) || (at as Nanos) < self.last {
            return Err(self.line_error(
                "the timestamp is before the one above it or a year after the first; sort the \
                 lines",
            ));
        }
        self.last = at as Nanos;
        let mut left = line.input_length as usize;
        let pieces: Vec<Piece> = line
            .hash_ids
            .iter()
            .map(|id| {
                let length = left.min(BLOCK_TOKENS);
                left -= length;
                Piece::Text { seed: mix(*id), length: length as u32 }
            })
            .collect();
        // Engines generate at least one token. The answer is in no later prompt of the trace.
        let length = line.output_length.max(1) as u32;
        let answer = Piece::Text { seed: mix(mix(self.number)), length };
        Ok(Request { at: self.last, sequence: Sequence::new(&pieces, answer) })
    }
}

impl<R: BufRead> Iterator for Trace<R> {
    type Item = Result<Request, SimulateError>;

    fn next(&mut self) -> Option<Self::Item> {
        match self.read_line() {
            Err(error) => Some(Err(error)),
            Ok(None) => None,
            Ok(Some(())) => Some(self.request()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use chiasm_types::BlockSize;

    const FIRST: &str = r#"{"timestamp": 27000, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 48]}"#;

    fn read(text: &str) -> Vec<Result<Request, SimulateError>> {
        Trace::new(text.as_bytes(), Path::new("trace.jsonl")).collect()
    }

    fn problem(text: &str) -> String {
        read(text).pop().unwrap().unwrap_err().to_string()
    }

    #[test]
    fn equal_hash_ids_give_equal_blocks() {
        let second = r#"{"timestamp": 27500.5, "input_length": 1536, "output_length": 0, "hash_ids": [46, 47, 49], "x": 1}"#;
        let requests = read(&format!("{FIRST}\n\n{second}\n"));
        let [Ok(first), Ok(second)] = &requests[..] else {
            panic!("two requests: {:?}", requests.len())
        };
        assert_eq!([first.at, second.at], [0, 500_500_000]);
        assert_eq!([first.sequence.prompt(), first.sequence.answer()], [1100, 52]);
        assert_eq!([second.sequence.prompt(), second.sequence.answer()], [1536, 1]);
        let size = BlockSize::new(16).unwrap();
        let first = first.sequence.keys(size);
        let second = second.sequence.keys(size);
        assert_eq!(first[..64], second[..64]);
        assert_ne!(first[64], second[64]);
    }

    #[test]
    fn invalid_line_is_reported_with_its_fault() {
        assert!(problem(&format!("{FIRST}\n{{\"timestamp\": 1}}\n")).contains("line 2"));
        assert!(problem("{\"timestamp\": 1}").contains("input_length"));
        let ids = FIRST.replace("46, ", "");
        assert!(problem(&ids).contains("2 hash_ids for 1100 tokens; expected 3"));
        let back = FIRST.replace("27000", "26999");
        assert!(problem(&format!("{FIRST}\n{back}")).contains("sort the lines"));
        assert!(problem(&FIRST.replace("1100", "0")).contains("input_length must be 1"));
        assert!(problem(&FIRST.replace("52", "99999999")).contains("output_length"));
        assert!(problem(&" ".repeat(2 << 20)).contains("longer than"));
    }

    #[test]
    fn missing_file_is_reported_with_its_path() {
        let error = Trace::open(Path::new("/nowhere/trace.jsonl")).err().unwrap();
        assert!(error.to_string().contains("/nowhere/trace.jsonl"));
    }
}
