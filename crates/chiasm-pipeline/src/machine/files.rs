//! Files of media items that frontends have: kept, fetched from where a frontend has got one, or
//! sent by it when it is asked; or the tensors that it makes of one.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use chiasm_media::{ContentHash, EncodedMedia, Fault, MediaError};
use chiasm_types::Modality;
use tokio::time::timeout;

use super::MachineMedia;
use super::error::PutError;
use super::tensors::PATIENCE as TENSORS_PATIENCE;
use super::waiting::{Came, Expected};
use crate::cpu::CpuBudget;
use crate::error::RequestError;

/// How long a file may take from the frontend that has it.
const FILE_PATIENCE: Duration = Duration::from_secs(30);

/// How long a file that another job has asked for is waited for before it is asked for again: that
/// one's frontend may be gone.
const OTHERS_PATIENCE: Duration = Duration::from_secs(2);

/// How long a file may take from where it is: the frontend has it, and mostly sends it sooner.
const FETCH_PATIENCE: Duration = Duration::from_secs(2);

/// Files of up to this many bytes are hashed in place.
const IN_PLACE: usize = 512 << 10;

/// Asks a job's frontend for the file of an item, and says why it was not fetched if it was to be.
pub(super) type AskForItem = Arc<dyn Fn(Option<NotFetched>) + Send + Sync>;

/// Why a file was not fetched from where a frontend has got it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotFetched {
    /// One of a few words.
    pub cause: &'static str,
    /// The same for people, without the URL.
    pub reason: String,
}

impl NotFetched {
    /// All causes.
    pub const CAUSES: [&'static str; 4] =
        ["fetch_refused", "fetch_slow", "fetch_failed", "fetched_other"];

    fn new(cause: &'static str, reason: impl ToString) -> Self {
        Self { cause, reason: reason.to_string() }
    }
}

impl From<MediaError> for NotFetched {
    fn from(error: MediaError) -> Self {
        let cause = match error.fault() {
            Fault::Forbidden => "fetch_refused",
            Fault::OriginTimeout => "fetch_slow",
            _ => "fetch_failed",
        };
        Self::new(cause, error)
    }
}

impl MachineMedia {
    /// Takes in a file that a frontend has, for all who wait for it now or ask for it later.
    ///
    /// # Errors
    /// It can't be an item of this modality, is too large for one, or is not the file of this
    /// content.
    pub async fn put(
        &self,
        content: ContentHash,
        modality: &Modality,
        bytes: Bytes,
    ) -> Result<(), PutError> {
        let item = if bytes.len() <= IN_PLACE {
            self.door.keep(bytes, modality)?
        } else {
            let (door, modality) = (self.door.clone(), modality.clone());
            let ticket = CpuBudget::shared().ticket(Duration::from_nanos(bytes.len() as u64));
            let ticket = ticket.map_err(|_| PutError::Overloaded)?;
            let kept = self.cpu.run(&ticket, move || door.keep(bytes, &modality)).await;
            kept.map_err(|_| PutError::Overloaded)??
        };
        // What came is kept under what it is, whatever it was called.
        if item.content != content {
            return Err(PutError::OtherContent);
        }
        self.waiting.file_came(&item);
        Ok(())
    }

    /// The file of this content: kept, fetched, or asked for. If it is asked for, what is expected
    /// in its place may come.
    pub(super) async fn come(
        &self,
        content: &ContentHash,
        url: Option<&str>,
        expected: Option<Expected>,
        ask: &AskForItem,
    ) -> Result<Came, RequestError> {
        if let Some(kept) = self.door.kept(content) {
            return Ok(Came::File(kept));
        }
        match url.filter(|_| self.fetches) {
            None => self.sent(content, expected, || ask(None)).await,
            Some(url) => match self.fetched(content, url).await {
                Ok(file) => Ok(Came::File(file)),
                Err(why) => self.sent(content, expected, || ask(Some(why))).await,
            },
        }
    }

    /// The file of this content from where a frontend has got it.
    async fn fetched(&self, content: &ContentHash, url: &str) -> Result<EncodedMedia, NotFetched> {
        let opened = timeout(FETCH_PATIENCE, self.door.open(url)).await;
        let file =
            opened.map_err(|_| NotFetched::new("fetch_slow", "its origin is too slow"))??;
        match file.content == *content {
            true => Ok(file),
            false => Err(NotFetched::new(
                "fetched_other",
                "its origin has something else than the frontend has got there",
            )),
        }
    }

    /// The file of this content, or what is expected in its place, from the frontend that `ask`
    /// asks.
    async fn sent(
        &self,
        content: &ContentHash,
        expected: Option<Expected>,
        ask: impl FnOnce(),
    ) -> Result<Came, RequestError> {
        let patience = if expected.is_some() { TENSORS_PATIENCE } else { FILE_PATIENCE };
        let (mut wait, is_asked_for) = self.waiting.wait(content, expected);
        if is_asked_for && let Ok(Ok(came)) = timeout(OTHERS_PATIENCE, &mut wait.came).await {
            return Ok(came);
        }
        ask();
        match timeout(patience, &mut wait.came).await {
            Ok(Ok(came)) => Ok(came),
            Ok(Err(_)) | Err(_) => {
                Err(RequestError::internal("the frontend did not send a media item's file"))
            }
        }
    }
}
