use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use chiasm_types::{MmHash, Modality, Placeholder, TokenId};

use crate::{Adapter, MediaSource, Sampling};

/// A prepared request for one backend.
#[derive(Clone, Debug)]
pub struct Job {
    /// The request that it belongs to.
    pub id: RequestId,
    /// What to continue.
    pub input: Input,
    /// The media items, in the order in which they stand in the prompt.
    pub media: Arc<[JobItem]>,
    /// How tokens are chosen and when to stop.
    pub sampling: Sampling,
    /// The LoRA adapter that computes it, which the backend has loaded; `None` for the model alone.
    pub adapter: Option<Arc<Adapter>>,
    /// Keeps prompts of different owners from sharing cached blocks.
    pub cache_salt: Option<String>,
    /// Lower is handled earlier, by backends with a priority scheduler.
    pub priority: i64,
    /// The trace that the backend's own spans belong to.
    pub trace: Option<TraceContext>,
    /// What is known of the answer's reasoning, behind which a constraint begins.
    pub reasoning: ReasoningHints,
    /// What of the request the backend is to compute.
    pub stage: Stage,
    /// These are the media items whose embeddings the backend's engine should find on its machine,
    /// as others have encoded them.
    pub embedded: Vec<MmHash>,
}

/// The part of a request that a job is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Stage {
    /// Prompt and answer.
    #[default]
    Whole,
    /// The media items alone, which are all that the prompt consists of: their embeddings are left
    /// for other backends of the machine, which find them by the items' identities.
    /// [`RunningJob::embeddings`](crate::RunningJob::embeddings) tells what was left; nothing else
    /// comes of it.
    Encode,
    /// The prompt alone: its keys and values are left for another backend, which
    /// [`RunningJob::left`](crate::RunningJob::left) tells how to get. The one token that comes of
    /// it is not part of the answer.
    Prefill,
    /// The answer, and of the prompt what did not come from the backend that has computed it.
    Decode(Left),
}

/// How a backend gets the keys and values of a prompt that another one has computed, in the
/// engine's own words: nothing else may be made of them, and they are good for one job.
#[derive(Clone, PartialEq, Eq)]
pub struct Left(Bytes);

impl Left {
    /// Most bytes of it: an engine names some blocks with a few bytes each.
    pub const MAX_BYTES: usize = 1 << 20;

    /// Wraps what an engine has said. `None` if it is too long.
    pub fn new(words: Bytes) -> Option<Self> {
        (words.len() <= Self::MAX_BYTES).then_some(Self(words))
    }

    /// What the engine has said.
    pub fn words(&self) -> &Bytes {
        &self.0
    }
}

/// The embeddings of a media item that a backend has left for others of its machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Embeddings {
    /// The item.
    pub item: MmHash,
    /// The room that they take.
    pub bytes: u64,
}

impl fmt::Debug for Left {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Left({} bytes)", self.0.len())
    }
}

/// What a backend that looks for the end of an answer's reasoning can't see in the prompt.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReasoningHints {
    /// A constraint holds from the first token on, whatever the prompt's end says.
    pub is_over: bool,
    /// The variables of the chat template that turn thinking on and off, as far as they were set.
    pub variables: Vec<(&'static str, bool)>,
}

/// What a job continues. Which of the two a worker takes is in its
/// [`Capabilities`](crate::Capabilities).
#[derive(Clone, Debug)]
pub enum Input {
    /// The expanded prompt: each media item stands as its placeholder.
    Tokens(Arc<Vec<TokenId>>),
    /// The prompt with one marker for each media item, for a worker that expands it itself
    /// ([`PlaceholderForm::Marker`](crate::PlaceholderForm::Marker)).
    Marked {
        /// What the worker is given.
        tokens: Arc<Vec<TokenId>>,
        /// What it is expected to make of that.
        expanded: Arc<Vec<TokenId>>,
    },
    /// The client's own request body, as JSON.
    Messages(Bytes),
}

/// One media item of a job.
#[derive(Clone)]
pub struct JobItem {
    /// What kind of thing it is.
    pub modality: Modality,
    /// Its identity: content, processor and settings.
    pub hash: MmHash,
    /// Where it stands in the prompt.
    pub placeholder: Placeholder,
    /// Elements of its largest tensor.
    pub elements: u64,
    /// Where its bytes or tensors can be had.
    pub source: Arc<dyn MediaSource>,
}

