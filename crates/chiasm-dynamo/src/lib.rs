//! Backends that are workers of [Dynamo](https://github.com/ai-dynamo/dynamo) 1.6: Chiasm takes the
//! place of Dynamo's frontend.
//!
//! A [`DynamoAddress`] is an etcd or a folder, and a namespace in it. A [`Directory`] follows the
//! workers that are registered there. A [`DynamoConnector`] creates the backend of one start of one
//! worker. A worker receives tokens over its TCP plane, and sends the answer over a connection that
//! it opens itself to the [`ResponseListener`]. It reports its KV cache only as hashes: the whole
//! cache in answer to a query, changes over ZMQ.
//!
//! Registration is only a hint: an unregistered worker stays in use for as long as it is reachable.
//! This is proven with Dynamo's mocker; `dynamo.vllm`, `dynamo.sglang` and `dynamo.trtllm` are
//! unverified on hardware. Workers with another plane than TCP, another codec than msgpack or
//! another model than the served one are refused with the reason.
//!
//! A worker is not trusted to send small, well-formed or timely messages: frames, values and waits
//! are bounded, and a malformed message ends one request.
//!
//! | module | contents |
//! |---|---|
//! | `address` | the address of a registry and a namespace on the command line |
//! | `card` | the description of a worker and its model, and the checks before it is served |
//! | `directory` | the current workers of a namespace |
//! | `files` | workers that are registered in the files of a folder |
//! | `frame` | the frames of the TCP plane |
//! | `response_listener` | the connections that workers open for their answers |
//! | `wire` | requests to one worker |
//! | `answer` | the answer to one request |
//! | `request` | conversion of a job to a request |
//! | `tensors` | tensors in shared memory for workers on this machine |
//! | `output` | one message of an answer |
//! | `running` | a running job |
//! | `kv_event` | the format of messages about a KV cache; `following` reads them |
//! | `blocks` | the blocks of a worker, as events for the index |
//! | `following` | following a worker's KV cache, which also probes the worker |
//! | `backend` | the backend of one start of a worker |
//! | `shared` | the state shared by a backend, its jobs and its tasks; the liveness task |
//! | `connector` | connecting to one worker |
#![forbid(unsafe_code)]

mod address;
mod answer;
mod backend;
mod blocks;
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
mod response_listener;
mod running;
mod shared;
mod tensors;
mod wire;

#[cfg(test)]
mod tests;

pub use address::{AddressError, DynamoAddress, TensorSetting};
pub use card::ModelFiles;
pub use connector::DynamoConnector;
pub use directory::{Directory, Workers};
pub use response_listener::ResponseListener;
pub use tensors::ReadyTensors;
