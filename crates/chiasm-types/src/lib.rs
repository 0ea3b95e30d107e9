//! Types that several Chiasm crates share. The crate has no logic and no dependencies.
//!
//! | type | meaning |
//! |---|---|
//! | [`TokenId`] | an entry of the model's vocabulary |
//! | [`TokenRun`] | a repeated token; it describes a placeholder whose offset is not known yet |
//! | [`MmHash`] | the identity of a media item |
//! | [`Placeholder`] | the run of prompt tokens that stands for a media item |
//! | [`BlockSize`] | the number of tokens per KV-cache block |
//! | [`WorkerId`] | a serving unit that the router can pick |
//! | [`PlanClassId`] | a class of workers that can share one plan of a request |
//! | [`Dtype`] | the element type of a tensor |
//! | [`TensorField`] | the way an engine joins a tensor with those of other items |
//! | [`Modality`] | image, video, audio, or a modality of a model's own processor |
//! | [`Role`] | the stages of a request that a worker computes |
//! | [`VllmVersion`] | the release number of an engine's vLLM |
//!
//! [`every_variant!`] declares an enum with a list of its variants.
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
