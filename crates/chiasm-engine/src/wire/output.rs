//! Messages from an engine to a frontend, on the output socket: `[msgpack, aux…]`, without an
//! identity.

use std::time::Duration;

use bytes::Bytes;
use chiasm_backend::inbox::HeapBytes;
use chiasm_types::TokenId;
use rmp::Marker;
use rmpv::Value;

use super::codec::{Fields, Wire, wire_map, write_list_or_nil};
use super::error::{Named, WireError};
use super::failure::FailureMessage;
use super::logprobs::{Arrays, Logprobs};
use super::reader::Reader;
use super::stats::{PrefillStats, SchedulerStats};
use super::version::{OUTPUT_FIELDS, OUTPUTS_FIELDS};
use super::writer::Writer;

/// The last message of a failing engine (`EngineCoreProc.ENGINE_CORE_DEAD` in
/// `vllm/v1/engine/core.py`).
pub const ENGINE_CORE_DEAD: &[u8] = b"ENGINE_CORE_DEAD";

/// A message from an engine to a frontend.
#[derive(Clone, Debug, PartialEq)]
#[expect(clippy::large_enum_variant, reason = "one exists at a time, and almost all are outputs")]
pub enum EngineMessage<Output = EngineCoreOutput> {
    /// The outputs of one step.
    Outputs(EngineCoreOutputs<Output>),
    /// The engine has failed and accepts no more requests.
    Dead,
}

/// The outputs of one step of an engine (`EngineCoreOutputs` in `vllm/v1/engine/__init__.py`).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EngineCoreOutputs<Output = EngineCoreOutput> {
    /// The data-parallel rank.
    pub engine_index: u32,
    /// The step's outputs of single requests, at most one per request.
    pub outputs: Vec<Output>,
    /// The scheduler's statistics; present in most messages.
    pub scheduler_stats: Option<SchedulerStats>,
    /// The engine's monotonic clock, in seconds.
    pub timestamp: f64,
    /// The result of a method call.
    pub utility_output: Option<UtilityOutput>,
    /// Requests that the engine has finished, including those without an output here.
    pub finished_requests: Vec<String>,
    /// The wave that the engine completed; only in messages to a group's coordinator.
    pub wave_complete: Option<i64>,
    /// The wave that the engine started; only in messages to a group's coordinator.
    pub start_wave: Option<i64>,
    /// The version of the weights that computed this step.
    pub weight_version: Option<String>,
}

/// The output of one step for one request (`EngineCoreOutput` in `vllm/v1/engine/__init__.py`).
///
/// Fields for pooling, routed experts and speculative decoding are skipped.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EngineCoreOutput {
    /// The `request_id` that the request was sent with.
    pub request_id: String,
    /// Zero or more tokens, including the stop token.
    pub new_token_ids: Vec<TokenId>,
    /// Log probabilities, with one position per new token, if requested.
    pub new_logprobs: Option<Logprobs>,
    /// Log probabilities, with one position per prompt token but the first, if requested. They are
    /// split over several outputs if the prompt is computed in chunks.
    pub prompt_logprobs: Option<Logprobs>,
    /// The reason for the end; set in the last output.
    pub finish_reason: Option<FinishReason>,
    /// The stop token, or a more exact reason.
    pub stop_reason: Option<StopReason>,
    /// The times at which the request was queued, scheduled and preempted.
    pub events: Vec<EngineCoreEvent>,
    /// Parameters with which another engine gets the keys and values of a prefill job; in the last
    /// output.
    pub kv_transfer_params: Option<Value>,
    /// Parameters with which another engine gets the embeddings of an encode job; in the last
    /// output.
    pub ec_transfer_params: Option<Value>,
    /// Statistics of the prefill; only in the first output.
    pub prefill_stats: Option<PrefillStats>,
    /// The number of NaNs in the logits. The result is not reliable if it is more than 0.
    pub num_nans_in_logits: u64,
    /// Media items that were sent without data and are not in the receiver cache. Send them again
    /// with data.
    pub mm_cache_miss_hashes: Vec<String>,
    /// The error of an output with [`FinishReason::Error`]. Since vLLM 0.33.
    pub error: Option<RequestError>,
}

/// An [`EngineCoreOutput`] as it is received. Nearly all have tokens only, so the other fields take
/// memory only when they are set.
#[derive(Clone, Debug, Default)]
pub(crate) struct ReceivedOutput {
    pub(crate) request_id: String,
    pub(crate) payload: Payload,
}

/// The content of a [`ReceivedOutput`].
#[derive(Clone, Debug)]
pub(crate) enum Payload {
    /// Tokens only.
    Tokens(Vec<TokenId>),
    /// An output that has more than tokens. Its `request_id` is empty.
    Full(Box<EngineCoreOutput>),
}

