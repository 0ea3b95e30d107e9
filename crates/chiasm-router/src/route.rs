use chiasm_types::MmHash;

use crate::reservation::Reservation;

/// Where a request goes.
#[derive(Debug)]
pub struct Route {
    /// Workers that encode media items before the prompt is computed, in no order: each may begin
    /// at once.
    pub encodes: Vec<Encodes>,
    /// Media items that whoever computes the prompt needs the embeddings of and finds them, as they
    /// were encoded before.
    pub embedded: Vec<MmHash>,
    /// The worker that answers.
    pub answers: Reservation,
    /// The worker that computes the prompt before, if that is another one: the one that answers
    /// gets its keys and values from there.
    pub prefills: Option<Reservation>,
}

/// A worker that encodes media items for others of its machine.
#[derive(Debug)]
pub struct Encodes {
    /// Its place there, which is to be told what came of it.
    pub reservation: Reservation,
    /// What it encodes, each item once.
    pub items: Vec<MmHash>,
}
