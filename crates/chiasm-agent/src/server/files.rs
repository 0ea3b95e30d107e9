//! Receiving files, tensors and cuts of media items from frontends.

use std::time::Duration;

use bytes::Bytes;
use chiasm_media::ContentHash;
use chiasm_nixl::{Reader, RemoteLoan};
use chiasm_pipeline::{CutError, MachineMedia, PutError};
use chiasm_types::{MmHash, Modality};
use tokio::time::timeout;
use tonic::{Status, Streaming};

use super::parse_digest;
use super::shares::ShareGuard;
use crate::TRANSFER_TIMEOUT;
use crate::cuts::AnnouncedCut;
use crate::proto::{
    CutChunk, MediaChunk, ReadTensorsReply, ReadTensorsRequest, TensorChunk, TensorField,
};
use crate::tensors::AnnouncedTensors;

/// Receives one file. It counts towards `memory` while it arrives.
pub(super) async fn put_file(
    media: &MachineMedia,
    memory: ShareGuard,
    chunks: Streaming<MediaChunk>,
) -> Result<(), Status> {
    let file = timeout(TRANSFER_TIMEOUT, read_file(media, memory, chunks)).await;
    let (content, modality, file) =
        file.map_err(|_| Status::deadline_exceeded("the file took too long"))??;
    media.put(content, &modality, file).await.map_err(|error| match error {
        PutError::Media(_) | PutError::OtherContent => Status::invalid_argument(error.to_string()),
        PutError::Overloaded => Status::resource_exhausted(error.to_string()),
    })
}

async fn read_file(
    media: &MachineMedia,
    mut memory: ShareGuard,
    mut chunks: Streaming<MediaChunk>,
) -> Result<(ContentHash, Modality, Bytes), Status> {
    let first =
        chunks.message().await?.ok_or_else(|| Status::invalid_argument("the file is missing"))?;
    let content = parse_digest(&first.content)
        .ok_or_else(|| Status::invalid_argument("content: must be 32 bytes"))?;
    let modality = Modality::from_name(&first.modality);
    let limit = media.max_bytes(&modality);
    if first.length > limit {
        return Err(Status::invalid_argument(format!(
            "length: at most {limit} bytes are accepted"
        )));
    }
    let length = first.length as usize;
    let wrong_length =
        || Status::invalid_argument("the file's length differs from the announced one");
    // Grows with the bytes that arrive, not with the claimed length.
    let mut file = media.buffer();
    let mut next = Some(first);
    while let Some(MediaChunk { bytes, .. }) = next {
        if file.as_slice().len() + bytes.len() > length {
            return Err(wrong_length());
        }
        memory.grow(bytes.len() as u64).map_err(|_| out_of_memory())?;
        file.extend(&bytes).map_err(|_| out_of_memory())?;
        next = chunks.message().await?;
    }
    if file.as_slice().len() != length {
        return Err(wrong_length());
    }
    Ok((ContentHash::new(content), modality, file.freeze()))
}

/// Receives the tensors of one item. They count towards `memory` while they arrive.
pub(super) async fn put_tensors(
    media: &MachineMedia,
    memory: ShareGuard,
    chunks: Streaming<TensorChunk>,
) -> Result<(), Status> {
    let tensors = timeout(TRANSFER_TIMEOUT, read_tensors(media, memory, chunks)).await;
    let (hash, announced, bytes) =
        tensors.map_err(|_| Status::deadline_exceeded("the tensors took too long"))??;
    media
        .put_tensors(hash, announced.into_fields(bytes))
        .map_err(|error| Status::invalid_argument(format!("tensors: {error}")))
}

async fn read_tensors(
    media: &MachineMedia,
    mut memory: ShareGuard,
    mut chunks: Streaming<TensorChunk>,
) -> Result<(MmHash, AnnouncedTensors, Bytes), Status> {
    let first = chunks
        .message()
        .await?
        .ok_or_else(|| Status::invalid_argument("the tensors are missing"))?;
    let (hash, announced) = parse_announcement(media, &first.mm_hash, first.fields)?;
    let wrong_length =
        || Status::invalid_argument("the tensors' length differs from the announced one");
    // Grows with the bytes that arrive, not with the announced length.
    let mut tensors = media.buffer();
    let mut next = Some(first.bytes);
    while let Some(bytes) = next {
        if (tensors.as_slice().len() + bytes.len()) as u64 > announced.bytes {
            return Err(wrong_length());
        }
        memory.grow(bytes.len() as u64).map_err(|_| out_of_memory())?;
        tensors.extend(&bytes).map_err(|_| out_of_memory())?;
        next = chunks.message().await?.map(|chunk| chunk.bytes);
    }
    if tensors.as_slice().len() as u64 != announced.bytes {
        return Err(wrong_length());
    }
    Ok((hash, announced, tensors.freeze()))
}

