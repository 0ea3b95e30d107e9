//! The work of the engine's loop.

use chiasm_engine::wire::Utility;
use tokio::sync::mpsc;

use crate::lent_slot::AlarmTarget;
use crate::sequence::Sequence;

/// A unit of work for the engine's loop.
pub(crate) enum Work {
    Add(Box<Sequence>),
    /// A request whose prompt is fetched from another engine; [`Work::PromptFetched`] follows.
    WaitForPrompt(Box<Sequence>),
    Abort(Vec<String>),
    Call(Utility),
    /// A wave of the engine's group starts.
    StartWave {
        wave: i64,
        started_by: Option<u32>,
    },
    /// SIGTERM.
    Stop,
    /// The fetch of a request's prompt has ended. If the prompt was not found it is computed here.
    PromptFetched {
        id: String,
        found: bool,
    },
    /// The blocks retained under this id are no longer needed.
    ReleaseRetained(u64),
    /// The engine must die for this reason.
    Die(String),
}

impl AlarmTarget for mpsc::UnboundedSender<Work> {
    fn has_ended(&self) -> bool {
        self.is_closed()
    }

    fn die(&self, reason: String) {
        // The loop is gone only during shutdown.
        let _ = self.send(Work::Die(reason));
    }
}
