//! A relay for the events of a forwarded stream.
//!
//! Only whole events reach the client. If the stream breaks, an error event can therefore follow
//! the last one.

use bytes::{Bytes, BytesMut};
use memchr::{memchr, memchr_iter, memmem, memrchr_iter};

use crate::stream_begin::LeadingEvent;
use crate::stream_end::{StreamApi, StreamOutcome};

/// The maximum number of buffered bytes of an incomplete event. A longer event, which repeats a
/// request or a whole answer, is forwarded in parts.
const MAX_HELD_BYTES: usize = 256 << 10;
/// The length of the longest blank line, `\n\r\n`, which may be split over two pieces.
const BLANK_LINE_BYTES: usize = 3;

/// Forwards a stream's whole events and tracks the state of the stream.
#[derive(Debug)]
pub struct EventRelay {
    api: StreamApi,
    /// The beginning of an event whose end has not arrived yet.
    held: BytesMut,
    /// The long event that is being forwarded in parts.
    open: Option<OpenEvent>,
    /// The outcome, set when the event that ends the stream is forwarded.
    outcome: Option<StreamOutcome>,
    /// `true` if a choice of a completion had a finish reason. Some servers send no `[DONE]`.
    has_finish: bool,
    /// The sequence number of the next event, in APIs that number events.
    sequence_number: u64,
    /// `true` if an event contained a part of the answer.
    has_content: bool,
    /// The server's message about its own failure, if it failed before any content.
    failure: Option<String>,
}

/// An event that was forwarded in part.
#[derive(Debug)]
struct OpenEvent {
    /// The outcome of the stream, if the event ends it.
    outcome: Option<StreamOutcome>,
}

/// The state of a stream at its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The stream is complete.
    Complete,
    /// The last event is missing. An error event can follow the forwarded events.
    Truncated,
    /// An event was forwarded in part, so no other event can follow.
    MidEvent,
}

impl EventRelay {
    /// Creates a relay for a stream of this API.
    pub fn new(api: StreamApi) -> Self {
        let held = BytesMut::new();
        Self {
            api,
            held,
            open: None,
            outcome: None,
            has_finish: false,
            sequence_number: 0,
            has_content: false,
            failure: None,
        }
    }

    /// Adds a piece of the stream. Returns the bytes that can be forwarded now.
    pub fn push(&mut self, piece: Bytes) -> Option<Bytes> {
        let searched = self.held.len().saturating_sub(BLANK_LINE_BYTES);
        let bytes = if self.held.is_empty() {
            piece
        } else {
            self.held.extend_from_slice(&piece);
            self.held.split().freeze()
        };
        let whole = match whole_events(&bytes, searched) {
            0 if self.open.is_none() && bytes.len() <= MAX_HELD_BYTES => 0,
            0 => {
                if self.open.is_none() {
                    self.open = Some(OpenEvent { outcome: self.outcome_of_part(&bytes) });
                    self.has_content = true;
                }
                bytes.len().saturating_sub(BLANK_LINE_BYTES)
            }
            whole => {
                self.observe_events(&bytes[..whole]);
                whole
            }
        };
        self.held.extend_from_slice(&bytes[whole..]);
        (whole > 0).then(|| bytes.slice(..whole))
    }

    /// Returns the buffered bytes if they end the stream. Called after the server has ended the
    /// stream: the last event may lack its blank line.
    pub fn finish(&mut self) -> Option<Bytes> {
        if self.held.is_empty() {
            return None;
        }
        let rest = self.held.split();
        let outcome = match &self.open {
            Some(event) => event.outcome.clone(),
            None => self.outcome_of_part(&rest),
        };
        let Some(outcome) = self.outcome.take().or(outcome) else {
            self.held = rest;
            return None;
        };
        self.outcome = Some(outcome);
        self.open = None;
        Some([&rest, &b"\n\n"[..]].concat().into())
    }

    /// Returns the state of the stream, assuming that no more bytes arrive. `is_clean` means that
    /// the server itself ended the stream.
    pub fn ending(&self, is_clean: bool) -> Ending {
        if self.outcome.is_some() || (is_clean && self.has_finish && self.open.is_none()) {
            Ending::Complete
        } else if self.open.is_some() {
            Ending::MidEvent
        } else {
            Ending::Truncated
        }
    }

    /// Returns the sequence number of the next event.
    pub fn sequence_number(&self) -> u64 {
        self.sequence_number
    }

    /// Returns `true` if an event contained a part of the answer.
    pub fn has_content(&self) -> bool {
        self.has_content
    }

    /// Returns the outcome after the event that ends the stream was forwarded.
    pub fn outcome(&self) -> Option<&StreamOutcome> {
        self.outcome.as_ref()
    }

    /// Returns the server's message if it reported its own failure before any content.
    pub fn failure(&self) -> Option<&str> {
        self.failure.as_deref()
    }

