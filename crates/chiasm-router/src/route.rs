use crate::reservation::Reservation;

/// Where a request goes.
#[derive(Debug)]
pub struct Route {
    /// The worker that answers.
    pub answers: Reservation,
    /// The worker that computes the prompt before, if that is another one: the one that answers gets its keys and values from there.
    pub prefills: Option<Reservation>,
}

/// Whether the prompt of a request may be computed elsewhere than its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Splitting {
    /// Where workers have roles, and where it is cheaper.
    Allowed,
    /// One worker does both.
    Forbidden,
}
