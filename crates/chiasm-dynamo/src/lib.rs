//! Backends that are workers of [Dynamo](https://github.com/ai-dynamo/dynamo) 1.6: Chiasm in the
//! place of its frontend.
//!
//! A [`DynamoAddress`] names an etcd, or a folder, and a namespace in it, a [`Directory`] follows
//! which workers are named there, and a [`DynamoConnector`] makes the backend of one start of one
//! of them. A worker is given tokens over its TCP plane and sends the answer to a connection that
//! it makes itself, to where [`CallHome`] listens. What its KV cache holds it tells in hashes
//! alone: all of it when it is asked, changes over ZMQ.
//!
//! Both only suggest: a worker that is not named any more goes on for as long as it can be
//! connected to. What is proven is Dynamo's mocker; `dynamo.vllm`, `dynamo.sglang` and
//! `dynamo.trtllm` are unverified on hardware. Workers of other planes than TCP, other codecs than
//! msgpack and other models than the one that is served are refused, each with the reason.
//!
//! Nothing that is heard is believed to be small, well formed or in time: frames, values and waits
//! are bounded, and what is malformed ends one request.
//!
//! | module | is |
//! |---|---|
//! | `address` | what an etcd and a namespace are given as |
//! | `card` | what a worker says of itself and its model, and whether it can be served |
//! | `directory` | which workers a namespace has now |
//! | `files` | workers that files of a folder name |
//! | `frame` | the frames of the TCP plane |
//! | `call_home` | where workers call back |
//! | `wire` | requests to one worker |
//! | `answer` | the answer to one request, as it comes home |
//! | `request` | a job as what a worker is asked |
//! | `tensors` | ready tensors for workers of this machine |
//! | `output` | what one message of an answer says |
//! | `running` | one job that runs |
//! | `kv_event` | what is said of a KV cache |
//! | `blocks` | which blocks a worker holds, as events for the index |
//! | `following` | following that, which is a worker's sign of life |
//! | `backend` | one start of a worker as a backend |
//! | `shared` | the state of a backend, its jobs and its tasks, and the task that watches the worker |
//! | `connector` | connecting to one worker |
#![forbid(unsafe_code)]

mod address;
mod answer;
mod backend;
mod blocks;
mod call_home;
mod card;
mod connector;
mod directory;
mod error;
mod files;
mod following;
mod frame;
mod kv_event;
mod output;
mod request;
mod running;
mod shared;
mod tensors;
mod wire;

#[cfg(test)]
mod tests;

pub use address::{AddressError, DynamoAddress, TensorsFor};
pub use call_home::CallHome;
pub use card::ModelFiles;
pub use connector::DynamoConnector;
pub use directory::{Directory, Workers};
pub use tensors::ReadyTensors;
