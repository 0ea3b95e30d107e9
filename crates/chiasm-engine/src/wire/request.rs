//! Messages from a frontend to an engine: `[type, msgpack, aux…]`, after the engine's identity.

use std::sync::Arc;

use bytes::Bytes;
use chiasm_types::TokenId;
use rmpv::Value;

use super::codec::{Fields, Wire, write_list_or_nil};
use super::error::{Named, Problem, WireError};
use super::feature::MmFeature;
use super::lora::LoraRequest;
use super::reader::Reader;
use super::sampling::SamplingParams;
use super::version::{REQUEST_FIELDS, REQUEST_REQUIRED_FIELDS};
use super::writer::Writer;

/// The first frame of an ADD message (`EngineCoreRequestType.ADD` in
/// `vllm/v1/engine/__init__.py`).
const ADD: &[u8] = b"\x00";
/// The first frame of an ABORT message.
const ABORT: &[u8] = b"\x01";
/// The first frame of a UTILITY message, which calls a method.
const UTILITY: &[u8] = b"\x03";

/// A request for tokens (`EngineCoreRequest` in `vllm/v1/engine/__init__.py`).
///
/// Pooling requests and prompt embeddings are not implemented: decoding refuses them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EngineCoreRequest {
    /// An id that is unique among the engine's running requests.
    pub request_id: String,
    /// The expanded prompt. All continuations of one prompt share it.
    pub prompt_token_ids: Arc<Vec<TokenId>>,
    /// The prompt's media items, by position.
    pub mm_features: Vec<MmFeature>,
    /// The sampling parameters.
    pub sampling_params: SamplingParams,
    /// The arrival time in seconds since the epoch.
    pub arrival_time: f64,
    /// The LoRA adapter. All continuations of one prompt share it.
    pub lora_request: Option<Arc<LoraRequest>>,
    /// A secret that separates the prefix cache: only requests with the same salt share blocks.
    pub cache_salt: Option<String>,
    /// The index of the outputs' socket in
    /// [`Addresses::outputs`](super::handshake::Addresses::outputs).
    pub client_index: u32,
    /// The wave of a group's engine in which the request was sent. With
    /// [`STALE_WAVE`](super::coordinator::STALE_WAVE), an idle engine of a group starts a wave.
    /// Other engines ignore it.
    pub current_wave: i64,
    /// The priority; smaller is sooner. Needs an engine with `--scheduling-policy priority`.
    pub priority: i64,
    /// The OpenTelemetry context.
    pub trace_headers: Vec<(String, String)>,
    /// The id that the client knows.
    pub external_req_id: Option<String>,
    /// `true` if a constraint holds from the first token on. With `None` the engine decides by the
    /// end of the prompt.
    pub reasoning_ended: Option<bool>,
    /// Variables of the chat template, for the engine's reasoning parser: `chat_template_kwargs` of
    /// `reasoning_parser_kwargs`.
    pub reasoning_variables: Vec<(String, bool)>,
}

/// The key of the chat template's variables in `reasoning_parser_kwargs`.
const TEMPLATE_VARIABLES: &str = "chat_template_kwargs";

/// The boolean variables of `reasoning_parser_kwargs`, which turn thinking on or off.
#[derive(Default)]
struct ReasoningVariables(Vec<(String, bool)>);

/// A call of a method of the engine (`_handle_client_request` in `vllm/v1/engine/core.py`).
#[derive(Clone, Debug, PartialEq)]
pub struct Utility {
    /// The index of the result's socket in
    /// [`Addresses::outputs`](super::handshake::Addresses::outputs).
    pub client_index: u32,
    /// The id of the call, which the result repeats. vLLM takes the upper 64 bits of a UUID.
    pub call_id: u64,
    /// The method: `reset_mm_cache`, `reset_prefix_cache`, …
    pub method: String,
    /// The positional arguments.
    pub args: Vec<Value>,
}

/// A message from a frontend to an engine.
#[derive(Clone, Debug, PartialEq)]
pub enum ClientMessage {
    /// Start a request.
    Add(Box<EngineCoreRequest>),
    /// Abort these requests. Unknown ids are ignored.
    Abort(Vec<String>),
    /// Call a method.
    Utility(Utility),
}

/// Encodes an ADD message. Large tensors become aux frames that share their memory with `request`.
pub fn encode(request: &EngineCoreRequest) -> Vec<Bytes> {
    message(ADD, |to| request.write(to))
}

/// Encodes an ABORT message.
pub fn encode_abort(request_ids: &[String]) -> Vec<Bytes> {
    message(ABORT, |to| {
        to.array(request_ids.len());
        request_ids.iter().for_each(|id| to.str(id));
    })
}

/// Encodes a UTILITY message.
pub fn encode_utility(call: &Utility) -> Vec<Bytes> {
    message(UTILITY, |to| {
        to.array(4);
        call.client_index.write(to);
        call.call_id.write(to);
        call.method.write(to);
        call.args.write(to);
    })
}

fn message(kind: &'static [u8], write: impl FnOnce(&mut Writer)) -> Vec<Bytes> {
    let mut to = Writer::default();
    write(&mut to);
    let mut frames = vec![Bytes::from_static(kind)];
    frames.extend(to.into_frames());
    frames
}

