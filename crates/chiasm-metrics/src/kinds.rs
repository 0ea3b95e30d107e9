//! Values of metric labels.

chiasm_types::every_variant! {
    /// A part of a request's time.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Stage {
        /// Loading the bytes of the request's media items.
        Fetch,
        /// Rendering, tokenizing, planning media items and computing block keys.
        Plan,
        /// Making one media item's tensors, including the wait for a thread.
        Process,
        /// Handing the request to the backend.
        HandOff,
        /// Waiting in the engine.
        Queue,
        /// The time between routing and the first token.
        Prefill,
    }
}

impl Stage {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Fetch => "fetch",
            Self::Plan => "plan",
            Self::Process => "process",
            Self::HandOff => "hand_off",
            Self::Queue => "queue",
            Self::Prefill => "prefill",
        }
    }
}

chiasm_types::every_variant! {
    /// The consequence for a request that lost its worker before the client was sent a token.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Retry {
        /// The worker never had the request: another one is tried.
        NotTaken,
        /// The worker died or hangs with the request: the request moves to another one.
        Lost,
        /// The worker is suspect: the request is begun on another one, too.
        Suspect,
        /// Too many workers died with the request's prompt: the request fails.
        Quarantined,
        /// The retry budget is exhausted: the request fails.
        OverBudget,
    }
}

impl Retry {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::NotTaken => "not_taken",
            Self::Lost => "lost",
            Self::Suspect => "suspect",
            Self::Quarantined => "quarantined",
            Self::OverBudget => "over_budget",
        }
    }
}
