//! The words that several Chiasm crates share. No logic lives here, and nothing is depended on.
//!
//! | type | word |
//! |---|---|
//! | [`TokenId`] | one entry of the model's vocabulary |
//! | [`TokenRun`] | the same token several times over: how placeholders are described before they are placed |
//! | [`MmHash`] | identity of a media item |
//! | [`Placeholder`] | the run of prompt tokens that stands for a media item |
//! | [`BlockSize`] | tokens per KV-cache block |
//! | [`WorkerId`] | a serving unit that the router can pick |
//! | [`PlanClassId`] | which workers can be given the same plan of a request |
//! | [`Dtype`] | element type of a tensor |
//! | [`TensorField`] | how an engine joins a tensor with those of other items |
//! | [`Modality`] | image, video, audio, or what a model's own processor brings |
//! | [`Role`] | which stages of a request a worker computes |
//! | [`VllmVersion`] | the release number of an engine's vLLM |
//!
//! [`every_variant!`] declares enums that know all of their variants.
#![forbid(unsafe_code)]

mod block_size;
mod dtype;
mod every_variant;
mod mm_hash;
mod modality;
mod placeholder;
mod plan_class_id;
mod role;
mod tensor_field;
mod token;
mod vllm_version;
mod worker;

pub use block_size::BlockSize;
pub use dtype::Dtype;
pub use mm_hash::{MmHash, ParseMmHashError};
pub use modality::Modality;
pub use placeholder::Placeholder;
pub use plan_class_id::PlanClassId;
pub use role::Role;
pub use tensor_field::TensorField;
pub use token::{TokenId, TokenRun};
pub use vllm_version::VllmVersion;
pub use worker::WorkerId;