/// Decodes a message without its identity frame: the engine's side.
pub fn decode(frames: &[Bytes]) -> Result<ClientMessage, WireError> {
    let (kind, frames) = frames.split_first().ok_or(Problem::Missing.at("type"))?;
    let mut from = Reader::new(frames)?;
    match &kind[..] {
        ADD => EngineCoreRequest::read(&mut from)
            .map(Box::new)
            .map(ClientMessage::Add)
            .named("EngineCoreRequest"),
        ABORT => Vec::read(&mut from).map(ClientMessage::Abort).named("abort"),
        UTILITY => read_utility(&mut from).map(ClientMessage::Utility).named("utility"),
        other => Err(Problem::Unsupported(format!("message type {other:02x?}")).at("type")),
    }
}

fn read_utility(from: &mut Reader<'_>) -> Result<Utility, WireError> {
    let mut fields = Fields::open(from, 4)?;
    let call = Utility {
        client_index: fields.next(from).named("client_index")?,
        call_id: fields.next(from).named("call_id")?,
        method: fields.next(from).named("method")?,
        args: fields.next(from).named("args")?,
    };
    fields.close(from)?;
    Ok(call)
}

impl EngineCoreRequest {
    /// Returns the number of fields to write: the required ones, and the optional ones up to the
    /// last that does not have its default value.
    fn len(&self) -> usize {
        let optional = [
            (11, self.client_index != 0),
            (12, self.current_wave != 0),
            (13, self.priority != 0),
            (14, !self.trace_headers.is_empty()),
            (16, self.external_req_id.is_some()),
            (17, self.reasoning_ended.is_some()),
            (18, !self.reasoning_variables.is_empty()),
        ];
        let last = optional.iter().rev().find(|(_, set)| *set);
        last.map_or(REQUEST_REQUIRED_FIELDS, |(position, _)| position + 1)
    }
}

impl Wire for EngineCoreRequest {
    fn write(&self, to: &mut Writer) {
        let Self {
            request_id,
            prompt_token_ids,
            mm_features,
            sampling_params,
            arrival_time,
            lora_request,
            cache_salt,
            client_index,
            current_wave,
            priority,
            trace_headers,
            external_req_id,
            reasoning_ended,
            reasoning_variables,
        } = self;
        let len = self.len();
        debug_assert!(len <= REQUEST_FIELDS);
        to.array(len);
        for position in 0..len {
            match position {
                0 => request_id.write(to),
                1 => prompt_token_ids.write(to),
                2 => write_list_or_nil(mm_features, to),
                3 => sampling_params.write(to),
                5 => arrival_time.write(to),
                6 => match lora_request {
                    Some(lora) => lora.write(to),
                    None => to.nil(),
                },
                7 => cache_salt.write(to),
                11 => client_index.write(to),
                12 => current_wave.write(to),
                13 => priority.write(to),
                14 if !trace_headers.is_empty() => trace_headers.write(to),
                15 => to.bool(false), // resumable
                16 => external_req_id.write(to),
                17 => reasoning_ended.write(to),
                18 => ReasoningVariables(reasoning_variables.clone()).write(to),
                // pooling_params, data_parallel_rank, prompt_embeds, prompt_is_token_ids
                _ => to.nil(),
            }
        }
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, WireError> {
        let mut fields = Fields::open(from, REQUEST_REQUIRED_FIELDS)?;
        let request_id = fields.next(from).named("request_id")?;
        let prompt_token_ids = Arc::new(fields.next::<Vec<_>>(from).named("prompt_token_ids")?);
        let mm_features = fields.next(from).named("mm_features")?;
        let sampling_params =
            fields.next::<Option<SamplingParams>>(from).named("sampling_params")?;
        fields.expect_nil(from, "pooling_params")?;
        let arrival_time = fields.next(from).named("arrival_time")?;
        let lora_request =
            fields.next::<Option<LoraRequest>>(from).named("lora_request")?.map(Arc::new);
        let cache_salt = fields.next(from).named("cache_salt")?;
        fields.skip(from)?; // data_parallel_rank
        fields.expect_nil(from, "prompt_embeds")?;
        fields.expect_nil(from, "prompt_is_token_ids")?;
        let client_index = fields.next(from).named("client_index")?;
        let current_wave = fields.next(from).named("current_wave")?;
        let priority = fields.next(from).named("priority")?;
        let trace_headers = fields.next(from).named("trace_headers")?;
        fields.skip(from)?; // resumable
        let external_req_id = fields.next(from).named("external_req_id")?;
        let reasoning_ended = fields.next(from).named("reasoning_ended")?;
        let ReasoningVariables(reasoning_variables) =
            fields.next(from).named("reasoning_parser_kwargs")?;
        fields.close(from)?;
        Ok(Self {
            request_id,
            prompt_token_ids,
            mm_features,
            sampling_params: sampling_params.ok_or(Problem::Missing.at("sampling_params"))?,
            arrival_time,
            lora_request,
            cache_salt,
            client_index,
            current_wave,
            priority,
            trace_headers,
            external_req_id,
            reasoning_ended,
            reasoning_variables,
        })
    }
}

impl Wire for ReasoningVariables {
    fn write(&self, to: &mut Writer) {
        to.map(1);
        to.str(TEMPLATE_VARIABLES);
        self.0.write(to);
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, WireError> {
        let mut variables = Vec::new();
        if from.take_nil()? {
            return Ok(Self(variables));
        }
        for _ in 0..from.map()? {
            if from.str()? != TEMPLATE_VARIABLES {
                from.skip()?;
                continue;
            }
            let all = Vec::<(String, Value)>::read(from)?;
            variables
                .extend(all.into_iter().filter_map(|(name, value)| Some((name, value.as_bool()?))));
        }
        Ok(Self(variables))
    }
}
