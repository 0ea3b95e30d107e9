//! Work for the engine's loop, from its input and from those that it waits for.

use chiasm_engine::wire::Utility;
use tokio::sync::mpsc;

use crate::lent_slot::AlarmTarget;
use crate::sequence::Sequence;

/// Work for the engine's loop.
pub(crate) enum Work {
    Add(Box<Sequence>),
    /// A request whose prompt is got from another engine: [`Work::Given`] follows.
    Await(Box<Sequence>),
    Abort(Vec<String>),
    Call(Utility),
    /// SIGTERM.
    Stop,
    /// A request whose prompt was left elsewhere can be computed: whether it was had from there.
    Given(String, bool),
    /// The blocks of a prompt that was left are not needed any more.
    LetGo(u64),
    /// Something was noticed that the engine must not outlive; what, in words.
    Die(String),
}

impl AlarmTarget for mpsc::UnboundedSender<Work> {
    fn has_ended(&self) -> bool {
        self.is_closed()
    }

    fn die(&self, reason: String) {
        // The other end is gone only while everything is being torn down.
        let _ = self.send(Work::Die(reason));
    }
}
