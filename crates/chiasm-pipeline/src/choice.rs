//! One continuation on its way from token ids to text: detokenizing, stop strings, log
//! probabilities, the end.

use std::sync::Arc;
use std::time::Duration;

use chiasm_backend::{Content, Finish, Output, ToolCallDelta};
use chiasm_parse::CallEnd;
use chiasm_prompt::{Detokenizer, StopStrings};
use chiasm_request::ChoiceDelta;
use chiasm_request::Sampling;
use chiasm_request::{AnswerEvent, AnswerEvents};
use chiasm_types::TokenId;
use tokio::time::Instant;

use super::reading::{Reader, Reading};
use super::text_logprobs::TextTokens;
use crate::model::ServedModel;

/// The state of one continuation.
pub(super) struct Choice {
    index: usize,
    detokenizer: Detokenizer,
    /// The special tokens that are left out of the text all the same, if any.
    answers: Option<Arc<ServedModel>>,
    stops: StopStrings,
    /// Text in which nothing is to be told apart is passed on as it is.
    reader: Option<Reader>,
    min_tokens: usize,
    include_stop: bool,
    wants_logprobs: bool,
    /// The tokens of the text, if log probabilities are wanted of them alone.
    text_tokens: Option<TextTokens>,
    wants_prompt_logprobs: bool,
    seen_tokens: usize,
    /// A call of a backend that reads calls itself has not ended yet.
    has_open_call: bool,
    has_ended: bool,
    /// When the last tokens came.
    last: Option<Instant>,
}

impl Choice {
    pub(super) fn new(
        index: usize,
        model: &Arc<ServedModel>,
        prompt: &[TokenId],
        sampling: &Sampling,
        stops: StopStrings,
        reading: Option<&Arc<Reading>>,
    ) -> Self {
        let skip_special =
            sampling.skip_special_tokens.or(model.generation.skip_special_tokens).unwrap_or(true);
        // Those that structure the answer have to be in the text.
        let skip_most = skip_special && reading.is_some() && model.answers.shows_any();
        Self {
            index,
            detokenizer: Detokenizer::new(
                model.tokenizer.clone(),
                prompt,
                skip_special && !skip_most,
            ),
            answers: skip_most.then(|| model.clone()),
            reader: reading.map(|reading| reading.begin(model, prompt)),
            stops,
            min_tokens: sampling.min_tokens as usize,
            include_stop: sampling.include_stop,
            wants_logprobs: sampling.logprobs.is_some() && !sampling.logprobs_of_text,
            text_tokens: (sampling.logprobs.is_some() && sampling.logprobs_of_text)
                .then(|| TextTokens::new(model.tokenizer.clone())),
            wants_prompt_logprobs: sampling.prompt_logprobs.is_some(),
            seen_tokens: 0,
            has_open_call: false,
            has_ended: false,
            last: None,
        }
    }

    /// Returns `true` once the last delta has been made. Later outputs are no part of the
    /// continuation.
    pub(super) fn has_ended(&self) -> bool {
        self.has_ended
    }

    /// The time per token since the tokens before those of this delta. `None` for the first ones,
    /// and without new ones.
    pub(super) fn gap(&mut self, delta: &ChoiceDelta) -> Option<Duration> {
        if delta.tokens.is_empty() {
            return None;
        }
        let now = Instant::now();
        let before = self.last.replace(now)?;
        Some((now - before) / u32::try_from(delta.tokens.len()).unwrap_or(u32::MAX))
    }

    /// Takes one output. `finish` is set when the continuation ended, be it by the backend or by a
    /// stop string (then the backend does not know yet, and the continuation is to be stopped).
    pub(super) fn push(&mut self, output: Output) -> ChoiceDelta {
        let delta = self.read(output);
        self.has_ended = delta.finish.is_some();
        delta
    }

