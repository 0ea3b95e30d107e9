//! Conversion of one continuation from token ids to text: detokenizing, stop strings, log
//! probabilities and the finish reason.

use std::sync::Arc;
use std::time::Duration;

use chiasm_backend::{Content, Finish, Output, ToolCallDelta};
use chiasm_parse::CallEnd;
use chiasm_prompt::{Detokenizer, StopStrings};
use chiasm_request::ChoiceDelta;
use chiasm_request::ClientSampling;
use chiasm_request::{AnswerEvent, AnswerEvents};
use chiasm_types::TokenId;
use tokio::time::Instant;

use super::output_parsing::{OutputParser, OutputParsing};
use super::text_logprobs::TextTokens;
use crate::model::ServedModel;

/// The state of one continuation.
pub(super) struct Choice {
    index: usize,
    detokenizer: Detokenizer,
    /// The model, if special tokens other than markers must be left out of the text.
    special_token_filter: Option<Arc<ServedModel>>,
    stops: StopStrings,
    /// The parser of the text; `None` if the answer is plain text.
    parser: Option<OutputParser>,
    min_tokens: usize,
    include_stop: bool,
    needs_logprobs: bool,
    /// The tokens of the text, if only their log probabilities are requested.
    text_tokens: Option<TextTokens>,
    needs_prompt_logprobs: bool,
    seen_tokens: usize,
    /// `true` while a call is open. Only used with backends that parse calls themselves.
    has_open_call: bool,
    has_ended: bool,
    /// The time of the last tokens.
    last_tokens_at: Option<Instant>,
}

impl Choice {
    pub(super) fn new(
        index: usize,
        model: &Arc<ServedModel>,
        prompt: &[TokenId],
        sampling: &ClientSampling,
        stops: StopStrings,
        parsing: Option<&Arc<OutputParsing>>,
    ) -> Self {
        let skip_special =
            sampling.skip_special_tokens.or(model.generation.skip_special_tokens).unwrap_or(true);
        // The text to parse must contain the special tokens that structure the answer.
        let keep_markers = skip_special && parsing.is_some() && model.answers.has_marker_tokens();
        Self {
            index,
            detokenizer: Detokenizer::new(
                model.tokenizer.clone(),
                prompt,
                skip_special && !keep_markers,
            ),
            special_token_filter: keep_markers.then(|| model.clone()),
            parser: parsing.map(|parsing| parsing.parser(model, prompt)),
            stops,
            min_tokens: sampling.min_tokens as usize,
            include_stop: sampling.include_stop,
            needs_logprobs: sampling.logprobs.is_some() && !sampling.logprobs_of_text,
            text_tokens: (sampling.logprobs.is_some() && sampling.logprobs_of_text)
                .then(|| TextTokens::new(model.tokenizer.clone())),
            needs_prompt_logprobs: sampling.prompt_logprobs.is_some(),
            seen_tokens: 0,
            has_open_call: false,
            has_ended: false,
            last_tokens_at: None,
        }
    }

    /// Returns `true` after the last delta. Later outputs do not belong to the continuation.
    pub(super) fn has_ended(&self) -> bool {
        self.has_ended
    }

    /// Returns the time per token since the previous tokens. Returns `None` for the first tokens,
    /// and for a delta without tokens.
    pub(super) fn gap(&mut self, delta: &ChoiceDelta) -> Option<Duration> {
        if delta.tokens.is_empty() {
            return None;
        }
        let now = Instant::now();
        let previous = self.last_tokens_at.replace(now)?;
        Some((now - previous) / u32::try_from(delta.tokens.len()).unwrap_or(u32::MAX))
    }

    /// Converts one output to a delta.
    ///
    /// `finish` is set if the continuation ended, by the backend or by a stop string. After a stop
    /// string the caller must stop the continuation at the backend.
    pub(super) fn push(&mut self, output: Output) -> ChoiceDelta {
        let delta = self.convert(output);
        self.has_ended = delta.finish.is_some();
        delta
    }