    /// Updates the state from whole events. The first may be the rest of a long event.
    fn observe_events(&mut self, events: &[u8]) {
        let mut is_rest = match self.open.take() {
            Some(event) => {
                self.outcome = self.outcome.take().or(event.outcome);
                true
            }
            None => false,
        };
        let mut event = Event::default();
        let mut begin = 0;
        for end in memchr_iter(b'\n', events) {
            let line = &events[begin..end];
            begin = end + 1;
            if !matches!(line, b"" | b"\r") {
                event.add(line);
                continue;
            }
            let event = std::mem::take(&mut event);
            if !std::mem::take(&mut is_rest) {
                self.observe_event(&event);
            }
        }
    }

    fn observe_event(&mut self, event: &Event<'_>) {
        if !self.has_content {
            match self.api.classify(event.name(), event.data) {
                LeadingEvent::Prelude => {}
                LeadingEvent::Failure(message) => self.failure = Some(message),
                LeadingEvent::Content => self.has_content = self.failure.is_none(),
            }
        }
        if self.outcome.is_none() {
            self.outcome = self.api.outcome(event.name(), event.data);
        }
        match self.api {
            StreamApi::Completions if !self.has_finish => self.has_finish = has_finish(event.data),
            StreamApi::Responses => {
                if let Some(number) = sequence_number(event.data) {
                    self.sequence_number = number + 1;
                }
            }
            _ => {}
        }
    }

    /// Returns the outcome of the stream if an event that arrived in part ends it.
    fn outcome_of_part(&self, part: &[u8]) -> Option<StreamOutcome> {
        let mut event = Event::default();
        part.split(|byte| *byte == b'\n').for_each(|line| event.add(line));
        self.api.outcome(event.name(), event.data)
    }
}

/// The parts of an event that are inspected.
#[derive(Default)]
struct Event<'a> {
    name: &'a [u8],
    /// The first line of data.
    data: &'a [u8],
}

impl<'a> Event<'a> {
    fn add(&mut self, line: &'a [u8]) {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        let value = |field: &[u8]| Some(line.strip_prefix(field)?.trim_ascii_start());
        if let Some(name) = value(b"event:") {
            self.name = name;
        } else if self.data.is_empty()
            && let Some(data) = value(b"data:")
        {
            self.data = data;
        }
    }

    /// Returns the event's name. Some servers send the name only as `type` at the start of the
    /// data.
    fn name(&self) -> &'a [u8] {
        if !self.name.is_empty() {
            return self.name;
        }
        let kind = self.data.strip_prefix(b"{\"type\":").map(<[u8]>::trim_ascii_start);
        let kind = kind.and_then(|kind| kind.strip_prefix(b"\""));
        kind.and_then(|kind| Some(&kind[..memchr(b'"', kind)?])).unwrap_or_default()
    }
}

/// Returns the length of the whole events at the start of `bytes`. No blank line ends before
/// `from`.
fn whole_events(bytes: &[u8], from: usize) -> usize {
    let is_blank_line = |&end: &usize| {
        let before = bytes[..end].strip_suffix(b"\r").unwrap_or(&bytes[..end]);
        before.ends_with(b"\n")
    };
    let mut ends = memrchr_iter(b'\n', &bytes[from..]).map(|at| from + at);
    ends.find(is_blank_line).map_or(0, |end| end + 1)
}

/// Returns `true` if a chunk has a finish reason.
fn has_finish(data: &[u8]) -> bool {
    const FIELD: &[u8] = b"\"finish_reason\":";
    memmem::find_iter(data, FIELD)
        .any(|at| data[at + FIELD.len()..].trim_ascii_start().starts_with(b"\""))
}