    fn read(&mut self, output: Output) -> ChoiceDelta {
        // The generation has looked at `choice` and `prefill`.
        let Output { choice: _, content, mut finish, prefill: _, prompt_logprobs } = output;
        let (mut tokens, logprobs) = match content {
            Content::Tokens { tokens, logprobs } => (tokens, logprobs),
            Content::Text { text, tool_calls } => {
                let events = self.already_read(text, tool_calls, finish.as_ref());
                return ChoiceDelta { index: self.index, events, finish, ..ChoiceDelta::default() };
            }
        };
        let mut delta =
            ChoiceDelta { index: self.index, prompt_logprobs, ..ChoiceDelta::default() };
        if std::mem::take(&mut self.wants_prompt_logprobs) {
            // A prompt of one token has none, and engines say nothing of them then.
            delta.prompt_logprobs.get_or_insert_default();
        }
        // The token that ended the text is no part of it, unless asked for.
        let silent_tail = usize::from(
            !self.include_stop && matches!(finish, Some(Finish::Eos | Finish::StopToken(_))),
        );
        let spoken = tokens.len().saturating_sub(silent_tail);
        let mut taken = 0;
        let mut seen = Seen::default();
        for &token in &tokens {
            taken += 1;
            self.seen_tokens += 1;
            delta.reasoning_tokens +=
                usize::from(self.reader.as_ref().is_some_and(Reader::is_reasoning));
            if taken > spoken || self.is_left_out(token) {
                continue;
            }
            if let Some(text_tokens) = &mut self.text_tokens
                && let Some(logprob) =
                    logprobs.as_ref().and_then(|logprobs| logprobs.get(taken - 1))
            {
                text_tokens.push(logprob.clone());
            }
            let text = self.detokenizer.push(token);
            let has_ended = self.add_text(text, &mut delta, &mut finish);
            self.assign_tokens(&mut seen, &mut delta);
            if has_ended {
                break;
            }
        }
        tokens.truncate(taken);
        delta.tokens = tokens;
        if finish.is_some() && !matches!(finish, Some(Finish::StopString(_))) {
            let rest = self.detokenizer.finish();
            if !self.add_text(rest, &mut delta, &mut finish) {
                let rest = self.stops.finish();
                self.tell(rest, &mut delta);
            }
        }
        if self.wants_logprobs {
            let mut all = logprobs.unwrap_or_default();
            all.truncate(delta.tokens.len());
            delta.logprobs = Some(all);
        }
        delta.finish = finish;
        if let Some(reader) = self.reader.as_mut().filter(|_| delta.finish.is_some()) {
            reader.finish(&mut delta);
        }
        self.assign_tokens(&mut seen, &mut delta);
        delta
    }

    /// Returns the events of a backend that reads answers itself. A call ends where the next one
    /// begins.
    fn already_read(
        &mut self,
        text: String,
        tool_calls: Vec<ToolCallDelta>,
        finish: Option<&Finish>,
    ) -> AnswerEvents {
        let mut events = AnswerEvents::of_text(text);
        for piece in tool_calls {
            if piece.id.is_some() && self.has_open_call {
                events.push(AnswerEvent::EndCall(CallEnd::Closed));
            }
            self.has_open_call = true;
            events.push(AnswerEvent::Call(piece));
        }
        if let Some(finish) = finish
            && std::mem::take(&mut self.has_open_call)
        {
            let is_closed = *finish == Finish::ToolCalls;
            let end = if is_closed { CallEnd::Closed } else { CallEnd::Unfinished };
            events.push(AnswerEvent::EndCall(end));
        }
        events
    }

    /// Assigns tokens to the text that the delta has gained, if their log probabilities are wanted.
    fn assign_tokens(&mut self, seen: &mut Seen, delta: &mut ChoiceDelta) {
        let Some(text_tokens) = &mut self.text_tokens else { return };
        let now = Seen::from_delta(delta);
        if now.text > seen.text {
            text_tokens.take(&delta.events.text()[seen.text..], &mut delta.text_logprobs);
        } else if now.other > seen.other || self.reader.as_ref().is_some_and(Reader::is_reasoning) {
            text_tokens.clear();
        }
        *seen = now;
    }

    fn is_left_out(&self, token: TokenId) -> bool {
        let model = self.answers.as_ref();
        model.is_some_and(|model| model.tokenizer.is_special(token) && !model.answers.shows(token))
    }

    /// Adds settled text to the delta, or what it says.
    fn tell(&mut self, text: String, delta: &mut ChoiceDelta) {
        match &mut self.reader {
            Some(reader) => reader.read(&text, delta),
            None => delta.events.push(AnswerEvent::Text(text)),
        }
    }

    /// Adds text to the delta; true when a stop string ended the continuation in it.
    fn add_text(
        &mut self,
        text: String,
        delta: &mut ChoiceDelta,
        finish: &mut Option<Finish>,
    ) -> bool {
        if self.stops.is_idle() {
            self.tell(text, delta);
            return false;
        }
        // vLLM too looks for stop strings only in what comes after the first `min_tokens` tokens.
        if self.seen_tokens <= self.min_tokens {
            let text = self.stops.push_unwatched(&text);
            self.tell(text, delta);
            return false;
        }
        let step = self.stops.push(&text);
        self.tell(step.text, delta);
        match step.stopped_by {
            Some(stop) => {
                *finish = Some(Finish::StopString(stop));
                true
            }
            None => false,
        }
    }
}

/// The bytes of a delta that have been looked at: its text, and everything else.
#[derive(Default)]
struct Seen {
    text: usize,
    other: usize,
}

impl Seen {
    fn from_delta(delta: &ChoiceDelta) -> Self {
        let mut seen = Self::default();
        for event in delta.events.iter() {
            match event {
                AnswerEvent::Text(text) => seen.text += text.len(),
                AnswerEvent::Reasoning(text) => seen.other += text.len(),
                AnswerEvent::Call(call) => seen.other += 1 + call.arguments.len(),
                AnswerEvent::EndCall(_) => seen.other += 1,
            }
        }
        seen
    }
}
