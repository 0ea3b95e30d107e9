//! Access to this API's answers, for tests of the whole crate.

use chiasm_backend::RequestId;
use chiasm_request::{ChoiceDelta, FinishedChoice};

use super::response::Head;
use super::{events, response};
use crate::event_grammar::{self, ParsedAnswer};
use crate::openai::Usage;

fn head() -> Head {
    Head::new(&RequestId::new("r").unwrap(), "m")
}

/// Returns the content of a stream of these deltas.
pub(crate) fn streamed(deltas: &[ChoiceDelta]) -> ParsedAnswer {
    let mut stream = events::message_start(&head(), Usage::default()).to_vec();
    let mut events = events::Events::default();
    for delta in deltas {
        events
            .push(delta, Usage::default())
            .into_iter()
            .for_each(|events| stream.extend_from_slice(&events));
    }
    stream.extend_from_slice(&events::message_stop());
    event_grammar::messages(str::from_utf8(&stream).unwrap())
}

/// Returns the content of a whole answer.
pub(crate) fn whole(choice: &FinishedChoice) -> ParsedAnswer {
    let head = head();
    let message = response::whole_message(&head, choice, Usage::default());
    event_grammar::whole_message(&serde_json::to_value(message).unwrap())
}
