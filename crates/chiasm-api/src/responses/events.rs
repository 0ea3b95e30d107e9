//! The events of a streamed response.

use bytes::Bytes;
use serde::Serialize;

use super::item::{Item, Kind, Part};
use super::logprobs::TokenJson;
use super::response::Response;
use crate::sse;

/// Events that wait to be sent, if anybody wants them.
pub(super) struct Events {
    /// As they are sent.
    waiting: Option<Vec<u8>>,
    sequence_number: u64,
}

impl Events {
    /// Nobody wants them.
    pub(super) fn unwanted() -> Self {
        Self { waiting: None, sequence_number: 0 }
    }

    /// There are none yet.
    pub(super) fn wanted() -> Self {
        Self { waiting: Some(Vec::new()), sequence_number: 0 }
    }

    /// Adds an event, which gets the next number.
    pub(super) fn tell(&mut self, event: Event<'_>) {
        let Some(waiting) = &mut self.waiting else { return };
        let sequence_number = self.sequence_number;
        self.sequence_number += 1;
        sse::write_named(waiting, event.kind, &Event { sequence_number, ..event });
    }

    /// The events since the last time; `None` if there are none.
    pub(super) fn take(&mut self) -> Option<Bytes> {
        let waiting = self.waiting.as_mut().filter(|waiting| !waiting.is_empty())?;
        Some(std::mem::take(waiting).into())
    }
}

/// One event: its type and what of all this it has.
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
    /// The tokens of the text. Clients expect the list in events of text, even if it is empty.
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
    /// An event of the response.
    pub(super) fn of(kind: &'static str) -> Self {
        Self { kind, ..Self::default() }
    }

    /// An event of an item.
    pub(super) fn at(kind: &'static str, item: &Item) -> Self {
        Self { output_index: Some(item.index), ..Self::of(kind) }
    }

    /// An event of what is in an item.
    pub(super) fn within(kind: &'static str, item: &'a Item) -> Self {
        let content_index = (!matches!(item.kind, Kind::Call { .. })).then_some(0);
        let logprobs = kind.starts_with("response.output_text.").then_some(&[][..]);
        Self { item_id: Some(&item.id), content_index, logprobs, ..Self::at(kind, item) }
    }
}
