//! Ready tensors for a worker on this machine: what `dynamo.vllm` copies out of shared memory in
//! place of what it would make of an image (`MmKwargsShmSender` and `MmKwargsShmReceiver` in
//! Dynamo's `mm_kwargs_transfer.py`).
//!
//! ```text
//! parcel   number of frames: u32  then of each  length: u64  bytes
//! ```
//!
//! Numbers are little-endian; the frames are those of vLLM's own encoder for one item. A worker
//! that can't use them takes the images themselves, which are in the same request.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::{BufMut, Bytes, BytesMut};
use chiasm_backend::{
    Job, JobError, JobItem, MediaObserver, SourceError, TensorBytes, TensorFormat, TensorMemory,
    TensorOrder,
};
use chiasm_transfer::{NoParcel, Parcel, ParcelRoom, SlotWriter};
use chiasm_types::{MmHash, Modality};
use futures_util::future::try_join_all;
use serde::Serialize;
use tokio::task::spawn_blocking;

/// What tensors for workers of this machine are, and the room that they have on their way.
#[derive(Clone, Debug)]
pub struct ReadyTensors {
    /// What the values are to be.
    pub format: TensorFormat,
    /// Where they lie until the worker has copied them.
    pub room: ParcelRoom,
}

/// The tensors of a job's items, there until this is dropped.
#[derive(Debug)]
pub(crate) struct Packed {
    /// Each item once, however often it stands in the prompt.
    parcels: HashMap<MmHash, Parcel>,
}

/// What a worker is told of them, among the `extra_args` of a request. The items' names are not
/// given as `mm_hashes` beside them: a worker would take 64 bits of each.
#[derive(Serialize)]
pub(crate) struct ExtraArgs<'a> {
    expanded_token_ids: &'a [u32],
    mm_placeholders: Vec<Range<'a>>,
    mm_kwargs_shm: Transfer<'a>,
}

#[derive(Serialize)]
struct Range<'a> {
    offset: usize,
    length: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    is_embed: Option<&'a [bool]>,
}

#[derive(Serialize)]
struct Transfer<'a> {
    modality: &'static str,
    items: Vec<Segment<'a>>,
    mm_hashes: Vec<String>,
}

#[derive(Serialize)]
struct Segment<'a> {
    name: &'a str,
    size: u64,
}

impl ReadyTensors {
    /// Packs the tensors of a job's images. `None` if they are to go as they came, which is told to
    /// `observer`.
    ///
    /// # Errors
    /// [`JobError::Source`] if an image can't be made into tensors.
    pub(crate) async fn pack(
        &self,
        job: &Job,
        observer: &Arc<dyn MediaObserver>,
    ) -> Result<Option<Packed>, JobError> {
        let is_image =
            |item: &JobItem| item.modality == Modality::Image && item.source.encoded().is_some();
        if job.media.is_empty() || !job.media.iter().all(is_image) {
            return Ok(None);
        }
        let items: HashMap<MmHash, &JobItem> =
            job.media.iter().map(|item| (item.hash, item)).collect();
        let memory: Arc<dyn TensorMemory> = Arc::new(OwnMemory);
        let packed = try_join_all(items.into_values().map(|item| {
            let memory = memory.clone();
            async move { Ok::<_, JobError>((item.hash, self.pack_one(item, memory).await?)) }
        }))
        .await?;
        let mut parcels = HashMap::new();
        for (hash, parcel) in packed {
            match parcel {
                Ok(parcel) => drop(parcels.insert(hash, parcel)),
                // All or none: what is packed already is let go.
                Err(why) => {
                    job.media.iter().for_each(|_| observer.stepped_down(why.cause(), &why));
                    return Ok(None);
                }
            }
        }
        Ok(Some(Packed { parcels }))
    }

    async fn pack_one(
        &self,
        item: &JobItem,
        memory: Arc<dyn TensorMemory>,
    ) -> Result<Result<Parcel, NoParcel>, JobError> {
        let order = TensorOrder { format: self.format, memory, still_wanted: Arc::new(|| true) };
        let tensors = item.source.tensors(order).await.map_err(JobError::Source)?;
        let unwanted = || {
            JobError::Source(SourceError::new(std::io::Error::other(
                "an image that is wanted was not made",
            )))
        };
        let item = chiasm_engine::to_item(tensors.ok_or_else(unwanted)?)?;
        let room = self.room.clone();
        // Large tensors are copied. If nobody waits for it any more the parcel is dropped when it
        // is done.
        let packed = spawn_blocking(move || room.pack(&framed(item.encode()))).await;
        packed.map_err(|error| JobError::Source(SourceError::new(error)))
    }
}

impl Packed {
    /// What a worker is told of them, where the prompt is expanded to these tokens. `None` if it is
    /// of other items, which can't be.
    pub(crate) fn told<'a>(&'a self, job: &'a Job, expanded: &'a [u32]) -> Option<ExtraArgs<'a>> {
        let segment = |item: &JobItem| {
            let parcel = self.parcels.get(&item.hash)?;
            Some(Segment { name: parcel.name(), size: parcel.bytes() })
        };
        let range = |item: &'a JobItem| Range {
            offset: item.placeholder.offset,
            length: item.placeholder.length,
            is_embed: item.placeholder.is_embed.as_deref(),
        };
        Some(ExtraArgs {
            expanded_token_ids: expanded,
            mm_placeholders: job.media.iter().map(range).collect(),
            mm_kwargs_shm: Transfer {
                modality: "image",
                items: job.media.iter().map(segment).collect::<Option<_>>()?,
                mm_hashes: job.media.iter().map(JobItem::name).collect(),
            },
        })
    }

    /// Lets go of them where that holds up nobody: it gives memory back to the system.
    pub(crate) fn let_go(self) {
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn_blocking(move || drop(self))),
            Err(_) => drop(self),
        }
    }
}

/// The parts of a parcel (`_pack_buffers` in Dynamo).
fn framed(frames: Vec<Bytes>) -> Vec<Bytes> {
    let mut parts = Vec::with_capacity(2 * frames.len());
    for (index, frame) in frames.iter().enumerate() {
        let mut head = BytesMut::with_capacity(12);
        if index == 0 {
            head.put_u32_le(frames.len() as u32);
        }
        head.put_u64_le(frame.len() as u64);
        parts.extend([head.freeze(), frame.clone()]);
    }
    parts
}

/// Tensors are made in this process's memory, where the next request finds them, too.
struct OwnMemory;

impl TensorMemory for OwnMemory {
    fn reserve(&self, _: usize) -> Option<SlotWriter> {
        None
    }

    fn takes(&self, bytes: &TensorBytes) -> bool {
        matches!(bytes, TensorBytes::Here(_))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_stand_behind_their_number_each_behind_its_length() {
        let parts = framed(vec![Bytes::from_static(b"ab"), Bytes::new(), Bytes::from_static(b"c")]);
        let whole: Vec<u8> = parts.iter().flat_map(|part| part.iter().copied()).collect();
        let expected = [
            &3_u32.to_le_bytes()[..],
            &2_u64.to_le_bytes(),
            b"ab",
            &0_u64.to_le_bytes(),
            &1_u64.to_le_bytes(),
            b"c",
        ]
        .concat();
        assert_eq!(whole, expected);
    }
}
