//! Access to this API's answers, for tests of the whole crate.

use chiasm_request::{ChoiceDelta, FinishedChoice};

use super::output::Answer;
use super::output::tests::head;
use super::response::Head;
use super::tools::ToolNames;
use crate::event_grammar::{self, ParsedAnswer};
use crate::openai::Usage;

/// Writes responses to one request.
pub(crate) struct Responses {
    head: Head,
}

impl Responses {
    pub(crate) async fn new() -> Self {
        Self { head: head().await }
    }

    /// Returns the content of a stream of these deltas.
    pub(crate) fn streamed(&self, deltas: &[ChoiceDelta]) -> ParsedAnswer {
        let (mut answer, first_events) =
            Answer::streamed("r", ToolNames::default(), None, &self.head);
        let mut stream = first_events.concat();
        for delta in deltas {
            answer.add(delta);
            if delta.finish.is_some() {
                answer.end(&self.head, Usage::default());
            }
            answer.take_events().into_iter().for_each(|events| stream.extend_from_slice(&events));
        }
        event_grammar::responses(str::from_utf8(&stream).unwrap())
    }

    /// Returns the content of a whole answer.
    pub(crate) fn whole(&self, choice: &FinishedChoice) -> ParsedAnswer {
        let answer = Answer::whole("r", ToolNames::default(), None, choice.clone());
        let response = answer.response(&self.head, Usage::default());
        event_grammar::whole_response(&serde_json::to_value(response).unwrap())
    }
}
