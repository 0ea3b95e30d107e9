//! What an upstream answers: four tokens, after whatever it was asked.

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

/// The tokens of each answer, and their ids in the model's vocabulary.
const ANSWER: [(&str, u32); 4] = [(" of", 315), (" the", 279), (" in", 304), (" and", 323)];
const ID: &str = "chatcmpl-0123456789abcdef0123456789abcdef";
const CREATED: u64 = 1_800_000_000;

/// The body of an answer. One that is streamed comes piece by piece, each written by itself.
pub(crate) struct Answer {
    pieces: VecDeque<Bytes>,
    pub(crate) is_streamed: bool,
    rests: bool,
}

impl Answer {
    pub(crate) fn whole(text: impl Into<Bytes>) -> Self {
        Self { pieces: [text.into()].into(), is_streamed: false, rests: false }
    }

    fn streamed(events: Vec<Value>) -> Self {
        let events = events.into_iter().map(|event| format!("data: {event}\n\n"));
        let pieces = events.chain(["data: [DONE]\n\n".to_owned()]).map(Bytes::from).collect();
        Self { pieces, is_streamed: true, rests: false }
    }

    /// A chat's answer to a prompt of which so many tokens were cached.
    pub(crate) fn chat(prompt: &Prompt, cached: usize, is_streamed: bool) -> Self {
        let usage = usage(prompt, cached);
        let [text, role] = [ANSWER.map(|(word, _)| word).concat(), "assistant".to_owned()];
        if !is_streamed {
            let message = json!({"role": role, "content": text, "refusal": null, "tool_calls": []});
            let choice = json!({"index": 0, "message": message, "logprobs": null, "finish_reason": "length"});
            let object = "chat.completion";
            let answer = json!({"id": ID, "object": object, "created": CREATED, "model": MODEL, "choices": [choice], "usage": usage});
            return Self::whole(answer.to_string());
        }
        let chunk = |choices: Value, usage: Option<&Value>| {
            let object = "chat.completion.chunk";
            let mut chunk = json!({"id": ID, "object": object, "created": CREATED, "model": MODEL, "choices": choices});
            if let Some(usage) = usage {
                chunk["usage"] = usage.clone();
            }
            chunk
        };
        let delta = |delta: Value, finish: Option<&str>| {
            chunk(json!([{"index": 0, "delta": delta, "logprobs": null, "finish_reason": finish}]), None)
        };
        let mut events = vec![delta(json!({"role": role, "content": ""}), None)];
        for (number, (word, _)) in ANSWER.iter().enumerate() {
            events.push(delta(json!({"content": word}), (number + 1 == ANSWER.len()).then_some("length")));
        }
        events.push(chunk(json!([]), Some(&usage)));
        Self::streamed(events)
    }

    /// The answer of token mode, which is streamed.
    pub(crate) fn tokens(prompt: &Prompt, cached: usize, tells_prompt: bool) -> Self {
        let mut events = Vec::new();
        for (number, (_, token)) in ANSWER.iter().enumerate() {
            let finish = (number + 1 == ANSWER.len()).then_some("length");
            let choice = json!({"index": 0, "token_ids": [token], "logprobs": null, "finish_reason": finish, "stop_reason": null});
            events.push(json!({"request_id": ID, "choices": [choice]}));
        }
        if tells_prompt {
            events[0]["prompt_token_ids"] = prompt.tokens.iter().map(|TokenId(id)| *id).collect();
        }
        events.push(json!({"request_id": ID, "choices": [], "usage": usage(prompt, cached)}));
        Self::streamed(events)
    }
}

fn usage(prompt: &Prompt, cached: usize) -> Value {
    let (prompt, answer) = (prompt.tokens.len(), ANSWER.len());
    let details = json!({"cached_tokens": cached});
    json!({"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer, "prompt_tokens_details": details})
}

impl Body for Answer {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        // While it rests, what came before is written.
        if std::mem::take(&mut self.rests) {
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        self.rests = self.is_streamed;
        Poll::Ready(self.pieces.pop_front().map(|piece| Ok(Frame::data(piece))))
    }

    fn is_end_stream(&self) -> bool {
        self.pieces.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        match self.is_streamed {
            true => SizeHint::default(),
            false => SizeHint::with_exact(self.pieces.iter().map(|piece| piece.len() as u64).sum()),
        }
    }
}
