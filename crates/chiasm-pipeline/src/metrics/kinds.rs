//! The values of labels.

chiasm_types::every_variant! {
    /// A part of a request's time.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Stage {
        /// Getting the bytes of its media items.
        Fetch,
        /// Template, tokens, plans of its media items, block keys.
        Plan,
        /// Making one media item's tensors, waiting for a thread included.
        Process,
        /// Until the backend has taken it.
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
    /// What became of a request that lost its worker before the client was sent a token.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Retry {
        /// The worker never had it: another one is tried.
        NotTaken,
        /// The worker died or hangs with it: it moves to another one.
        Lost,
        /// The worker is suspect: it is begun on another one, too.
        Suspect,
        /// Too many workers died with it.
        Quarantined,
        /// Too many requests move.
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