impl JobItem {
    /// The identity as engines see it.
    pub fn name(&self) -> String {
        self.hash.to_string()
    }
}

impl fmt::Debug for JobItem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JobItem")
            .field("modality", &self.modality)
            .field("hash", &self.hash)
            .field("offset", &self.placeholder.offset)
            .field("length", &self.placeholder.length)
            .finish_non_exhaustive()
    }
}

/// The one identity of a request: in the client's header, the OpenAI id, the engine's request id,
/// every span and log line.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct RequestId(Arc<str>);

impl RequestId {
    /// Most bytes of an id. Clients use UUIDs and trace ids; engines put it into every message.
    pub const MAX_BYTES: usize = 128;

    /// An id that a client gives. `None` if it is empty, longer than [`RequestId::MAX_BYTES`], or
    /// has other characters than ASCII letters, digits, `-`, `_`, `.` and `:`, which are safe in
    /// headers, logs and file names of traces.
    pub fn new(id: &str) -> Option<Self> {
        let is_safe =
            |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.' | b':');
        let is_valid = (1..=Self::MAX_BYTES).contains(&id.len()) && id.bytes().all(is_safe);
        is_valid.then(|| Self(id.into()))
    }

    /// An id of 32 hex digits made of a random number.
    pub fn from_random(number: u128) -> Self {
        Self(format!("{number:032x}").into())
    }

    /// The id.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

impl fmt::Debug for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RequestId({self})")
    }
}

/// W3C trace context: <https://www.w3.org/TR/trace-context/>.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceContext {
    traceparent: Arc<str>,
    tracestate: Option<Arc<str>>,
}

impl TraceContext {
    /// Most bytes of `tracestate`; the standard asks for 512 to be passed on.
    const MAX_STATE_BYTES: usize = 512;