    fn convert(&mut self, output: Output) -> ChoiceDelta {
        // The generation handles `choice` and `prefill`.
        let Output { choice: _, content, mut finish, prefill: _, prompt_logprobs } = output;
        let (mut tokens, logprobs) = match content {
            Content::Tokens { tokens, logprobs } => (tokens, logprobs),
            Content::Text { text, tool_calls } => {
                let events = self.convert_events(text, tool_calls, finish.as_ref());
                return ChoiceDelta { index: self.index, events, finish, ..ChoiceDelta::default() };
            }
        };
        let mut delta =
            ChoiceDelta { index: self.index, prompt_logprobs, ..ChoiceDelta::default() };
        if std::mem::take(&mut self.needs_prompt_logprobs) {
            // Engines report nothing for a prompt of one token, which has no log probabilities.
            delta.prompt_logprobs.get_or_insert_default();
        }
        // The token that ended the text is not part of it, unless the client requested it.
        let hidden_tail = usize::from(
            !self.include_stop && matches!(finish, Some(Finish::Eos | Finish::StopToken(_))),
        );
        let visible = tokens.len().saturating_sub(hidden_tail);
        let mut processed = 0;
        let mut assigned = DeltaLengths::default();
        for &token in &tokens {
            processed += 1;
            self.seen_tokens += 1;
            delta.reasoning_tokens +=
                usize::from(self.parser.as_ref().is_some_and(OutputParser::is_reasoning));
            if processed > visible || self.is_hidden(token) {
                continue;
            }
            if let Some(text_tokens) = &mut self.text_tokens
                && let Some(logprob) =
                    logprobs.as_ref().and_then(|logprobs| logprobs.get(processed - 1))
            {
                text_tokens.push(logprob.clone());
            }
            let text = self.detokenizer.push(token);
            let has_ended = self.add_text(text, &mut delta, &mut finish);
            self.assign_tokens(&mut assigned, &mut delta);
            if has_ended {
                break;
            }
        }
        tokens.truncate(processed);
        delta.tokens = tokens;
        if finish.is_some() && !matches!(finish, Some(Finish::StopString(_))) {
            let rest = self.detokenizer.finish();
            if !self.add_text(rest, &mut delta, &mut finish) {
                let rest = self.stops.finish();
                self.emit_text(rest, &mut delta);
            }
        }
        if self.needs_logprobs {
            let mut all = logprobs.unwrap_or_default();
            all.truncate(delta.tokens.len());
            delta.logprobs = Some(all);
        }
        delta.finish = finish;
        if let Some(parser) = self.parser.as_mut().filter(|_| delta.finish.is_some()) {
            parser.finish(&mut delta);
        }
        self.assign_tokens(&mut assigned, &mut delta);
        delta
    }

    /// Converts the output of a backend that parses answers itself. A call ends where the next one
    /// begins.
    fn convert_events(
        &mut self,
        text: String,
        tool_calls: Vec<ToolCallDelta>,
        finish: Option<&Finish>,
    ) -> AnswerEvents {
        let mut events = AnswerEvents::from_text(text);
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

    /// Assigns tokens to the text that the delta has gained, if their log probabilities are
    /// requested.
    fn assign_tokens(&mut self, assigned: &mut DeltaLengths, delta: &mut ChoiceDelta) {
        let Some(text_tokens) = &mut self.text_tokens else { return };
        let lengths = DeltaLengths::from_delta(delta);
        if lengths.text > assigned.text {
            text_tokens.take(&delta.events.text()[assigned.text..], &mut delta.text_logprobs);
        } else if lengths.other > assigned.other
            || self.parser.as_ref().is_some_and(OutputParser::is_reasoning)
        {
            text_tokens.clear();
        }
        *assigned = lengths;
    }

    /// Returns `true` if a special token must be left out of the text.
    fn is_hidden(&self, token: TokenId) -> bool {
        self.special_token_filter.as_ref().is_some_and(|model| {
            model.tokenizer.is_special(token) && !model.answers.is_marker_token(token)
        })
    }

    /// Adds text in which no stop string can begin any more, parsed if the answer is parsed.
    fn emit_text(&mut self, text: String, delta: &mut ChoiceDelta) {
        match &mut self.parser {
            Some(parser) => parser.push(&text, delta),
            None => delta.events.push(AnswerEvent::Text(text)),
        }
    }

    /// Adds text to the delta. Returns `true` if a stop string in it ended the continuation.
    fn add_text(
        &mut self,
        text: String,
        delta: &mut ChoiceDelta,
        finish: &mut Option<Finish>,
    ) -> bool {
        if self.stops.is_empty() {
            self.emit_text(text, delta);
            return false;
        }
        // As in vLLM, text is searched for stop strings only after the first `min_tokens` tokens.
        if self.seen_tokens <= self.min_tokens {
            let text = self.stops.push_unwatched(&text);
            self.emit_text(text, delta);
            return false;
        }
        let step = self.stops.push(&text);
        self.emit_text(step.text, delta);
        match step.stopped_by {
            Some(stop) => {
                *finish = Some(Finish::StopString(stop));
                true
            }
            None => false,
        }
    }
}

/// The sizes of a delta's events.
#[derive(Default)]
struct DeltaLengths {
    /// The bytes of text.
    text: usize,
    /// The bytes of reasoning and arguments, and the number of call events.
    other: usize,
}

impl DeltaLengths {
    fn from_delta(delta: &ChoiceDelta) -> Self {
        let mut lengths = Self::default();
        for event in delta.events.iter() {
            match event {
                AnswerEvent::Text(text) => lengths.text += text.len(),
                AnswerEvent::Reasoning(text) => lengths.other += text.len(),
                AnswerEvent::Call(call) => lengths.other += 1 + call.arguments.len(),
                AnswerEvent::EndCall(_) => lengths.other += 1,
            }
        }
        lengths
    }
}
