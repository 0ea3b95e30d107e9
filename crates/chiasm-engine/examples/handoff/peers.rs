//! The methods of others: a Python process has the pixels, and hands them to the engine or to its
//! own child process.

use std::hint::black_box;

use chiasm_engine::SocketDir;
use serde_json::{Value, json};

use crate::frontend::{CACHE_BYTES, Frontend};
use crate::images::Image;
use crate::python::{START_TIMEOUT, Script, Scripts};
use crate::{Failure, Handoff, STEP_TIMEOUT, milliseconds, now};

/// The Python process while it starts.
pub(crate) struct StartingPeers {
    sender: Script,
    engine_input: String,
}

/// The Python process that has the pixels.
pub(crate) struct Peers {
    sender: Script,
    versions: Value,
}

impl Peers {
    pub(crate) fn start(scripts: &Scripts, sockets: &SocketDir) -> Result<StartingPeers, Failure> {
        let engine_input = sockets.ipc("peer-in");
        let segments = sockets.ipc("segments");
        Ok(StartingPeers {
            sender: scripts.start("peer_sender.py", &[&engine_input, &segments])?,
            engine_input,
        })
    }

    /// Returns the versions of the Python packages, as a JSON object.
    pub(crate) fn versions(&self) -> &Value {
        &self.versions
    }

    /// Lets the Python process send the image to the engine, as a frame of a message in vLLM's
    /// encoding.
    pub(crate) async fn aux(
        &mut self,
        image: &Image,
        id: String,
        frontend: &Frontend,
    ) -> Result<Handoff, Failure> {
        // The engine has a separate receiver cache for keys with this prefix.
        let id = format!("peer-{id}");
        let answer = self.request("aux", image, &id).await?;
        let start = answer["start"].as_i64().ok_or("no start")?;
        let (end, checksum) = frontend.report(&id, false).await?;
        Ok(Handoff {
            ms: milliseconds(start, end),
            write_ms: None,
            equal: checksum == image.checksum,
        })
    }

    /// Lets the Python process hand the image to its child process, through a new segment of shared
    /// memory. `encoding` is `pickle` or `msgpack`.
    pub(crate) async fn segment(
        &mut self,
        encoding: &str,
        image: &Image,
        id: String,
    ) -> Result<Handoff, Failure> {
        let answer = self.request(encoding, image, &id).await?;
        let (start, end) = answer["start"].as_i64().zip(answer["end"].as_i64()).ok_or("no time")?;
        let equal = answer["checksum"].as_u64() == Some(u64::from(image.checksum));
        Ok(Handoff { ms: milliseconds(start, end), write_ms: None, equal })
    }

    /// Lets the Python process hash an image whose file has this length, as vLLM's frontend does.
    /// Returns the milliseconds that it takes.
    pub(crate) async fn hash(&mut self, bytes: usize) -> Result<f64, Failure> {
        let step = json!({"way": "hash", "bytes": bytes});
        let answer = self.sender.request(&step, STEP_TIMEOUT).await?;
        let (start, end) = answer["start"].as_i64().zip(answer["end"].as_i64()).ok_or("no time")?;
        Ok(milliseconds(start, end))
    }

    async fn request(&mut self, method: &str, image: &Image, id: &str) -> Result<Value, Failure> {
        let Image { height, width, seed, .. } = image;
        let request =
            json!({"way": method, "id": id, "height": height, "width": width, "seed": seed});
        self.sender.request(&request, STEP_TIMEOUT).await
    }
}

impl StartingPeers {
    /// Returns the input socket. The process is ready once an engine has connected to it.
    pub(crate) fn engine_input(&self) -> &str {
        &self.engine_input
    }

    pub(crate) async fn ready(mut self) -> Result<Peers, Failure> {
        let versions = self.sender.answer(START_TIMEOUT).await?;
        Ok(Peers { sender: self.sender, versions })
    }
}

/// A buffer as long as all slots that the engine holds, whose parts are used in turn, as slots are.
pub(crate) struct Ring {
    memory: Vec<u8>,
    next: usize,
}

impl Ring {
    pub(crate) fn new() -> Self {
        // The buffer is filled with ones, so that its pages are allocated.
        Self { memory: vec![1; CACHE_BYTES as usize], next: 0 }
    }

    /// Returns the next `length` bytes, at most the whole buffer.
    pub(crate) fn next(&mut self, length: usize) -> &mut [u8] {
        if self.next + length > self.memory.len() {
            self.next = 0;
        }
        let start = self.next;
        // Each part starts at a page, as slots of this size do.
        self.next = (start + length).next_multiple_of(4096);
        &mut self.memory[start..start + length]
    }
}

/// Copies the image once, with one thread, into memory that was used before: the lower bound of all
/// methods that write the tensor.
pub(crate) fn memcpy(image: &Image, buffer: &mut [u8]) -> Handoff {
    let start = now();
    black_box(&mut *buffer).copy_from_slice(black_box(&image.pixels));
    let end = now();
    Handoff {
        ms: milliseconds(start, end),
        write_ms: None,
        equal: crc32fast::hash(buffer) == image.checksum,
    }
}