    /// Reads the two headers. `None` if `traceparent` is not a valid one of version 00, or of a
    /// later version that begins like it; the standard says to go on without a trace then. A
    /// `tracestate` that is too long or not printable ASCII is dropped alone.
    pub fn parse(traceparent: &str, tracestate: Option<&str>) -> Option<Self> {
        let is_hex = |text: &str, digits: usize| {
            text.len() == digits && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
        };
        let is_zero = |text: &str| text.bytes().all(|b| b == b'0');
        let mut parts = traceparent.splitn(5, '-');
        let (version, trace, parent, flags) =
            (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
        let rest = parts.next();
        let is_valid = is_hex(version, 2)
            && version != "ff"
            && is_hex(trace, 32)
            && !is_zero(trace)
            && is_hex(parent, 16)
            && !is_zero(parent)
            && is_hex(flags, 2)
            && (rest.is_none() || version != "00");
        let state_is_valid = |state: &&str| {
            state.len() <= Self::MAX_STATE_BYTES && state.bytes().all(|b| matches!(b, b' '..=b'~'))
        };
        is_valid.then(|| Self {
            // A later version's additions mean nothing to us: what is passed on is of version 00.
            traceparent: format!("00-{trace}-{parent}-{flags}").into(),
            tracestate: tracestate.filter(state_is_valid).map(Into::into),
        })
    }

    /// The context of a new span of a new trace, which is to be recorded if `sampled`.
    pub fn begin(trace_id: [u8; 16], span_id: [u8; 8], sampled: bool) -> Self {
        let (trace, span) = (u128::from_be_bytes(trace_id), u64::from_be_bytes(span_id));
        let flags = u8::from(sampled);
        Self {
            traceparent: format!("00-{trace:032x}-{span:016x}-{flags:02x}").into(),
            tracestate: None,
        }
    }

    /// The context of a new span below this one: of the same trace, and to be recorded if this one
    /// is.
    #[must_use]
    pub fn child(&self, span_id: [u8; 8]) -> Self {
        let (trace, flags) = (self.trace_id(), self.traceparent.get(53..).unwrap_or_default());
        let span = u64::from_be_bytes(span_id);
        Self {
            traceparent: format!("00-{trace}-{span:016x}-{flags}").into(),
            tracestate: self.tracestate.clone(),
        }
    }

    /// Whether whoever began the trace wants it recorded.
    pub fn is_sampled(&self) -> bool {
        let flags = self.traceparent.get(53..).and_then(|flags| u8::from_str_radix(flags, 16).ok());
        flags.is_some_and(|flags| flags & 1 == 1)
    }

    /// The trace and the span, as numbers' bytes.
    pub fn ids(&self) -> ([u8; 16], [u8; 8]) {
        let trace = u128::from_str_radix(self.trace_id(), 16).unwrap_or_default();
        let span = self
            .traceparent
            .get(36..52)
            .and_then(|span| u64::from_str_radix(span, 16).ok())
            .unwrap_or_default();
        (trace.to_be_bytes(), span.to_be_bytes())
    }

    /// What came in the header `tracestate`.
    pub fn state(&self) -> Option<&str> {
        self.tracestate.as_deref()
    }

    /// The 32 hex digits that all spans of the trace share.
    pub fn trace_id(&self) -> &str {
        self.traceparent.get(3..35).unwrap_or_default()
    }

    /// The headers that carry the trace on, by their names.
    pub fn headers(&self) -> impl Iterator<Item = (&'static str, &str)> {
        let state = self.tracestate.as_deref().map(|state| ("tracestate", state));
        std::iter::once(("traceparent", &*self.traceparent)).chain(state)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_short_and_harmless() {
        for id in ["a", "5f0c-1_x.y:z", &"x".repeat(128)] {
            assert_eq!(RequestId::new(id).unwrap().as_str(), id);
        }
        for id in ["", "a b", "a\nb", "ä", "a/b", "a\"b", "\u{1b}[2J", &"x".repeat(129)] {
            assert!(RequestId::new(id).is_none(), "{id:?}");
        }
        assert_eq!(RequestId::from_random(10).as_str(), "0000000000000000000000000000000a");
    }

    const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    #[test]
    fn a_span_below_another_is_of_its_trace() {
        let parent = TraceContext::parse(PARENT, Some("a=b")).unwrap();
        let (trace, span) = parent.ids();
        assert_eq!((trace[0], trace[15], span[0], span[7]), (0x4b, 0x36, 0, 0xb7));
        let child = parent.child([0, 0, 0, 0, 0, 0, 1, 2]);
        let headers: Vec<_> = child.headers().collect();
        assert_eq!(headers[0].1, "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000102-01");
        assert_eq!((child.ids(), child.state()), ((trace, [0, 0, 0, 0, 0, 0, 1, 2]), Some("a=b")));
        let begun = TraceContext::begin(trace, span, true);
        assert_eq!(begun.headers().next(), Some(("traceparent", PARENT)));
        assert!(!TraceContext::begin(trace, span, false).is_sampled());
        for (flags, sampled) in [("00", false), ("01", true), ("02", false), ("ff", true)] {
            let context = TraceContext::parse(&format!("{}{flags}", &PARENT[..53]), None).unwrap();
            assert_eq!(
                (context.is_sampled(), context.child(span).is_sampled()),
                (sampled, sampled),
                "{flags}"
            );
        }
    }

    #[test]
    fn a_trace_is_passed_on_as_it_came() {
        let trace = TraceContext::parse(PARENT, Some("congo=t61rcWkgMzE")).unwrap();
        assert_eq!(trace.trace_id(), "4bf92f3577b34da6a3ce929d0e0e4736");
        let headers: Vec<_> = trace.headers().collect();
        assert_eq!(headers, [("traceparent", PARENT), ("tracestate", "congo=t61rcWkgMzE")]);
        let later = format!("01{}-what-comes", &PARENT[2..]);
        assert_eq!(
            TraceContext::parse(&later, None).unwrap().headers().next(),
            Some(("traceparent", PARENT))
        );
    }

    #[test]
    fn what_is_no_trace_is_none() {
        for parent in [
            "",
            "00",
            "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
            "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7",
        ] {
            assert!(TraceContext::parse(parent, None).is_none(), "{parent}");
        }
        let bad_state = TraceContext::parse(PARENT, Some("a\n=b")).unwrap();
        assert_eq!(bad_state.headers().count(), 1);
        assert_eq!(
            TraceContext::parse(PARENT, Some(&"a".repeat(513))).unwrap().headers().count(),
            1
        );
    }
}
