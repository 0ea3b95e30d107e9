//! Files of media items: from the cache, fetched from the frontend's URL, or sent by the frontend
//! on request. The frontend may send tensors instead of a file.

use std::time::Duration;

use bytes::Bytes;
use chiasm_media::{ContentHash, EncodedMedia};
use chiasm_types::Modality;
use tokio::time::timeout;

use super::MachineMedia;
use super::error::PutError;
use super::received::DATA_TIMEOUT;
use super::request::{FetchFailure, RequestData, RequestReason};
use super::waiting::{ExpectedTensors, ReceivedItem};
use crate::error::RequestError;
use chiasm_cpu::CpuBudget;

/// The timeout for a file from the frontend that has it.
const FILE_TIMEOUT: Duration = Duration::from_secs(30);

/// The timeout for a file that another job has requested, before it is requested again: that job's
/// frontend may be gone.
const OTHER_REQUEST_TIMEOUT: Duration = Duration::from_secs(2);

/// The timeout for a file from its URL. It is short because the frontend has the file, and usually
/// sends it sooner.
const FETCH_TIMEOUT: Duration = Duration::from_secs(2);

/// The maximum size of a file that is hashed inline.
const MAX_INLINE_BYTES: usize = 512 << 10;

impl MachineMedia {
    /// Accepts a file that a frontend sends, for all jobs that wait for it now or need it later.
    ///
    /// # Errors
    /// Returns an error if the file is not of this modality, is too large, or does not have this
    /// content.
    pub async fn put(
        &self,
        content: ContentHash,
        modality: &Modality,
        bytes: Bytes,
    ) -> Result<(), PutError> {
        let item = if bytes.len() <= MAX_INLINE_BYTES {
            self.loader.insert(bytes, modality)?
        } else {
            let loader = self.loader.clone();
            let modality = modality.clone();
            let ticket = CpuBudget::shared().ticket(Duration::from_nanos(bytes.len() as u64));
            let ticket = ticket.map_err(|_| PutError::Overloaded)?;
            let inserted = self.cpu.run(&ticket, move || loader.insert(bytes, &modality)).await;
            inserted.map_err(|_| PutError::Overloaded)??
        };
        // The file is cached by its actual content, even if that was announced wrongly.
        if item.content != content {
            return Err(PutError::OtherContent);
        }
        self.pending.complete_with_file(&item);
        Ok(())
    }

    /// Returns the file with this content from the cache, from its URL, or from the frontend. The
    /// frontend may send the expected tensors instead.
    ///
    /// # Errors
    /// Returns an error if the frontend does not send the file in time.
    pub(super) async fn receive(
        &self,
        content: &ContentHash,
        url: Option<&str>,
        expected: Option<ExpectedTensors>,
        request_file: &RequestData,
    ) -> Result<ReceivedItem, RequestError> {
        if let Some(cached) = self.loader.cached(content) {
            return Ok(ReceivedItem::File(cached));
        }
        let Some(url) = url.filter(|_| self.fetches_urls) else {
            return self
                .receive_from_frontend(content, expected, || request_file(RequestReason::Lacking))
                .await;
        };
        match self.fetch(content, url).await {
            Ok(file) => Ok(ReceivedItem::File(file)),
            Err(failure) => {
                let request = || request_file(RequestReason::NotFetched(failure));
                self.receive_from_frontend(content, expected, request).await
            }
        }
    }

    /// Fetches the file with this content from its URL.
    async fn fetch(&self, content: &ContentHash, url: &str) -> Result<EncodedMedia, FetchFailure> {
        let opened = timeout(FETCH_TIMEOUT, self.loader.open(url)).await;
        let file =
            opened.map_err(|_| FetchFailure::new("fetch_slow", "the origin is too slow"))??;
        if file.content != *content {
            return Err(FetchFailure::new(
                "fetched_other",
                "the origin returned another file than to the frontend",
            ));
        }
        Ok(file)
    }

    /// Waits for the file with this content, or the expected tensors, from a frontend. Calls
    /// `request` unless another job has requested the same and receives it soon.
    async fn receive_from_frontend(
        &self,
        content: &ContentHash,
        expected: Option<ExpectedTensors>,
        request: impl FnOnce(),
    ) -> Result<ReceivedItem, RequestError> {
        let limit = if expected.is_some() { DATA_TIMEOUT } else { FILE_TIMEOUT };
        let (mut pending, is_requested) = self.pending.wait(content, expected);
        if is_requested
            && let Ok(Ok(item)) = timeout(OTHER_REQUEST_TIMEOUT, &mut pending.receiver).await
        {
            return Ok(item);
        }
        request();
        match timeout(limit, &mut pending.receiver).await {
            Ok(Ok(item)) => Ok(item),
            Ok(Err(_)) | Err(_) => {
                Err(RequestError::internal("the frontend did not send a media item's file"))
            }
        }
    }
}
