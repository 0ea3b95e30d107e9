//! The answers of an upstream: four tokens to any request.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use chiasm_types::TokenId;
use hyper::body::{Body, Frame, SizeHint};
use serde_json::{Value, json};

use crate::routers::prompt::Prompt;
use crate::workload::MODEL;

/// The tokens of each answer, with their ids in the model's vocabulary.
const ANSWER: [(&str, u32); 4] = [(" of", 315), (" the", 279), (" in", 304), (" and", 323)];
const ID: &str = "chatcmpl-0123456789abcdef0123456789abcdef";
const CREATED: u64 = 1_800_000_000;

/// The body of an answer. Each event of a stream is a separate write.
pub(crate) struct Answer {
    pieces: VecDeque<Bytes>,
    pub(crate) is_streamed: bool,
    /// `true` if the next poll is pending, so that the last event is written first.
    is_paused: bool,
}

impl Answer {
    pub(crate) fn whole(text: impl Into<Bytes>) -> Self {
        Self { pieces: [text.into()].into(), is_streamed: false, is_paused: false }
    }

    fn streamed(events: Vec<Value>) -> Self {
        let events = events.into_iter().map(|event| format!("data: {event}\n\n"));
        let pieces = events.chain(["data: [DONE]\n\n".to_owned()]).map(Bytes::from).collect();
        Self { pieces, is_streamed: true, is_paused: false }
    }

    /// Creates the answer to a chat request with this number of cached tokens.
    pub(crate) fn chat(prompt: &Prompt, cached: usize, is_streamed: bool) -> Self {
        let usage = usage(prompt, cached);
        if !is_streamed {
            let text = ANSWER.map(|(word, _)| word).concat();
            let message = json!({
                "role": "assistant", "content": text, "refusal": null, "tool_calls": []
            });
            let choice = json!({
                "index": 0, "message": message, "logprobs": null, "finish_reason": "length"
            });
            let answer = json!({
                "id": ID, "object": "chat.completion", "created": CREATED, "model": MODEL,
                "choices": [choice], "usage": usage
            });
            return Self::whole(answer.to_string());
        }
        let chunk = |choices: Value| {
            json!({
                "id": ID, "object": "chat.completion.chunk", "created": CREATED, "model": MODEL,
                "choices": choices
            })
        };
        let delta = |delta: Value, finish: Option<&str>| {
            chunk(json!([
                {"index": 0, "delta": delta, "logprobs": null, "finish_reason": finish}
            ]))
        };
        let mut events = vec![delta(json!({"role": "assistant", "content": ""}), None)];
        for (number, (word, _)) in ANSWER.iter().enumerate() {
            events.push(delta(json!({"content": word}), finish(number)));
        }
        let mut last = chunk(json!([]));
        last["usage"] = usage;
        events.push(last);
        Self::streamed(events)
    }

    /// Creates the answer to a request of tokens, which is always streamed.
    pub(crate) fn tokens(prompt: &Prompt, cached: usize, has_prompt: bool) -> Self {
        let mut events = Vec::new();
        for (number, (_, token)) in ANSWER.iter().enumerate() {
            let choice = json!({
                "index": 0, "token_ids": [token], "logprobs": null,
                "finish_reason": finish(number), "stop_reason": null
            });
            events.push(json!({"request_id": ID, "choices": [choice]}));
        }
        if has_prompt {
            events[0]["prompt_token_ids"] = prompt.tokens.iter().map(|TokenId(id)| *id).collect();
        }
        let usage = usage(prompt, cached);
        events.push(json!({"request_id": ID, "choices": [], "usage": usage}));
        Self::streamed(events)
    }
}

/// Returns the reason to finish at a token of the answer.
fn finish(number: usize) -> Option<&'static str> {
    (number + 1 == ANSWER.len()).then_some("length")
}

fn usage(prompt: &Prompt, cached: usize) -> Value {
    let prompt = prompt.tokens.len();
    let answer = ANSWER.len();
    json!({
        "prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer,
        "prompt_tokens_details": {"cached_tokens": cached}
    })
}

impl Body for Answer {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if std::mem::take(&mut self.is_paused) {
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        self.is_paused = self.is_streamed;
        Poll::Ready(self.pieces.pop_front().map(|piece| Ok(Frame::data(piece))))
    }

    fn is_end_stream(&self) -> bool {
        self.pieces.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        if self.is_streamed {
            return SizeHint::default();
        }
        SizeHint::with_exact(self.pieces.iter().map(|piece| piece.len() as u64).sum())
    }
}
