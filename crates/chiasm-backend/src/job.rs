use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use chiasm_types::{MmHash, Modality, Placeholder, TokenId};

use crate::{Adapter, MediaSource, Sampling};

/// A prepared request for one backend.
#[derive(Clone, Debug)]
pub struct Job {
    /// The identity of the request that the job belongs to.
    pub id: RequestId,
    /// The prompt to continue.
    pub input: Input,
    /// The media items, in the order of the prompt.
    pub media: Arc<[JobItem]>,
    /// The sampling settings and stop conditions.
    pub sampling: Sampling,
    /// The LoRA adapter, which the backend must have loaded; `None` for the base model.
    pub adapter: Option<Arc<Adapter>>,
    /// A salt of the block keys: prompts with different salts share no cached blocks.
    pub cache_salt: Option<String>,
    /// The priority in backends with a priority scheduler; lower values run earlier.
    pub priority: i64,
    /// The trace that the backend's own spans belong to.
    pub trace: Option<TraceContext>,
    /// Hints about the answer's reasoning, after which a constraint applies.
    pub reasoning: ReasoningHints,
    /// The stage of the request that the backend computes.
    pub stage: Stage,
    /// The media items that other engines have encoded: the backend's engine should find their
    /// embeddings on its machine.
    pub embedded: Vec<MmHash>,
}

/// The stage of a request that a job computes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Stage {
    /// The prompt and the answer.
    #[default]
    Whole,
    /// Only the media items, of which the prompt consists. Their embeddings are stored for other
    /// backends on the machine, which find them by the items' identities. The only output is
    /// [`RunningJob::stored_embeddings`](crate::RunningJob::stored_embeddings).
    Encode,
    /// Only the prompt. Another backend loads its keys and values with
    /// [`RunningJob::kv_transfer_params`](crate::RunningJob::kv_transfer_params). The single token
    /// that the job generates is not part of the answer.
    Prefill,
    /// The answer, and the part of the prompt that can't be loaded from the backend that has
    /// computed it.
    Decode(KvTransferParams),
}

/// The parameters with which a backend loads the keys and values of a prompt that another backend
/// has computed.
///
/// They are opaque: the engine that computes the prompt writes them, and the engine that answers
/// reads them. They are valid for one job.
#[derive(Clone, PartialEq, Eq)]
pub struct KvTransferParams(Bytes);

impl KvTransferParams {
    /// The maximum size: an engine names some blocks with a few bytes each.
    pub const MAX_BYTES: usize = 1 << 20;

    /// Wraps an engine's parameters. Returns `None` if they are longer than
    /// [`MAX_BYTES`](Self::MAX_BYTES).
    pub fn new(params: Bytes) -> Option<Self> {
        (params.len() <= Self::MAX_BYTES).then_some(Self(params))
    }

    /// Returns the encoded parameters.
    pub fn bytes(&self) -> &Bytes {
        &self.0
    }
}

/// The embeddings of a media item that a backend has stored for other backends on its machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredEmbeddings {
    /// The identity of the item.
    pub item: MmHash,
    /// The size of the embeddings in bytes.
    pub bytes: u64,
}

impl fmt::Debug for KvTransferParams {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KvTransferParams({} bytes)", self.0.len())
    }
}

/// Hints for a backend that detects the end of an answer's reasoning: facts that the prompt does
/// not show.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReasoningHints {
    /// `true` if a constraint applies from the first token on, regardless of the prompt's end.
    pub is_over: bool,
    /// The variables of the chat template that turn thinking on or off, if they are set.
    pub variables: Vec<(&'static str, bool)>,
}

/// The prompt that a job continues. A worker's [`Capabilities`](crate::Capabilities) say which form
/// it takes.
#[derive(Clone, Debug)]
pub enum Input {
    /// The expanded prompt, with a placeholder for each media item.
    Tokens(Arc<Vec<TokenId>>),
    /// The prompt with one marker per media item, for a worker that expands the markers itself
    /// ([`PlaceholderForm::Marker`](crate::PlaceholderForm::Marker)).
    Marked {
        /// The prompt that the worker gets.
        tokens: Arc<Vec<TokenId>>,
        /// The prompt that the worker is expected to make of it.
        expanded: Arc<Vec<TokenId>>,
    },
    /// The client's own request body, as JSON.
    Messages(Bytes),
}

/// A media item of a job.
#[derive(Clone)]
pub struct JobItem {
    /// The kind of the item.
    pub modality: Modality,
    /// The identity: a hash of content, processor and settings.
    pub hash: MmHash,
    /// The placeholder in the prompt.
    pub placeholder: Placeholder,
    /// The number of elements in the largest tensor.
    pub elements: u64,
    /// The source of the item's bytes and tensors.
    pub source: Arc<dyn MediaSource>,
}

impl JobItem {
    /// Returns the identity in the form that engines use.
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

/// The identity of a request, in the client's header, the OpenAI id, the engine's request id, and
/// every span and log line.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct RequestId(Arc<str>);

impl RequestId {
    /// The maximum length of an id. Clients use UUIDs and trace ids; engines repeat the id in every
    /// message.
    pub const MAX_BYTES: usize = 128;

