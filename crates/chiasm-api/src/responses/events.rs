//! The events of a streamed response: their form and their numbers. `output` decides on their
//! order.

use bytes::Bytes;
use serde::Serialize;

use super::item::{Item, Kind, Part};
use super::logprobs::TokenJson;
use super::response::Response;
use crate::sse;

/// The events of a response that have not been sent yet.
pub(super) struct Events {
    /// The serialized events; `None` if the response is not streamed.
    pending: Option<Vec<u8>>,
    /// The sequence number of the next event.
    sequence_number: u64,
}

impl Events {
    /// Creates a queue that drops all events.
    pub(super) fn disabled() -> Self {
        Self { pending: None, sequence_number: 0 }
    }

    /// Creates an empty queue.
    pub(super) fn enabled() -> Self {
        Self { pending: Some(Vec::new()), sequence_number: 0 }
    }

    /// Appends an event with the next sequence number.
    pub(super) fn push(&mut self, event: Event<'_>) {
        let Some(pending) = &mut self.pending else { return };
        let sequence_number = self.sequence_number;
        self.sequence_number += 1;
        sse::write_named(pending, event.kind, &Event { sequence_number, ..event });
    }

    /// Takes the events since the last call; `None` if there are none.
    pub(super) fn take(&mut self) -> Option<Bytes> {
        let pending = self.pending.as_mut().filter(|pending| !pending.is_empty())?;
        Some(std::mem::take(pending).into())
    }
}

/// An event: its type, and its optional fields.
#[derive(Default, Serialize)]
pub(super) struct Event<'a> {
    #[serde(rename = "type")]
    pub(super) kind: &'static str,
    pub(super) sequence_number: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) output_index: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) item_id: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) content_index: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) delta: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) text: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) name: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) arguments: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) input: Option<&'a str>,
    /// The log probabilities of the text's tokens. Clients expect the list in events of text, even
    /// if it is empty.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) logprobs: Option<&'a [TokenJson]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) part: Option<Part<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) item: Option<&'a Item>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) response: Option<Response<'a>>,
}

impl<'a> Event<'a> {
    /// Creates an event of the whole response.
    pub(super) fn new(kind: &'static str) -> Self {
        Self { kind, ..Self::default() }
    }

    /// Creates an event of an item.
    pub(super) fn for_item(kind: &'static str, item: &Item) -> Self {
        Self { output_index: Some(item.index), ..Self::new(kind) }
    }

    /// Creates an event of an item's content.
    pub(super) fn for_content(kind: &'static str, item: &'a Item) -> Self {
        let content_index = (!matches!(item.kind, Kind::Call { .. })).then_some(0);
        let logprobs = kind.starts_with("response.output_text.").then_some(&[][..]);
        Self { item_id: Some(&item.id), content_index, logprobs, ..Self::for_item(kind, item) }
    }
}
