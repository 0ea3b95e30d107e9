//! vLLM's own processor of a model, in sandboxed processes beside the frontend. It makes the
//! tensors for which Chiasm has no native code, with the code that `vllm serve` runs.
//!
//! A [`Processor`] is a fork server: a Python process with vLLM's imports, the model's
//! configuration and the model's processor. Its sources, `python/chiasm_processor`, are embedded in
//! this crate. Its children make the tensors of an item, expand a prompt with known items, or write
//! a conversation with them. Children are disposable: a child that exceeds its deadline, dies or
//! sends an invalid reply fails only its current call. [`Processor::item`], [`Processor::prompt`]
//! and [`Processor::chat`] wait for a free child; the number of waiting items is bounded.
//!
//! An item's file and tensors lie in memory of their own ([`ItemOutput`]). Only the child that
//! makes them and this process can access that memory. Every reply of a child is validated: tensors
//! must lie within the memory and have the bytes that their shapes need.
//!
//! A video that was cut (`chiasm-video`) goes to a child as a small file, whose frames
//! [`Processor::frames`] returns one by one, as OpenCV decodes them for vLLM. The same memory has
//! room for a few frames only, and the child waits until one of them was read.
//!
//! | module | contents |
//! |---|---|
//! | `options` | the settings of a processor |
//! | `processor` | the queue in front of the children |
//! | `server` | the fork server: start, exit, forks |
//! | `supervisor` | the task that restarts the fork server |
//! | `child` | one child: calls and deadlines |
//! | `python` | the choice of Python, its environment, the embedded sources |
//! | `frames` | the frames of a video, decoded one by one |
//! | `output` | the output of the processes |
//! | `connection` | messages with files over Unix sockets |
//! | `greeting`, `audio` | the properties of a model's processor |
//! | `message` | the messages |
//! | `memory` | the memory of an item |
//! | `item` | the validated tensors of an item |
//! | `error` | errors |
#![forbid(unsafe_code)]

mod audio;
mod child;
mod connection;
mod error;
mod frames;
mod greeting;
mod item;
mod memory;
mod message;
mod options;
mod output;
mod processor;
mod python;
mod server;
mod supervisor;

pub use audio::{
    AudioDescription, AudioLoader, AudioProbe, ExtractorDescription, ResamplingDescription,
};
pub use error::ProcessorError;
pub use frames::{FrameReader, FramesCall};
pub use greeting::Greeting;
pub use item::{ItemField, ItemOutput, ItemTensor, ItemValue};
pub use message::{ChatCall, ExpandedPrompt, KnownItem, PromptUpdate, Target, UpdateMode};
pub use options::{ItemLimits, ProcessorOptions, Sandbox};
pub use processor::{ItemCall, Processor};
pub use python::{find_python, python_command};
