//! The interface between the pipeline and the executors of prepared requests: vLLM's EngineCore,
//! agents on other machines, and HTTP servers.
//!
//! The pipeline makes a [`Job`] (tokens or messages, media items, sampling) and hands it to a
//! [`Backend`], which streams [`Output`]s until every continuation has ended. Media is pulled, not
//! pushed: a job names its items, and a backend that lacks an item requests it from the item's
//! [`MediaSource`], in the form that it needs. The router only sees data about a worker:
//! [`Capabilities`] once, [`Load`] as it changes, and the contents of its KV cache from a
//! [`KvSource`].
//!
//! This crate opens no sockets and contains no wire formats.
//!
//! | module | contents |
//! |---|---|
//! | `adapter` | LoRA adapters |
//! | `backend` | the trait [`Backend`], running jobs, load and KV events |
//! | `connector` | starting, finding and observing the backends of a worker |
//! | `capabilities` | a worker's capabilities, and the source of knowledge about its KV cache |
//! | `plan_class` | everything that determines how a prompt is expanded and keyed for a worker |
//! | `job` | jobs, request ids, and trace contexts |
//! | `sampling` | sampling settings, and the parts of a request that not every worker supports |
//! | `forward` | requests that are passed on unchanged |
//! | `largest_item` | the capacity of the encoder cache of a model's engines |
//! | `media` | media items and the forms in which sources provide them |
//! | `video` | videos that another machine decodes from a cut of their files |
//! | `output` | the outputs of a job |
//! | `inbox` | a queue of unread outputs |
//! | `unread` | a budget for the unread outputs of all answers |
//! | `partial_messages` | a limit on incomplete messages of one worker |
//! | `private_network` | networks on which engines exchange prompts between machines |
//! | `error` | errors, and which party is at fault |
//! | `fake` | with the feature `fake`, a backend that follows a script |
#![forbid(unsafe_code)]

mod adapter;
mod backend;
mod capabilities;
mod connector;
mod error;
#[cfg(feature = "fake")]
pub mod fake;
mod forward;
pub mod inbox;
mod job;
mod largest_item;
mod media;
mod output;
mod partial_messages;
mod plan_class;
mod private_network;
mod sampling;
pub mod unread;
mod video;

pub use adapter::{Adapter, AdapterError, PreloadedAdapter, adapter_engine_name};
pub use backend::{
    Backend, ForeignJob, ForeignJobEvent, ForeignMediaItem, KvSink, Load, LoadSink, MemoryUsage,
    RunningJob,
};
pub use capabilities::{
    Capabilities, HandOff, InputForm, KvEventStream, KvSource, Locality, MediaForm, TensorFormat,
};
pub use connector::{
    Activity, BackendLifecycle, ConnectError, Connected, Connector, RemoteLifecycle,
};
pub use error::{DeathReason, JobError, KvSinkError, SourceError};
pub use forward::{ForwardRequest, ForwardResponse, PredictedPrompt};
pub use job::{
    Input, Job, JobItem, KvTransferParams, ReasoningHints, RequestId, Stage, StoredEmbeddings,
    TraceContext,
};
pub use largest_item::LargestItem;
pub use media::{
    EncodedItem, FieldValue, ItemField, MediaDelivery, MediaLoad, MediaObserver, MediaSource,
    ProcessingCost, SentForm, Tensor, TensorBytes, TensorMemory, TensorRequest, Transfer, WorkSize,
};
pub use output::{Content, Finish, Output, Prefill, PromptLogprobs, TokenLogprob, ToolCallDelta};
pub use partial_messages::{PartialMessage, PartialMessages};
pub use plan_class::{KeyScheme, PlaceholderForm, PlanClass, VllmItems};
pub use private_network::{Network, NetworkError, PrivateNetwork};
pub use sampling::{Constraint, Repetition, Sampling, Structured, Supports};
pub use video::{CuttableVideo, PartFrame, VideoDescription, VideoPart};