/// Returns an event's sequence number. Quotes inside strings are escaped, so text can't match the
/// field.
fn sequence_number(data: &[u8]) -> Option<u64> {
    const FIELD: &[u8] = b"\"sequence_number\":";
    let rest = data[memmem::rfind(data, FIELD)? + FIELD.len()..].trim_ascii_start();
    let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
    str::from_utf8(&rest[..digits]).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHAT: &[u8] =
        b"data: {\"choices\":[{\"delta\":{\"content\":\"a\"},\"finish_reason\":null}]}\n\n\
        : alive\r\n\r\n\
        data: {\"choices\":[{\"finish_reason\": \"stop\"}]}\n\ndata: [DONE]\n\n";

    /// Relays pieces and returns the forwarded bytes.
    fn relayed(relay: &mut EventRelay, pieces: &[&[u8]]) -> Vec<u8> {
        pieces
            .iter()
            .filter_map(|piece| relay.push(Bytes::copy_from_slice(piece)))
            .flatten()
            .collect()
    }

    #[test]
    fn stream_cut_anywhere_leaves_whole_events() {
        for size in 1..CHAT.len() {
            let mut relay = EventRelay::new(StreamApi::Completions);
            for (number, piece) in CHAT.chunks(size).enumerate() {
                let sent = relay.push(Bytes::copy_from_slice(piece)).unwrap_or_default();
                assert!(
                    sent.is_empty() || sent.ends_with(b"\n\n") || sent.ends_with(b"\n\r\n"),
                    "{size} {number}"
                );
            }
            assert_eq!(relay.ending(false), Ending::Complete, "{size}");
        }
        for cut in 0..CHAT.len() {
            let mut relay = EventRelay::new(StreamApi::Completions);
            let sent = relayed(&mut relay, &[&CHAT[..cut]]);
            assert_eq!(sent.len(), whole_events(&CHAT[..cut], 0), "{cut}");
            assert_eq!(relay.ending(false), Ending::Truncated, "{cut}");
        }
    }

    #[test]
    fn completion_without_done_is_complete_after_finish() {
        let end = CHAT.len() - b"data: [DONE]\n\n".len();
        let mut relay = EventRelay::new(StreamApi::Completions);
        relayed(&mut relay, &[&CHAT[..end]]);
        assert_eq!(
            (relay.ending(true), relay.ending(false)),
            (Ending::Complete, Ending::Truncated)
        );
        let mut relay = EventRelay::new(StreamApi::Completions);
        relayed(&mut relay, &[&CHAT[..80]]);
        assert_eq!(relay.ending(true), Ending::Truncated);
    }

    #[test]
    fn first_end_event_determines_outcome() {
        let failure = &b"data: {\"error\": {\"code\": 500, \"message\": \"gone\"}}\n\n"[..];
        let refusal = &b"data: {\"id\": 1, \"error\": {\"code\": 400}}\n\n"[..];
        let failed = StreamOutcome::Failed("gone".to_owned());
        let cases = [
            (CHAT, StreamOutcome::Finished),
            (failure, failed),
            (refusal, StreamOutcome::Finished),
        ];
        for (first, outcome) in cases {
            for second in [CHAT, failure, b""] {
                let mut relay = EventRelay::new(StreamApi::Completions);
                relayed(&mut relay, &[first, second]);
                assert_eq!(
                    (relay.ending(false), relay.outcome()),
                    (Ending::Complete, Some(&outcome))
                );
            }
        }
    }

    #[test]
    fn failure_without_readable_data_has_no_message() {
        let failed = Some(&StreamOutcome::Failed(String::new()));
        let mut relay = EventRelay::new(StreamApi::Responses);
        relayed(&mut relay, &[b"event: response.failed\ndata: {\"type\":\"response.f"]);
        assert!(relay.finish().is_some() && relay.outcome() == failed);
        let long = [
            &b"event: response.failed\ndata: {\"pad\":\""[..],
            &[b'x'; MAX_HELD_BYTES],
            b"\"}\n\n",
        ]
        .concat();
        let mut relay = EventRelay::new(StreamApi::Responses);
        relayed(&mut relay, &[&long[..MAX_HELD_BYTES + 9], &long[MAX_HELD_BYTES + 9..]]);
        assert_eq!(relay.outcome(), failed);
    }

    #[test]
    fn last_event_without_blank_line_is_completed() {
        let mut relay = EventRelay::new(StreamApi::Messages);
        relayed(&mut relay, &[b"event: message_stop\ndata: {\"type\":\"message_stop\"}"]);
        assert!(relay.finish().unwrap().ends_with(b"\"message_stop\"}\n\n"));
        assert_eq!(relay.ending(true), Ending::Complete);
        let mut relay = EventRelay::new(StreamApi::Messages);
        relayed(&mut relay, &[b"event: content_block_delta\ndata: {\"ty"]);
        assert_eq!((relay.finish(), relay.ending(true)), (None, Ending::Truncated));
    }

    #[test]
    fn long_event_is_forwarded_in_parts() {
        let padding = vec![b'x'; MAX_HELD_BYTES];
        let begin = b"event: response.completed\ndata: {\"type\":\"response.completed\",\
              \"sequence_number\":9,\"pad\":\"";
        let event = [&begin[..], &padding, b"\"}\r\n\r\n"].concat();
        let mut relay = EventRelay::new(StreamApi::Responses);
        let sent = relayed(&mut relay, &[&event[..event.len() - 9]]);
        assert!(sent.len() > MAX_HELD_BYTES, "{}", sent.len());
        assert_eq!(relay.ending(true), Ending::MidEvent);
        let rest: Vec<_> = event[event.len() - 9..].chunks(1).collect();
        let sent = [sent, relayed(&mut relay, &rest)].concat();
        assert!(sent == event);
        assert_eq!(relay.ending(false), Ending::Complete);
    }

    #[test]
    fn failure_takes_the_next_sequence_number() {
        let mut relay = EventRelay::new(StreamApi::Responses);
        let text = br#""delta":"\"sequence_number\":99""#;
        let event = [
            &b"event: response.output_text.delta\ndata: {\"sequence_number\": 41,"[..],
            text,
            b"}\n\n",
        ]
        .concat();
        relayed(&mut relay, &[&event, b"event: x\ndata: {\"sequence_number\":50"]);
        assert_eq!(relay.sequence_number(), 42);
    }

    #[test]
    fn type_in_data_names_unnamed_event() {
        let mut relay = EventRelay::new(StreamApi::Responses);
        relayed(&mut relay, &[b"data: {\"type\": \"response.completed\"}\n\n"]);
        assert_eq!(relay.ending(false), Ending::Complete);
    }
}
