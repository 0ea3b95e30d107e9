//! Other ways than ours: a Python process that has the pixels and hands them to the engine or to a
//! process of its own.

use std::hint::black_box;

use chiasm_engine::SocketDir;
use serde_json::{Value, json};

use crate::frontend::{CACHE_BYTES, Frontend};
use crate::images::Image;
use crate::python::{START, Script, Scripts};
use crate::{Failure, Handoff, PATIENCE, milliseconds, now};

/// The process, as it starts.
pub(crate) struct Starting {
    sender: Script,
    engine_input: String,
}

/// The process that has the pixels.
pub(crate) struct Peers {
    sender: Script,
    versions: Value,
}

impl Peers {
    pub(crate) fn start(scripts: &Scripts, sockets: &SocketDir) -> Result<Starting, Failure> {
        let (engine_input, segments) = (sockets.ipc("peer-in"), sockets.ipc("segments"));
        Ok(Starting {
            sender: scripts.start("peer_sender.py", &[&engine_input, &segments])?,
            engine_input,
        })
    }

    /// One JSON object.
    pub(crate) fn versions(&self) -> &Value {
        &self.versions
    }

    /// Has the Python process send the image to the engine, as a frame of a message in vLLM's
    /// encoding.
    pub(crate) async fn aux(
        &mut self,
        image: &Image,
        id: String,
        frontend: &Frontend,
    ) -> Result<Handoff, Failure> {
        // The engine has a receiver cache for keys that begin so.
        let id = format!("peer-{id}");
        let answer = self.ask("aux", image, &id).await?;
        let start = answer["start"].as_i64().ok_or("no start")?;
        let (end, checksum) = frontend.report(&id, false).await?;
        Ok(Handoff {
            ms: milliseconds(start, end),
            write_ms: None,
            equal: checksum == image.checksum,
        })
    }

    /// Has the Python process hand the image to its other process, through a segment of shared
    /// memory for this image alone. `form` is `pickle` or `msgpack`.
    pub(crate) async fn segment(
        &mut self,
        form: &str,
        image: &Image,
        id: String,
    ) -> Result<Handoff, Failure> {
        let answer = self.ask(form, image, &id).await?;
        let (start, end) = answer["start"].as_i64().zip(answer["end"].as_i64()).ok_or("no time")?;
        let equal = answer["checksum"].as_u64() == Some(u64::from(image.checksum));
        Ok(Handoff { ms: milliseconds(start, end), write_ms: None, equal })
    }

    async fn ask(&mut self, way: &str, image: &Image, id: &str) -> Result<Value, Failure> {
        let Image { height, width, seed, .. } = image;
        let order = json!({"way": way, "id": id, "height": height, "width": width, "seed": seed});
        self.sender.ask(&order, PATIENCE).await
    }
}

impl Starting {
    /// The input socket to which an engine has to connect before this is ready.
    pub(crate) fn engine_input(&self) -> &str {
        &self.engine_input
    }

    pub(crate) async fn ready(mut self) -> Result<Peers, Failure> {
        let versions = self.sender.answer(START).await?;
        Ok(Peers { sender: self.sender, versions })
    }
}

/// Memory of the length of all slots that the engine holds, used in turn as they are.
pub(crate) struct Ring {
    memory: Vec<u8>,
    next: usize,
}

impl Ring {
    pub(crate) fn new() -> Self {
        // Written to, so that its pages are there.
        Self { memory: vec![1; CACHE_BYTES as usize], next: 0 }
    }

    /// The next `length` bytes; `length` is at most that of the whole.
    pub(crate) fn next(&mut self, length: usize) -> &mut [u8] {
        if self.next + length > self.memory.len() {
            self.next = 0;
        }
        let start = self.next;
        // Slots of this size begin at pages too.
        self.next = (start + length).next_multiple_of(4096);
        &mut self.memory[start..start + length]
    }
}

/// The limit of all ways that write the tensor: one copy, by one thread, into memory that was used
/// before.
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