/// Receives the cut of one video. It counts towards `memory` while it arrives.
pub(super) async fn put_cut(
    media: &MachineMedia,
    memory: ShareGuard,
    chunks: Streaming<CutChunk>,
) -> Result<(), Status> {
    let cut = timeout(TRANSFER_TIMEOUT, read_cut(media, memory, chunks)).await;
    let (hash, announced, bytes) =
        cut.map_err(|_| Status::deadline_exceeded("the cut took too long"))??;
    media.put_cut(hash, announced.into_parts(bytes)).map_err(|error| match error {
        CutError::NotAccepted => Status::failed_precondition(error.to_string()),
        CutError::OtherFrames => Status::invalid_argument(error.to_string()),
    })
}

async fn read_cut(
    media: &MachineMedia,
    mut memory: ShareGuard,
    mut chunks: Streaming<CutChunk>,
) -> Result<(MmHash, AnnouncedCut, Bytes), Status> {
    let limit = media.max_cut_bytes();
    let limit =
        limit.ok_or_else(|| Status::failed_precondition(CutError::NotAccepted.to_string()))?;
    let first =
        chunks.message().await?.ok_or_else(|| Status::invalid_argument("the cut is missing"))?;
    let hash = parse_digest(&first.mm_hash)
        .ok_or_else(|| Status::invalid_argument("mm_hash: must be 32 bytes"))?;
    let announced = AnnouncedCut::from_message(first.parts);
    let announced = announced.ok_or_else(|| Status::invalid_argument("parts: malformed"))?;
    if announced.bytes > limit {
        return Err(Status::invalid_argument(format!("parts: at most {limit} bytes are accepted")));
    }
    let wrong_length =
        || Status::invalid_argument("the cut's length differs from the announced one");
    // Grows with the bytes that arrive, not with the announced length.
    let mut cut = media.buffer();
    let mut next = Some(first.bytes);
    while let Some(bytes) = next {
        if (cut.as_slice().len() + bytes.len()) as u64 > announced.bytes {
            return Err(wrong_length());
        }
        memory.grow(bytes.len() as u64).map_err(|_| out_of_memory())?;
        cut.extend(&bytes).map_err(|_| out_of_memory())?;
        next = chunks.message().await?.map(|chunk| chunk.bytes);
    }
    if cut.as_slice().len() as u64 != announced.bytes {
        return Err(wrong_length());
    }
    Ok((MmHash::new(hash), announced, cut.freeze()))
}

fn out_of_memory() -> Status {
    Status::resource_exhausted(
        "the agent has no memory for more of this frontend (--max-bytes-in-flight)",
    )
}

/// Reads the tensors of one item from its frontend's memory.
pub(super) async fn read_lent(
    media: &MachineMedia,
    reader: &Reader,
    request: ReadTensorsRequest,
) -> Result<ReadTensorsReply, Status> {
    let ReadTensorsRequest { mm_hash, fields, memory, address, loan, within_ms } = request;
    let (hash, announced) = parse_announcement(media, &mm_hash, fields)?;
    let loan = RemoteLoan {
        metadata: memory,
        address,
        number: loan,
        bytes: announced.bytes,
        timeout: Duration::from_millis(within_ms.into()),
    };
    match reader.read(loan).await {
        Ok(bytes) => {
            media
                .put_tensors(hash, announced.into_fields(bytes))
                .map_err(|error| Status::invalid_argument(format!("tensors: {error}")))?;
            Ok(ReadTensorsReply::default())
        }
        Err(error) => {
            Ok(ReadTensorsReply { not_read: error.cause().to_owned(), reason: error.to_string() })
        }
    }
}

/// Parses the announcement of tensors, and checks their size.
fn parse_announcement(
    media: &MachineMedia,
    mm_hash: &Bytes,
    fields: Vec<TensorField>,
) -> Result<(MmHash, AnnouncedTensors), Status> {
    let limit = media.max_tensor_bytes();
    let limit = limit.ok_or_else(|| {
        Status::failed_precondition("the agent does not accept tensors (--take-tensors)")
    })?;
    let hash = parse_digest(mm_hash)
        .ok_or_else(|| Status::invalid_argument("mm_hash: must be 32 bytes"))?;
    let announced = AnnouncedTensors::from_message(fields);
    let announced = announced.ok_or_else(|| Status::invalid_argument("fields: malformed"))?;
    if announced.bytes > limit {
        return Err(Status::invalid_argument(format!(
            "fields: at most {limit} bytes are accepted"
        )));
    }
    Ok((MmHash::new(hash), announced))
}
