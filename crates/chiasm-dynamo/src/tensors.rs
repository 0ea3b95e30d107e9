//! Image tensors for a worker on this machine, in shared memory. `dynamo.vllm` copies them instead
//! of processing the image itself (`MmKwargsShmSender` and `MmKwargsShmReceiver` in Dynamo's
//! `mm_kwargs_transfer.py`).
//!
//! ```text
//! blob   number of frames: u32  then of each  length: u64  bytes
//! ```
//!
//! Numbers are little-endian; the frames are those of vLLM's own encoder for one item. A worker
//! that can't use them uses the images themselves, which are in the same request.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::{BufMut, Bytes, BytesMut};
use chiasm_backend::{
    ItemField, Job, JobError, JobItem, MediaObserver, SourceError, TensorBytes, TensorFormat,
    TensorMemory, TensorRequest,
};
use chiasm_transfer::{ShmBlob, ShmBlobBudget, ShmBlobError, SlotWriter};
use chiasm_types::{MmHash, Modality};
use futures_util::future::try_join_all;
use serde::Serialize;
use tokio::task::spawn_blocking;

/// The format of tensors for workers on this machine, and the memory for tensors in transit.
#[derive(Clone, Debug)]
pub struct ReadyTensors {
    /// The format of the values.
    pub format: TensorFormat,
    /// The shared memory that holds the tensors until the worker has copied them.
    pub budget: ShmBlobBudget,
}

/// The tensors of a job's items. Dropping it removes them.
#[derive(Debug)]
pub(crate) struct PackedTensors {
    /// One blob per item, however often the item occurs in the prompt.
    blobs: HashMap<MmHash, ShmBlob>,
}

/// The description of tensors among the `extra_args` of a request. It has no `mm_hashes` with the
/// items' names, because a worker would use only 64 bits of each.
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
    /// Packs the tensors of a job's images. Returns `None` if the images have to be sent as files,
    /// which is reported to `observer`.
    ///
    /// # Errors
    /// Returns [`JobError::Source`] if an image can't be made into tensors.
    pub(crate) async fn pack(
        &self,
        job: &Job,
        observer: &Arc<dyn MediaObserver>,
    ) -> Result<Option<PackedTensors>, JobError> {
        let is_image =
            |item: &JobItem| item.modality == Modality::Image && item.source.encoded().is_some();
        if job.media.is_empty() || !job.media.iter().all(is_image) {
            return Ok(None);
        }
        let items: HashMap<MmHash, &JobItem> =
            job.media.iter().map(|item| (item.hash, item)).collect();
        let memory: Arc<dyn TensorMemory> = Arc::new(ProcessMemory);
        let packed = try_join_all(items.into_values().map(|item| {
            let request = TensorRequest {
                format: self.format,
                // Images have no small floats.
                model_dtype: None,
                memory: memory.clone(),
                is_still_needed: Arc::new(|| true),
            };
            // Called for all items before any is awaited, so that the source knows all the work.
            let tensors = item.source.tensors(request);
            async move { Ok::<_, JobError>((item.hash, self.pack_one(tensors).await?)) }
        }))
        .await?;
        let mut blobs = HashMap::new();
        for (hash, blob) in packed {
            match blob {
                Ok(blob) => drop(blobs.insert(hash, blob)),
                // All or none: the blobs that were written are dropped.
                Err(why) => {
                    job.media.iter().for_each(|_| observer.stepped_down(why.cause(), &why));
                    return Ok(None);
                }
            }
        }
        Ok(Some(PackedTensors { blobs }))
    }

    async fn pack_one(
        &self,
        tensors: impl Future<Output = Result<Option<Vec<ItemField>>, SourceError>>,
    ) -> Result<Result<ShmBlob, ShmBlobError>, JobError> {
        let tensors = tensors.await.map_err(JobError::Source)?;
        let missing = || {
            JobError::Source(SourceError::new(std::io::Error::other(
                "a requested image was not processed",
            )))
        };
        let item = chiasm_engine::to_item(tensors.ok_or_else(missing)?)?;
        let budget = self.budget.clone();
        // Large tensors are copied. If the caller has gone meanwhile, the finished blob is dropped.
        let packed = spawn_blocking(move || budget.write(&with_lengths(item.encode()))).await;
        packed.map_err(|error| JobError::Source(SourceError::new(error)))
    }
}

impl PackedTensors {
    /// Returns the description of the tensors for a request with this expanded prompt; `None` if
    /// the job has other items, which does not happen.
    pub(crate) fn extra_args<'a>(
        &'a self,
        job: &'a Job,
        expanded: &'a [u32],
    ) -> Option<ExtraArgs<'a>> {
        let segment = |item: &JobItem| {
            let blob = self.blobs.get(&item.hash)?;
            Some(Segment { name: blob.name(), size: blob.bytes() })
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

    /// Drops the tensors on a blocking thread, because returning memory to the system takes time.
    pub(crate) fn release(self) {
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn_blocking(move || drop(self))),
            Err(_) => drop(self),
        }
    }
}

/// Returns the parts of a blob (`_pack_buffers` in Dynamo).
fn with_lengths(frames: Vec<Bytes>) -> Vec<Bytes> {
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

/// Creates tensors in this process's memory, where later requests also find them.
struct ProcessMemory;

impl TensorMemory for ProcessMemory {
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
    fn blob_has_the_count_then_each_length() {
        let frames = vec![Bytes::from_static(b"ab"), Bytes::new(), Bytes::from_static(b"c")];
        let parts = with_lengths(frames);
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
