//! The messages between a frontend and vLLM's EngineCore, in both directions, as plain data.
//!
//! Every message is a list of ZMQ frames. The first carries msgpack; the others, the "aux frames",
//! carry the bytes of large tensors. This module opens no sockets: the client uses one half of it,
//! the simulated engine the other.
//!
//! | module | messages |
//! |---|---|
//! | [`handshake`] | HELLO, INIT, READY, and the engine's ready report |
//! | [`request`] | ADD, ABORT, UTILITY; with [`sampling`], [`feature`] and [`lora`] as their parts |
//! | [`output`] | EngineCoreOutputs, ENGINE_CORE_DEAD; with [`logprobs`] and [`stats`] as their parts |
//! | [`coordinator`] | the messages between the engines of a group and their coordinator |
//! | [`tensor`] | arrays inside both |
//! | [`version`] | everything that depends on the version of vLLM |
//!
//! Decoding goes by position (arrays) or by name (maps) and skips unknown fields, because vLLM
//! appends fields. It never panics, and never reserves memory for more than the received bytes.

mod codec;
mod error;
mod failure;
mod reader;
mod writer;

pub mod coordinator;
pub mod feature;
pub mod handshake;
pub mod logprobs;
pub mod lora;
pub mod output;
pub mod request;
pub mod sampling;
pub mod stats;
pub mod tensor;
pub mod version;

pub use error::{Problem, WireError};
pub use failure::FailureMessage;
pub use feature::{FieldKind, MmData, MmFeature, MmField, MmItem};
pub use handshake::{EngineReady, Hello, InitMessage};
pub use logprobs::Logprobs;
pub use lora::{LoraError, LoraRequest};
pub use output::{
    EngineCoreOutput, EngineCoreOutputs, EngineMessage, FinishReason, RequestError, StopReason,
    UtilityOutput,
};
pub use request::{ClientMessage, EngineCoreRequest, Utility};
pub(crate) use sampling::SUPPORTS;
pub use sampling::{ExtraArgs, RepetitionDetection, SamplingParams, StructuredOutputs, XGRAMMAR};
pub use stats::{PrefillStats, SchedulerStats};
pub use tensor::{TensorData, WireTensor};

/// An arbitrary msgpack value, for values that vLLM leaves untyped (utility arguments and results).
pub use rmpv::Value;