impl Default for Payload {
    fn default() -> Self {
        Self::Tokens(Vec::new())
    }
}

impl Payload {
    /// Returns the finish reason, which is set in the last output.
    pub(crate) fn finish_reason(&self) -> Option<FinishReason> {
        match self {
            Self::Tokens(_) => None,
            Self::Full(output) => output.finish_reason,
        }
    }

    /// Converts the payload into an output of this request.
    pub(crate) fn into_output(self, request_id: &str) -> Box<EngineCoreOutput> {
        let mut output = match self {
            Self::Tokens(new_token_ids) => {
                Box::new(EngineCoreOutput { new_token_ids, ..EngineCoreOutput::default() })
            }
            Self::Full(output) => output,
        };
        request_id.clone_into(&mut output.request_id);
        output
    }
}

impl HeapBytes for Payload {
    fn heap_bytes(&self) -> usize {
        match self {
            Self::Tokens(tokens) => size_of_val(&tokens[..]),
            Self::Full(output) => {
                let logprobs = output.new_logprobs.iter().chain(&output.prompt_logprobs);
                let logprobs: usize = logprobs.map(Logprobs::heap_bytes).sum();
                size_of::<EngineCoreOutput>() + size_of_val(&output.new_token_ids[..]) + logprobs
            }
        }
    }
}

/// The error of a request that an engine failed (`RequestError` in `vllm/outputs.py`).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestError {
    /// The kind of the error, such as [`VALIDATION`](Self::VALIDATION) or `engine_paused`.
    pub code: String,
    /// The error as text.
    pub message: String,
    /// `true` if nothing was computed and the request may be sent again later, or to another
    /// engine.
    pub retryable: bool,
}

wire_map!(RequestError { code = "code", message = "message", retryable = "retryable" });

impl RequestError {
    /// The code of an error whose fault is in the request.
    pub const VALIDATION: &str = "validation_error";
}

/// The reason for a request's end (`FinishReason` in `vllm/v1/engine/__init__.py`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// EOS or a stop token was generated.
    Stop,
    /// `max_tokens` or the model's maximum length was reached.
    Length,
    /// The engine aborted the request because it shuts down; retry on another engine. A request
    /// that the frontend aborted has no output.
    Abort,
    /// The engine failed the request.
    Error,
    /// The answer repeated itself.
    Repetition,
    /// A reason that a newer version added.
    Other(u32),
}

/// The exact reason for a stop.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// The stop token. EOS is not reported.
    Token(TokenId),
    /// A reason that the engine gives as text.
    Text(String),
}

/// A state change of a request (`EngineCoreEvent` in `vllm/v1/engine/__init__.py`).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EngineCoreEvent {
    /// The new state: 1 queued, 2 scheduled, 3 preempted.
    pub kind: u32,
    /// The engine's monotonic clock, in seconds.
    pub timestamp: f64,
}

wire_map!(EngineCoreEvent { kind = "type", timestamp = "timestamp" });

impl EngineCoreEvent {
    /// The request was queued.
    pub const QUEUED: u32 = 1;
    /// The request was taken from the queue to run.
    pub const SCHEDULED: u32 = 2;
}

impl EngineCoreOutput {
    /// Returns the request's time in the engine's queue, if this output has both events. First
    /// outputs have them.
    pub fn time_in_queue(&self) -> Option<Duration> {
        let at =
            |kind| self.events.iter().find(|event| event.kind == kind).map(|event| event.timestamp);
        Duration::try_from_secs_f64(at(EngineCoreEvent::SCHEDULED)? - at(EngineCoreEvent::QUEUED)?)
            .ok()
    }
}

/// The result of a method call (`UtilityOutput` in `vllm/v1/engine/__init__.py`).
#[derive(Clone, Debug, PartialEq)]
pub struct UtilityOutput {
    /// The call's [`call_id`](super::request::Utility::call_id).
    pub call_id: u64,
    /// The method's return value, or its error.
    pub result: Result<Value, FailureMessage>,
}

/// Encodes a step's outputs as msgpack, followed by aux frames for large arrays.
pub fn encode(outputs: &EngineCoreOutputs) -> Vec<Bytes> {
    let mut to = Writer::default();
    outputs.write(&mut to);
    to.into_frames()
}

/// Encodes the last message of a failing engine.
pub fn encode_dead() -> Vec<Bytes> {
    vec![Bytes::from_static(ENGINE_CORE_DEAD)]
}

