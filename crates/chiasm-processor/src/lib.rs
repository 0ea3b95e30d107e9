//! vLLM's own processor of a model, in locked processes beside the frontend: what Chiasm has no
//! native code for is read and turned into tensors by the very code that `vllm serve` runs.
//!
//! A [`Processor`] is a Python process with vLLM's imports, the model's configuration and its
//! processor (`python/chiasm_processor`, which this crate carries along), and children of it by
//! fork. A child makes the tensors of an item, expands a prompt whose items are known, or writes a
//! conversation with them; it is made to be killed. [`Processor::item`], [`Processor::prompt`] and
//! [`Processor::chat`] wait for a free child, within bounds; a child that takes too long, dies or
//! answers nonsense costs that call and no other.
//!
//! An item's file and tensors lie in memory of its own ([`MadeItem`]), which only the child that
//! makes them and this process ever see. Nothing that a child says is believed without a look:
//! places lie within the memory, tensors have the bytes that their shapes need.
//!
//! | module | is |
//! |---|---|
//! | `options` | the settings of a processor |
//! | `processor` | the queue before the children |
//! | `server` | the fork server: its start, its end, forks |
//! | `supervisor` | the task that starts the fork server again |
//! | `child` | one child: calls and deadlines |
//! | `python` | which Python, with which variables; the sources |
//! | `output` | what the processes print |
//! | `connection` | messages with files, over Unix sockets |
//! | `message` | what is said |
//! | `memory` | an item's memory |
//! | `item` | what a child says of it, checked |
//! | `error` | what went wrong and whose fault it is |
#![forbid(unsafe_code)]

mod child;
mod connection;
mod error;
mod item;
mod memory;
mod message;
mod options;
mod output;
mod processor;
mod python;
mod server;
mod supervisor;

pub use error::ProcessorError;
pub use item::{ItemField, ItemTensor, ItemValue, MadeItem};
pub use message::{
    ChatCall, ExpandedPrompt, Greeting, KnownItem, PromptUpdate, Target, UpdateMode,
};
pub use options::{ItemLimits, ProcessorOptions, Sandbox};
pub use processor::{ItemCall, Processor};
pub use python::{python_of, script};
