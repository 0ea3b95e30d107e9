//! Files and tensors of media items, as frontends send them.

use std::time::Duration;

use bytes::Bytes;
use chiasm_media::ContentHash;
use chiasm_nixl::{Lent, Reader};
use chiasm_pipeline::{MachineMedia, PutError};
use chiasm_types::{MmHash, Modality};
use tokio::time::timeout;
use tonic::{Status, Streaming};

use super::digest;
use super::shares::Held;
use crate::SENT_WITHIN;
use crate::proto::{MediaChunk, ReadTensorsReply, ReadTensorsRequest, TensorChunk, TensorField};
use crate::tensors::Announced;

/// Takes in one file. While it is on its way it is counted in `memory`.
pub(super) async fn put(
    media: &MachineMedia,
    memory: Held,
    chunks: Streaming<MediaChunk>,
) -> Result<(), Status> {
    let file = timeout(SENT_WITHIN, read(media, memory, chunks)).await;
    let (content, modality, file) =
        file.map_err(|_| Status::deadline_exceeded("the file took too long"))??;
    media.put(content, &modality, file).await.map_err(|error| match error {
        PutError::Media(_) | PutError::OtherContent => Status::invalid_argument(error.to_string()),
        PutError::Overloaded => Status::resource_exhausted(error.to_string()),
    })
}

async fn read(
    media: &MachineMedia,
    mut memory: Held,
    mut chunks: Streaming<MediaChunk>,
) -> Result<(ContentHash, Modality, Bytes), Status> {
    let first = chunks.message().await?.ok_or_else(|| Status::invalid_argument("no file came"))?;
    let content = digest(&first.content)
        .ok_or_else(|| Status::invalid_argument("content: must be 32 bytes"))?;
    let modality = Modality::from_name(&first.modality);
    let limit = media.max_bytes(&modality);
    let length = Some(first.length).filter(|length| *length <= limit);
    let length = length
        .ok_or_else(|| Status::invalid_argument(format!("length: {limit} bytes at most")))?
        as usize;
    let other_length = || Status::invalid_argument("the file has another length than was said");
    // Memory for what has come, not for what is claimed.
    let mut file = media.buffer();
    let mut next = Some(first);
    while let Some(MediaChunk { bytes, .. }) = next {
        if file.as_slice().len() + bytes.len() > length {
            return Err(other_length());
        }
        memory.grow(bytes.len() as u64).map_err(|_| no_room())?;
        file.extend(&bytes).map_err(|_| no_room())?;
        next = chunks.message().await?;
    }
    if file.as_slice().len() != length {
        return Err(other_length());
    }
    Ok((ContentHash::new(content), modality, file.freeze()))
}

/// Takes in the tensors of one item. While they are on their way they are counted in `memory`.
pub(super) async fn put_tensors(
    media: &MachineMedia,
    memory: Held,
    chunks: Streaming<TensorChunk>,
) -> Result<(), Status> {
    let tensors = timeout(SENT_WITHIN, read_tensors(media, memory, chunks)).await;
    let (hash, announced, bytes) =
        tensors.map_err(|_| Status::deadline_exceeded("the tensors took too long"))??;
    media
        .put_tensors(hash, announced.with(bytes))
        .map_err(|why| Status::invalid_argument(format!("tensors: {why}")))
}

async fn read_tensors(
    media: &MachineMedia,
    mut memory: Held,
    mut chunks: Streaming<TensorChunk>,
) -> Result<(MmHash, Announced, Bytes), Status> {
    let first =
        chunks.message().await?.ok_or_else(|| Status::invalid_argument("no tensors came"))?;
    let (hash, announced) = announced(media, &first.mm_hash, first.fields)?;
    let other_length = || Status::invalid_argument("the tensors have another length than was said");
    // Memory for what has come, not for what is claimed.
    let mut tensors = media.buffer();
    let mut next = Some(first.bytes);
    while let Some(bytes) = next {
        if (tensors.as_slice().len() + bytes.len()) as u64 > announced.bytes {
            return Err(other_length());
        }
        memory.grow(bytes.len() as u64).map_err(|_| no_room())?;
        tensors.extend(&bytes).map_err(|_| no_room())?;
        next = chunks.message().await?.map(|chunk| chunk.bytes);
    }
    if tensors.as_slice().len() as u64 != announced.bytes {
        return Err(other_length());
    }
    Ok((hash, announced, tensors.freeze()))
}

fn no_room() -> Status {
    Status::resource_exhausted(
        "the agent has no memory for more from there (--max-bytes-in-flight)",
    )
}

/// Reads the tensors of one item out of its frontend's memory.
pub(super) async fn read_lent(
    media: &MachineMedia,
    reader: &Reader,
    request: ReadTensorsRequest,
) -> Result<ReadTensorsReply, Status> {
    let ReadTensorsRequest { mm_hash, fields, memory, address, loan, within_ms } = request;
    let (hash, announced) = announced(media, &mm_hash, fields)?;
    let within = Duration::from_millis(within_ms.into());
    let lent = Lent { metadata: memory, address, number: loan, bytes: announced.bytes, within };
    match reader.read(lent).await {
        Ok(bytes) => {
            let taken = media.put_tensors(hash, announced.with(bytes));
            taken.map_err(|why| Status::invalid_argument(format!("tensors: {why}")))?;
            Ok(ReadTensorsReply::default())
        }
        Err(why) => {
            Ok(ReadTensorsReply { not_read: why.cause().to_owned(), reason: why.to_string() })
        }
    }
}

/// What is told of tensors before their bytes come, if they may have so many.
fn announced(
    media: &MachineMedia,
    mm_hash: &Bytes,
    fields: Vec<TensorField>,
) -> Result<(MmHash, Announced), Status> {
    let limit = media.max_tensor_bytes();
    let limit = limit
        .ok_or_else(|| Status::failed_precondition("no tensors are taken (--take-tensors)"))?;
    let hash =
        digest(mm_hash).ok_or_else(|| Status::invalid_argument("mm_hash: must be 32 bytes"))?;
    let announced = Announced::from_message(fields);
    let announced =
        announced.ok_or_else(|| Status::invalid_argument("fields: they are malformed"))?;
    if announced.bytes > limit {
        return Err(Status::invalid_argument(format!("fields: {limit} bytes at most")));
    }
    Ok((MmHash::new(hash), announced))
}
