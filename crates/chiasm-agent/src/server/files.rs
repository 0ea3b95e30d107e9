//! Files of media items, as frontends send them.

use std::time::Duration;

use bytes::Bytes;
use chiasm_media::ContentHash;
use chiasm_server::{MachineMedia, PutError};
use chiasm_types::Modality;
use tokio::time::timeout;
use tonic::{Status, Streaming};

use super::digest;
use crate::proto::MediaChunk;

/// How long a file may take to arrive.
const WITHIN: Duration = Duration::from_secs(30);

/// Takes in one file.
pub(super) async fn put(media: &MachineMedia, chunks: Streaming<MediaChunk>) -> Result<(), Status> {
    let file = timeout(WITHIN, read(media, chunks)).await;
    let (content, modality, file) = file.map_err(|_| Status::deadline_exceeded("the file took too long"))??;
    media.put(content, &modality, file).await.map_err(|error| match error {
        PutError::Media(_) | PutError::OtherContent => Status::invalid_argument(error.to_string()),
        PutError::Overloaded => Status::resource_exhausted(error.to_string()),
    })
}

async fn read(
    media: &MachineMedia,
    mut chunks: Streaming<MediaChunk>,
) -> Result<(ContentHash, Modality, Bytes), Status> {
    let first = chunks.message().await?.ok_or_else(|| Status::invalid_argument("no file came"))?;
    let content = digest(&first.content).ok_or_else(|| Status::invalid_argument("content: must be 32 bytes"))?;
    let modality = Modality::from_name(&first.modality);
    let limit = media.max_bytes(&modality);
    let length = Some(first.length).filter(|length| *length <= limit);
    let length = length.ok_or_else(|| Status::invalid_argument(format!("length: {limit} bytes at most")))? as usize;
    let other_length = || Status::invalid_argument("the file has another length than was said");
    // Memory for what has come, not for what is claimed.
    let mut file = media.buffer();
    let mut next = Some(first);
    while let Some(MediaChunk { bytes, .. }) = next {
        if file.as_slice().len() + bytes.len() > length {
            return Err(other_length());
        }
        file.extend(&bytes).map_err(|error| Status::resource_exhausted(error.to_string()))?;
        next = chunks.message().await?;
    }
    if file.as_slice().len() != length {
        return Err(other_length());
    }
    Ok((ContentHash::new(content), modality, file.freeze()))
}
