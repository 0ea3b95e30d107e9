//! Lines that an engine logs about single requests that it fails.

use std::collections::VecDeque;

/// The maximum number of failed requests that are remembered.
const MAX_COMPLAINTS: usize = 32;

/// The maximum length of a reason, in characters: clients get it.
const MAX_REASON_CHARS: usize = 500;

/// The beginnings of messages that name the failed request, in vLLM 0.31 to 0.33:
/// `v1/structured_output/__init__.py`, `v1/core/sched/scheduler.py`,
/// `v1/structured_output/backend_xgrammar.py` and `v1/engine/core.py`.
const MESSAGES: [Message; 4] = [
    Message {
        text: "Failed to compile grammar for request ",
        has_traceback: true,
        blames_constraint: true,
    },
    Message {
        text: "Unexpected error pre-processing request ",
        has_traceback: true,
        blames_constraint: false,
    },
    Message {
        text: "Unexpected: grammar rejected tokens ",
        has_traceback: false,
        blames_constraint: false,
    },
    Message {
        text: "Failed to advance FSM for request ",
        has_traceback: false,
        blames_constraint: false,
    },
];

struct Message {
    text: &'static str,
    /// A traceback follows, and its exception is the reason.
    has_traceback: bool,
    /// The request's constraint is at fault. vLLM 0.33 answers `validation_error` then.
    blames_constraint: bool,
}

/// The reason that an engine logged for failing a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Complaint {
    /// The engine's words: its message, or the exception.
    pub(crate) words: String,
    /// `true` if the engine says that the request's constraint is at fault.
    pub(crate) blames_constraint: bool,
}

/// The last failures that name their request.
#[derive(Debug, Default)]
pub(super) struct Complaints(VecDeque<Record>);

#[derive(Debug)]
struct Record {
    /// The prefix that its lines share: process, level, time and place.
    prefix: String,
    /// The first line's message.
    head: String,
    blames_constraint: bool,
    /// The reason; `None` until the line with the exception has come.
    words: Option<String>,
}

impl Complaints {
    /// Reads the next line of the log.
    pub(super) fn read(&mut self, line: &str) {
        let found = MESSAGES.iter().find_map(|message| Some((message, line.find(message.text)?)));
        if let Some((message, at)) = found {
            let (prefix, head) = line.split_at(at);
            if self.0.len() == MAX_COMPLAINTS {
                self.0.pop_front();
            }
            self.0.push_back(Record {
                prefix: prefix.to_owned(),
                head: head.to_owned(),
                blames_constraint: message.blames_constraint,
                words: (!message.has_traceback).then(|| shortened(head)),
            });
        } else if let Some(record) = self.0.back_mut()
            && let Some(rest) = line.strip_prefix(record.prefix.as_str())
        {
            if rest.starts_with("Traceback ") {
                // The exception above has led to another one, which is the reason then.
                record.words = None;
            } else if !rest.is_empty() && !rest.starts_with(' ') {
                record.words.get_or_insert_with(|| shortened(rest));
            }
        }
    }

    /// Returns the reason for the failure of this request, if it has been logged.
    pub(super) fn about(&self, request_id: &str) -> Option<Complaint> {
        let record = self.0.iter().rev().find(|record| mentions(&record.head, request_id))?;
        let words = record.words.clone()?;
        Some(Complaint { words, blames_constraint: record.blames_constraint })
    }
}

/// Returns `true` if a message has this id, and not just a longer id that contains it.
fn mentions(message: &str, request_id: &str) -> bool {
    if request_id.is_empty() {
        return false;
    }
    let in_id = |char: char| char.is_ascii_alphanumeric() || matches!(char, '-' | '_');
    let mut places = message.match_indices(request_id);
    places.any(|(at, _)| {
        let ends = message[at + request_id.len()..].chars().next().is_none_or(|char| !in_id(char));
        ends && message[..at].chars().next_back().is_none_or(|char| !in_id(char))
    })
}

fn shortened(words: &str) -> String {
    words.trim_end().chars().take(MAX_REASON_CHARS).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PREFIX: &str = "(EngineCore pid=7) ERROR 11-25 10:17:35 [__init__.py:209] ";

    fn complaints(lines: &[&str]) -> Complaints {
        let mut complaints = Complaints::default();
        lines.iter().for_each(|line| complaints.read(&format!("{PREFIX}{line}")));
        complaints
    }

    #[test]
    fn exception_of_traceback_is_the_reason() {
        let mut complaints = complaints(&[
            "Failed to compile grammar for request r-1",
            "Traceback (most recent call last):",
            "  File \"backend_xgrammar.py\", line 100, in compile_grammar",
        ]);
        assert_eq!(complaints.about("r-1"), None, "its reason is still to come");
        complaints.read("(EngineCore pid=7) INFO 11-25 10:17:35 [loggers.py:1] something else");
        complaints.read(&format!("{PREFIX}RuntimeError: EBNF error at line 1"));
        complaints.read(&format!("{PREFIX}root ::= ^"));
        let complaint = complaints.about("r-1").unwrap();
        assert_eq!(
            (&*complaint.words, complaint.blames_constraint),
            ("RuntimeError: EBNF error at line 1", true)
        );
        for other in ["r", "r-12", "1", ""] {
            assert_eq!(complaints.about(other), None, "{other}");
        }
    }

    #[test]
    fn cause_gives_way_to_its_consequence() {
        let complaints = complaints(&[
            "Unexpected error pre-processing request r",
            "Traceback (most recent call last):",
            "KeyError: 'a'",
            "",
            "During handling of the above exception, another exception occurred:",
            "",
            "Traceback (most recent call last):",
            "ValueError: b",
        ]);
        let complaint = complaints.about("r").unwrap();
        assert_eq!((&*complaint.words, complaint.blames_constraint), ("ValueError: b", false));
    }

    #[test]
    fn message_without_traceback_is_the_reason_itself() {
        let message = "Unexpected: grammar rejected tokens [5] for request r. Terminating request.";
        let complaints = complaints(&[message]);
        assert_eq!(complaints.about(""), None);
        let complaint = complaints.about("r").unwrap();
        assert_eq!((&*complaint.words, complaint.blames_constraint), (message, false));
    }

    #[test]
    fn old_failures_and_long_words_are_let_go() {
        let mut complaints = Complaints::default();
        for number in 0..=MAX_COMPLAINTS {
            let long = "x".repeat(2 * MAX_REASON_CHARS);
            complaints.read(&format!("Failed to advance FSM for request r{number} {long}"));
        }
        assert_eq!(complaints.about("r0"), None);
        assert_eq!(complaints.about("r1").unwrap().words.len(), MAX_REASON_CHARS);
    }
}
