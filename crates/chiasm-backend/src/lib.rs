//! The seam to whatever executes a prepared request: vLLM's EngineCore today, agents on other
//! machines and HTTP engines later.
//!
//! The pipeline makes a [`Job`] (tokens or messages, media items, sampling) and gives it to a
//! [`Backend`], which streams [`Output`]s until every continuation has ended. Media is pulled, not
//! pushed: a job names its items, and a backend asks an item's [`MediaSource`] for the form that it
//! needs, and only if it lacks the item. What the router has to know of a worker is data:
//! [`Capabilities`] once, [`Load`] as it changes, and the [`KvSource`] of what the worker's KV
//! cache holds.
//!
//! No socket is opened here and no wire format is known.
//!
//! | module | is |
//! |---|---|
//! | `adapter` | LoRA adapters, and why a backend may lack one |
//! | `backend` | the trait, and a running job |
//! | `connector` | whatever starts or finds the backends of one worker, one after the other |
//! | `capabilities` | what one worker can do, and where knowledge of its KV cache comes from |
//! | `plan_class` | what decides how a prompt is expanded and keyed for a worker |
//! | `job` | what is asked for |
//! | `sampling` | how tokens are chosen, and the parts of a request that not every worker supports |
//! | `forward` | requests that are passed on as they came |
//! | `largest_item` | how much the encoder cache of a model's engines holds |
//! | `media` | items, and the forms in which their sources give them |
//! | `output` | what comes back |
//! | `inbox` | what has come back and nobody has read yet |
//! | `unread` | a bound on that for all answers together |
//! | `error` | what goes wrong, and whose fault it is |
//! | `fake` | with the feature of that name, a backend that follows a script |
#![forbid(unsafe_code)]

mod adapter;
mod backend;
mod begun;
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
mod plan_class;
mod private_network;
mod sampling;
pub mod unread;

pub use adapter::{Adapter, AdapterError, OwnAdapter, adapter_engine_name};
pub use backend::{
    Backend, KvSink, Load, LoadSink, MemoryUsage, OthersEvent, OthersItem, OthersJob, RunningJob,
};
pub use begun::{Begun, BegunPart};
pub use capabilities::{
    Capabilities, HandOff, InputForm, KvEventStream, KvSource, Locality, MediaForm, TensorFormat,
};
pub use connector::{Activity, ConnectError, Connected, Connector, Elsewhere, Life};
pub use error::{Death, JobError, KvSinkError, SourceError};
pub use forward::{ForeseenPrompt, Forward, Forwarded};
pub use job::{
    Embeddings, Input, Job, JobItem, Left, ReasoningHints, RequestId, Stage, TraceContext,
};
pub use largest_item::LargestItem;
pub use media::{
    Delivered, EncodedItem, FieldValue, ItemField, Making, MediaLoad, MediaObserver, MediaSource,
    SentForm, Tensor, TensorBytes, TensorMemory, TensorOrder, Transfer, WorkSize,
};
pub use output::{Content, Finish, Output, Prefill, PromptLogprobs, TokenLogprob, ToolCallDelta};
pub use plan_class::{KeyScheme, PlaceholderForm, PlanClass, VllmItems};
pub use private_network::{Network, NetworkError, PrivateNetwork};
pub use sampling::{Constraint, Repetition, Sampling, Structured, Supports};
