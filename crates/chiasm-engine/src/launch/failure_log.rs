//! The engine's log lines about failed requests.

use std::collections::VecDeque;

/// The maximum number of failed requests to keep.
const MAX_FAILURES: usize = 32;

/// The maximum length of a reason, in characters. Clients receive it.
const MAX_REASON_CHARS: usize = 500;

/// The prefixes of messages that name the failed request, in vLLM 0.31 to 0.33:
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
    /// `true` if a traceback follows, whose exception is the reason.
    has_traceback: bool,
    /// `true` if the request's constraint is at fault. vLLM 0.33 answers `validation_error` then.
    blames_constraint: bool,
}

/// The reason that an engine logged for failing a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LoggedFailure {
    /// The message or the exception.
    pub(crate) reason: String,
    /// `true` if the request's constraint is at fault.
    pub(crate) blames_constraint: bool,
}

/// The last failed requests in an engine's log.
#[derive(Debug, Default)]
pub(super) struct FailureLog(VecDeque<Record>);

#[derive(Debug)]
struct Record {
    /// The common prefix of the record's lines: process, level, time and source location.
    prefix: String,
    /// The message of the first line.
    head: String,
    blames_constraint: bool,
    /// The reason; `None` until the line with the exception is read.
    reason: Option<String>,
}

impl FailureLog {
    /// Reads the next line of the log.
    pub(super) fn read_line(&mut self, line: &str) {
        let found = MESSAGES.iter().find_map(|message| Some((message, line.find(message.text)?)));
        if let Some((message, at)) = found {
            let (prefix, head) = line.split_at(at);
            if self.0.len() == MAX_FAILURES {
                self.0.pop_front();
            }
            self.0.push_back(Record {
                prefix: prefix.to_owned(),
                head: head.to_owned(),
                blames_constraint: message.blames_constraint,
                reason: (!message.has_traceback).then(|| shortened(head)),
            });
        } else if let Some(record) = self.0.back_mut()
            && let Some(rest) = line.strip_prefix(record.prefix.as_str())
        {
            if rest.starts_with("Traceback ") {
                // The exception so far caused another one, which is the reason.
                record.reason = None;
            } else if !rest.is_empty() && !rest.starts_with(' ') {
                record.reason.get_or_insert_with(|| shortened(rest));
            }
        }
    }

    /// Returns the failure of this request, if its reason has been logged.
    pub(super) fn find(&self, request_id: &str) -> Option<LoggedFailure> {
        let record = self.0.iter().rev().find(|record| mentions(&record.head, request_id))?;
        let reason = record.reason.clone()?;
        Some(LoggedFailure { reason, blames_constraint: record.blames_constraint })
    }
}

/// Returns `true` if a message contains this id, and not just a longer id that includes it.
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

fn shortened(reason: &str) -> String {
    reason.trim_end().chars().take(MAX_REASON_CHARS).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PREFIX: &str = "(EngineCore pid=7) ERROR 11-25 10:17:35 [__init__.py:209] ";

    fn failure_log(lines: &[&str]) -> FailureLog {
        let mut log = FailureLog::default();
        lines.iter().for_each(|line| log.read_line(&format!("{PREFIX}{line}")));
        log
    }

    #[test]
    fn exception_of_traceback_is_the_reason() {
        let mut log = failure_log(&[
            "Failed to compile grammar for request r-1",
            "Traceback (most recent call last):",
            "  File \"backend_xgrammar.py\", line 100, in compile_grammar",
        ]);
        assert_eq!(log.find("r-1"), None, "its reason is still to come");
        log.read_line("(EngineCore pid=7) INFO 11-25 10:17:35 [loggers.py:1] something else");
        log.read_line(&format!("{PREFIX}RuntimeError: EBNF error at line 1"));
        log.read_line(&format!("{PREFIX}root ::= ^"));
        let failure = log.find("r-1").unwrap();
        assert_eq!(
            (&*failure.reason, failure.blames_constraint),
            ("RuntimeError: EBNF error at line 1", true)
        );
        for other in ["r", "r-12", "1", ""] {
            assert_eq!(log.find(other), None, "{other}");
        }
    }

    #[test]
    fn last_exception_of_chain_is_the_reason() {
        let log = failure_log(&[
            "Unexpected error pre-processing request r",
            "Traceback (most recent call last):",
            "KeyError: 'a'",
            "",
            "During handling of the above exception, another exception occurred:",
            "",
            "Traceback (most recent call last):",
            "ValueError: b",
        ]);
        let failure = log.find("r").unwrap();
        assert_eq!((&*failure.reason, failure.blames_constraint), ("ValueError: b", false));
    }

    #[test]
    fn message_without_traceback_is_the_reason_itself() {
        let message = "Unexpected: grammar rejected tokens [5] for request r. Terminating request.";
        let log = failure_log(&[message]);
        assert_eq!(log.find(""), None);
        let failure = log.find("r").unwrap();
        assert_eq!((&*failure.reason, failure.blames_constraint), (message, false));
    }

    #[test]
    fn failure_log_is_bounded() {
        let mut log = FailureLog::default();
        for number in 0..=MAX_FAILURES {
            let long = "x".repeat(2 * MAX_REASON_CHARS);
            log.read_line(&format!("Failed to advance FSM for request r{number} {long}"));
        }
        assert_eq!(log.find("r0"), None);
        assert_eq!(log.find("r1").unwrap().reason.len(), MAX_REASON_CHARS);
    }
}