/// Decodes a message from the output socket: the frontend's side.
pub fn decode(frames: &[Bytes]) -> Result<EngineMessage, WireError> {
    read(frames)
}

/// Decodes a message as [`decode`] does, into the compact [`ReceivedOutput`].
pub(crate) fn decode_compact(frames: &[Bytes]) -> Result<EngineMessage<ReceivedOutput>, WireError> {
    read(frames)
}

fn read<Output: Wire>(frames: &[Bytes]) -> Result<EngineMessage<Output>, WireError> {
    if let [only] = frames
        && only == ENGINE_CORE_DEAD
    {
        return Ok(EngineMessage::Dead);
    }
    let outputs = EngineCoreOutputs::read(&mut Reader::new(frames)?).named("EngineCoreOutputs")?;
    Ok(EngineMessage::Outputs(outputs))
}

/// The fields after the tokens of an output that has tokens only, one byte each: nil, and 0 for
/// `num_nans_in_logits`.
const EMPTY_REST: [u8; 17] = {
    let mut rest = [0xc0; 17];
    rest[11] = 0;
    rest
};

impl<Output: Wire> Wire for EngineCoreOutputs<Output> {
    fn write(&self, to: &mut Writer) {
        to.array(OUTPUTS_FIELDS);
        self.engine_index.write(to);
        self.outputs.write(to);
        self.scheduler_stats.write(to);
        self.timestamp.write(to);
        self.utility_output.write(to);
        write_list_or_nil(&self.finished_requests, to);
        self.wave_complete.write(to);
        self.start_wave.write(to);
        self.weight_version.write(to);
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, WireError> {
        let mut fields = Fields::open(from, 0)?;
        let outputs = Self {
            engine_index: fields.next(from).named("engine_index")?,
            outputs: fields.next(from).named("outputs")?,
            scheduler_stats: fields.next(from).named("scheduler_stats")?,
            timestamp: fields.next(from).named("timestamp")?,
            utility_output: fields.next(from).named("utility_output")?,
            finished_requests: fields.next(from).named("finished_requests")?,
            wave_complete: fields.next(from).named("wave_complete")?,
            start_wave: fields.next(from).named("start_wave")?,
            weight_version: fields.next(from).named("weight_version")?,
        };
        fields.close(from)?;
        Ok(outputs)
    }
}

impl Wire for EngineCoreOutput {
    fn write(&self, to: &mut Writer) {
        let Self {
            request_id,
            new_token_ids,
            new_logprobs,
            prompt_logprobs,
            finish_reason,
            stop_reason,
            events,
            kv_transfer_params,
            ec_transfer_params,
            prefill_stats,
            num_nans_in_logits,
            mm_cache_miss_hashes,
            error,
        } = self;
        // Engines before 0.33 have no field `error`.
        to.array(OUTPUT_FIELDS + usize::from(error.is_some()));
        request_id.write(to);
        new_token_ids.write(to);
        for (logprobs, arrays) in [(new_logprobs, Arrays::Numpy), (prompt_logprobs, Arrays::Torch)]
        {
            match logprobs {
                Some(logprobs) => logprobs.write(arrays, to),
                None => to.nil(),
            }
        }
        to.nil(); // pooling_output
        finish_reason.write(to);
        stop_reason.write(to);
        write_list_or_nil(events, to);
        kv_transfer_params.write(to);
        ec_transfer_params.write(to);
        to.nil(); // trace_headers
        prefill_stats.write(to);
        to.nil(); // routed_experts
        num_nans_in_logits.write(to);
        write_list_or_nil(mm_cache_miss_hashes, to);
        to.nil(); // new_sampling_mask
        to.nil(); // spec_decode_metrics
        to.nil(); // prompt_token_id_logprobs
        if error.is_some() {
            error.write(to);
        }
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, WireError> {
        let ReceivedOutput { request_id, payload } = ReceivedOutput::read(from)?;
        Ok(*payload.into_output(&request_id))
    }
}

impl Wire for ReceivedOutput {
    fn write(&self, to: &mut Writer) {
        self.payload.clone().into_output(&self.request_id).write(to);
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, WireError> {
        let mut fields = Fields::open(from, 2)?;
        let request_id = fields.next(from).named("request_id")?;
        let new_token_ids = fields.next(from).named("new_token_ids")?;
        let payload = if fields.skip_all_if(from, &EMPTY_REST)? {
            Payload::Tokens(new_token_ids)
        } else {
            Payload::Full(Box::new(EngineCoreOutput::read_rest(new_token_ids, fields, from)?))
        };
        Ok(Self { request_id, payload })
    }
}

impl EngineCoreOutput {
    /// Reads the fields after the tokens. Leaves the request id empty.
    fn read_rest(
        new_token_ids: Vec<TokenId>,
        mut fields: Fields,
        from: &mut Reader<'_>,
    ) -> Result<Self, WireError> {
        let new_logprobs = fields.next::<Option<AnyLogprobs>>(from).named("new_logprobs")?;
        let prompt_logprobs =
            fields.next::<Option<AnyLogprobs>>(from).named("new_prompt_logprobs_tensors")?;
        fields.skip(from)?; // pooling_output
        let finish_reason = fields.next(from).named("finish_reason")?;
        let stop_reason = fields.next(from).named("stop_reason")?;
        let events = fields.next(from).named("events")?;
        let kv_transfer_params = fields.next::<Option<Value>>(from).named("kv_transfer_params")?;
        let ec_transfer_params = fields.next::<Option<Value>>(from).named("ec_transfer_params")?;
        fields.skip(from)?; // trace_headers
        let prefill_stats = fields.next(from).named("prefill_stats")?;
        fields.skip(from)?; // routed_experts
        let num_nans_in_logits = fields.next(from).named("num_nans_in_logits")?;
        let mm_cache_miss_hashes = fields.next(from).named("mm_cache_miss_hashes")?;
        fields.skip(from)?; // new_sampling_mask
        fields.skip(from)?; // spec_decode_metrics
        fields.skip(from)?; // prompt_token_id_logprobs
        let error = fields.next(from).named("error")?;
        fields.close(from)?;
        Ok(Self {
            request_id: String::new(),
            new_token_ids,
            new_logprobs: new_logprobs.map(|AnyLogprobs(logprobs)| logprobs),
            prompt_logprobs: prompt_logprobs.map(|AnyLogprobs(logprobs)| logprobs),
            finish_reason,
            stop_reason,
            events,
            kv_transfer_params,
            ec_transfer_params,
            prefill_stats,
            num_nans_in_logits,
            mm_cache_miss_hashes,
            error,
        })
    }
}

/// Log probabilities as numpy or torch arrays: both forms are accepted.
struct AnyLogprobs(Logprobs);

impl Wire for AnyLogprobs {
    fn write(&self, to: &mut Writer) {
        self.0.write(Arrays::Numpy, to);
    }
    fn read(from: &mut Reader<'_>) -> Result<Self, WireError> {
        Logprobs::read(from).map(Self)
    }
}

impl Wire for FinishReason {
    fn write(&self, to: &mut Writer) {
        let code: u32 = match *self {
            Self::Stop => 0,
            Self::Length => 1,
            Self::Abort => 2,
            Self::Error => 3,
            Self::Repetition => 4,
            Self::Other(code) => code,
        };
        code.write(to);
    }
    fn read(from: &mut Reader<'_>) -> Result<Self, WireError> {
        Ok(match u32::read(from)? {
            0 => Self::Stop,
            1 => Self::Length,
            2 => Self::Abort,
            3 => Self::Error,
            4 => Self::Repetition,
            other => Self::Other(other),
        })
    }
}

impl Wire for StopReason {
    fn write(&self, to: &mut Writer) {
        match self {
            Self::Token(token) => token.write(to),
            Self::Text(text) => text.write(to),
        }
    }
    fn read(from: &mut Reader<'_>) -> Result<Self, WireError> {
        match from.peek()? {
            Marker::FixStr(_) | Marker::Str8 | Marker::Str16 | Marker::Str32 => {
                String::read(from).map(Self::Text)
            }
            _ => TokenId::read(from).map(Self::Token),
        }
    }
}

impl Wire for UtilityOutput {
    fn write(&self, to: &mut Writer) {
        to.array(3);
        self.call_id.write(to);
        match &self.result {
            Ok(result) => {
                to.nil();
                // UtilityResult: [type information, result]
                to.array(2);
                to.nil();
                result.write(to);
            }
            Err(failure) => {
                failure.0.write(to);
                to.nil();
            }
        }
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, WireError> {
        let fields = Fields::open(from, 2)?;
        let call_id = u64::read(from).named("call_id")?;
        let failure = Option::<String>::read(from).named("failure_message")?;
        let mut result = Value::Nil;
        let mut read = 2;
        if fields.has_more_than(read) {
            read += 1;
            if !from.take_nil()? {
                let typed = Fields::open(from, 2).named("result")?;
                from.skip()?; // type information
                result = from.value().named("result")?;
                typed.close_after(2, from)?;
            }
        }
        fields.close_after(read, from)?;
        let result = match failure {
            Some(message) => Err(FailureMessage(message)),
            None => Ok(result),
        };
        Ok(Self { call_id, result })
    }
}

#[cfg(test)]
mod tests;
