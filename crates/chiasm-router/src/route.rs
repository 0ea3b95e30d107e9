//! The workers that a request goes to, stage by stage.

use chiasm_types::MmHash;

use crate::reservation::Reservation;

/// The workers of a request.
#[derive(Debug)]
pub struct Route {
    /// The workers that encode media items before the prompt is computed, in no order. Each may
    /// begin at once.
    pub encode_stages: Vec<EncodeStage>,
    /// The media items whose embeddings are already encoded. The worker that computes the prompt
    /// reads them from its machine's store.
    pub embedded: Vec<MmHash>,
    /// The worker that answers.
    pub answer: Reservation,
    /// The worker that computes the prompt first, if it is another one. The answering worker gets
    /// the keys and values from it.
    pub prefill: Option<Reservation>,
}

/// A worker that encodes media items for other workers of its machine.
#[derive(Debug)]
pub struct EncodeStage {
    /// The reservation on the worker, which is to be notified of each item that was encoded.
    pub reservation: Reservation,
    /// The items to encode, each once.
    pub items: Vec<MmHash>,
}
