//! Frontend → engine: `[type, msgpack, aux…]`, after the engine's identity.

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

/// First frame of a request to add (`EngineCoreRequestType.ADD` in `vllm/v1/engine/__init__.py`).
const ADD: &[u8] = b"\x00";
/// First frame of requests to abort.
const ABORT: &[u8] = b"\x01";
/// First frame of a method call.
const UTILITY: &[u8] = b"\x03";

/// A request for tokens (`EngineCoreRequest` in `vllm/v1/engine/__init__.py`).
///
/// Pooling requests and prompt embeddings are not implemented: decoding refuses them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EngineCoreRequest {
    /// Unique among the engine's running requests.
    pub request_id: String,
    /// The expanded prompt. All continuations of one prompt share it.
    pub prompt_token_ids: Arc<Vec<TokenId>>,
    /// Its media items, by their position.
    pub mm_features: Vec<MmFeature>,
    /// How to choose tokens.
    pub sampling_params: SamplingParams,
    /// Seconds since the epoch.
    pub arrival_time: f64,
    /// The LoRA adapter that computes it. All continuations of one prompt share it.
    pub lora_request: Option<Arc<LoraRequest>>,
    /// Separates the prefix cache of those who do not know it.
    pub cache_salt: Option<String>,
    /// Index into [`Addresses::outputs`](super::handshake::Addresses::outputs): the socket that the
    /// outputs go to.
    pub client_index: u32,
    /// Smaller is sooner; the engine must be started with `--scheduling-policy priority`.
    pub priority: i64,
    /// OpenTelemetry context.
    pub trace_headers: Vec<(String, String)>,
    /// The id that the user knows.
    pub external_req_id: Option<String>,
    /// Whether a constraint holds from the first token on; nil has the engine look at the prompt's
    /// end itself.
    pub reasoning_ended: Option<bool>,
    /// Variables of the chat template, for the engine's reasoning parser: `chat_template_kwargs` of
    /// `reasoning_parser_kwargs`.
    pub reasoning_variables: Vec<(String, bool)>,
}

/// Where the variables of the chat template are in `reasoning_parser_kwargs`.
const TEMPLATE_VARIABLES: &str = "chat_template_kwargs";

/// `reasoning_parser_kwargs`, as far as they turn thinking on or off.
#[derive(Default)]
struct ReasoningVariables(Vec<(String, bool)>);

/// A call of a method of the engine (`_handle_client_request` in `vllm/v1/engine/core.py`).
#[derive(Clone, Debug, PartialEq)]
pub struct Utility {
    /// Index into [`Addresses::outputs`](super::handshake::Addresses::outputs): the socket that the
    /// answer goes to.
    pub client_index: u32,
    /// Comes back with the answer.
    pub call_id: i64,
    /// `reset_mm_cache`, `reset_prefix_cache`, …
    pub method: String,
    /// Its positional arguments.
    pub args: Vec<Value>,
}

/// What a frontend says to an engine.
#[derive(Clone, Debug, PartialEq)]
pub enum ClientMessage {
    /// Start a request.
    Add(Box<EngineCoreRequest>),
    /// Forget these requests. Unknown ids are ignored.
    Abort(Vec<String>),
    /// Call a method.
    Utility(Utility),
}

/// An ADD message. Large tensors become aux frames that share their memory with `request`.
pub fn encode(request: &EngineCoreRequest) -> Vec<Bytes> {
    message(ADD, |to| request.write(to))
}

/// An ABORT message.
pub fn encode_abort(request_ids: &[String]) -> Vec<Bytes> {
    message(ABORT, |to| {
        to.array(request_ids.len());
        request_ids.iter().for_each(|id| to.str(id));
    })
}

/// A UTILITY message.
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

/// Reads a message without its identity frame: the engine's side.
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
    /// Fields to write: those without a default, and the others up to the last that has another
    /// value.
    fn len(&self) -> usize {
        let optional = [
            (11, self.client_index != 0),
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
                12 => to.uint(0), // current_wave
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
        fields.must_be_nil(from, "pooling_params")?;
        let arrival_time = fields.next(from).named("arrival_time")?;
        let lora_request =
            fields.next::<Option<LoraRequest>>(from).named("lora_request")?.map(Arc::new);
        let cache_salt = fields.next(from).named("cache_salt")?;
        fields.skip(from)?; // data_parallel_rank
        fields.must_be_nil(from, "prompt_embeds")?;
        fields.must_be_nil(from, "prompt_is_token_ids")?;
        let client_index = fields.next(from).named("client_index")?;
        fields.skip(from)?; // current_wave
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
        if from.nil()? {
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