    /// Validates a client's id. Returns `None` if the id is empty, is longer than
    /// [`RequestId::MAX_BYTES`], or has other characters than ASCII letters, digits, `-`, `_`, `.`
    /// and `:`. These are safe in headers, logs and file names of traces.
    pub fn new(id: &str) -> Option<Self> {
        let is_safe =
            |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.' | b':');
        let is_valid = (1..=Self::MAX_BYTES).contains(&id.len()) && id.bytes().all(is_safe);
        is_valid.then(|| Self(id.into()))
    }

    /// Returns an id of 32 hex digits from a random number.
    pub fn from_random(number: u128) -> Self {
        Self(format!("{number:032x}").into())
    }

    /// Returns the id.
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

/// A W3C trace context: <https://www.w3.org/TR/trace-context/>.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceContext {
    traceparent: Arc<str>,
    tracestate: Option<Arc<str>>,
}

impl TraceContext {
    /// The maximum length of `tracestate`. The standard recommends that at least 512
    /// are passed on.
    const MAX_STATE_BYTES: usize = 512;

    /// Parses the two headers.
    ///
    /// Returns `None` if `traceparent` is valid neither in version 00 nor in a later version that
    /// begins like it; the standard says to proceed without a trace then. A `tracestate` that is
    /// too long or not printable ASCII is dropped, and the trace is kept.
    pub fn parse(traceparent: &str, tracestate: Option<&str>) -> Option<Self> {
        let is_hex = |text: &str, digits: usize| {
            text.len() == digits && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
        };
        let is_zero = |text: &str| text.bytes().all(|b| b == b'0');
        let mut parts = traceparent.splitn(5, '-');
        let version = parts.next()?;
        let trace = parts.next()?;
        let parent = parts.next()?;
        let flags = parts.next()?;
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
            // The additions of a later version are unknown here, so version 00 is passed on.
            traceparent: format!("00-{trace}-{parent}-{flags}").into(),
            tracestate: tracestate.filter(state_is_valid).map(Into::into),
        })
    }

    /// Creates the context of the root span of a new trace, which is recorded if `sampled`.
    pub fn new_root(trace_id: [u8; 16], span_id: [u8; 8], sampled: bool) -> Self {
        let trace = u128::from_be_bytes(trace_id);
        let span = u64::from_be_bytes(span_id);
        let flags = u8::from(sampled);
        Self {
            traceparent: format!("00-{trace:032x}-{span:016x}-{flags:02x}").into(),
            tracestate: None,
        }
    }

    /// Creates the context of a child span, which is recorded if this span is.
    #[must_use]
    pub fn child(&self, span_id: [u8; 8]) -> Self {
        let trace = self.trace_id();
        let flags = self.traceparent.get(53..).unwrap_or_default();
        let span = u64::from_be_bytes(span_id);
        Self {
            traceparent: format!("00-{trace}-{span:016x}-{flags}").into(),
            tracestate: self.tracestate.clone(),
        }
    }

    /// Returns `true` if the trace is to be recorded, by its `sampled` flag.
    pub fn is_sampled(&self) -> bool {
        let flags = self.traceparent.get(53..).and_then(|flags| u8::from_str_radix(flags, 16).ok());
        flags.is_some_and(|flags| flags & 1 == 1)
    }

    /// Returns the ids of the trace and the span as big-endian bytes.
    pub fn ids(&self) -> ([u8; 16], [u8; 8]) {
        let trace = u128::from_str_radix(self.trace_id(), 16).unwrap_or_default();
        let span = self
            .traceparent
            .get(36..52)
            .and_then(|span| u64::from_str_radix(span, 16).ok())
            .unwrap_or_default();
        (trace.to_be_bytes(), span.to_be_bytes())
    }

    /// Returns the header `tracestate`.
    pub fn state(&self) -> Option<&str> {
        self.tracestate.as_deref()
    }

    /// Returns the trace id, 32 hex digits that all spans of the trace share.
    pub fn trace_id(&self) -> &str {
        self.traceparent.get(3..35).unwrap_or_default()
    }

    /// Returns the names and values of the headers that propagate the trace.
    pub fn headers(&self) -> impl Iterator<Item = (&'static str, &str)> {
        let state = self.tracestate.as_deref().map(|state| ("tracestate", state));
        std::iter::once(("traceparent", &*self.traceparent)).chain(state)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_id_is_short_with_safe_characters() {
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
    fn child_span_belongs_to_its_parents_trace() {
        let parent = TraceContext::parse(PARENT, Some("a=b")).unwrap();
        let (trace, span) = parent.ids();
        assert_eq!((trace[0], trace[15], span[0], span[7]), (0x4b, 0x36, 0, 0xb7));
        let child = parent.child([0, 0, 0, 0, 0, 0, 1, 2]);
        let headers: Vec<_> = child.headers().collect();
        assert_eq!(headers[0].1, "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000102-01");
        assert_eq!((child.ids(), child.state()), ((trace, [0, 0, 0, 0, 0, 0, 1, 2]), Some("a=b")));
        let root = TraceContext::new_root(trace, span, true);
        assert_eq!(root.headers().next(), Some(("traceparent", PARENT)));
        assert!(!TraceContext::new_root(trace, span, false).is_sampled());
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
    fn trace_headers_are_passed_on_unchanged() {
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
    fn malformed_traceparent_is_dropped() {
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
        let context_without_state = TraceContext::parse(PARENT, Some("a\n=b")).unwrap();
        assert_eq!(context_without_state.headers().count(), 1);
        assert_eq!(
            TraceContext::parse(PARENT, Some(&"a".repeat(513))).unwrap().headers().count(),
            1
        );
    }
}
