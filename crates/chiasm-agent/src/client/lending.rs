//! Tensors that the agent reads out of this process's memory, in place of tensors that are sent.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use bytes::Bytes;
use chiasm_backend::ItemField;
use chiasm_nixl::{Lender, NotRead};
use chiasm_types::MmHash;

use super::{AgentLink, words};
use crate::proto::{ReadTensorsReply, ReadTensorsRequest};
use crate::{CHUNK, tensors};

/// How much later than the deadline of a reading its agent has to answer.
const ANSWERS_WITHIN: Duration = Duration::from_secs(1);

/// Why tensors are sent that were to be lent: a cause in a word, and an explanation for people.
pub(crate) struct NotLent {
    pub(crate) cause: &'static str,
    pub(crate) why: String,
}

/// Whether tensors are lent, and what lends them.
#[derive(Clone, Default)]
pub struct Lending {
    side: Side,
    /// Whether the agent reads them.
    is_read: Arc<AtomicBool>,
}

#[derive(Clone, Default)]
enum Side {
    #[default]
    None,
    /// They are to be, and can't be.
    Failed(Arc<str>),
    Lender(Arc<Lender>),
}

impl Lending {
    /// Creates a lending by this lender.
    pub fn new(lender: Arc<Lender>) -> Self {
        Self { side: Side::Lender(lender), is_read: Arc::default() }
    }

    /// Creates a lending for want of a lender: tensors are sent, and each time that is counted.
    pub fn unavailable(why: impl fmt::Display) -> Self {
        Self { side: Side::Failed(why.to_string().into()), is_read: Arc::default() }
    }

    pub(super) fn for_one_agent(&self) -> Self {
        Self { side: self.side.clone(), is_read: Arc::default() }
    }

    /// Takes note of whether the agent reads tensors.
    pub(super) fn set_read(&self, is_read: bool) {
        self.is_read.store(is_read, Relaxed);
    }
}

impl fmt::Debug for Lending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lending").field("is_read", &self.is_read).finish_non_exhaustive()
    }
}

impl AgentLink {
    /// Has the agent read an item's tensors. Whether it has: what one message carries is not lent,
    /// nor anything if nothing is to be.
    ///
    /// # Errors
    /// They were to be read and were not.
    pub(crate) async fn lend_tensors(
        &self,
        hash: &MmHash,
        fields: &[ItemField],
    ) -> Result<bool, NotLent> {
        let not = |cause, why: String| NotLent { cause, why };
        let lender = match &self.lending.side {
            _ if tensors::bytes(fields) <= CHUNK as u64 => return Ok(false),
            Side::None => return Ok(false),
            Side::Failed(why) => return Err(not("nixl_not_here", why.to_string())),
            Side::Lender(lender) => lender,
        };
        if !self.lending.is_read.load(Relaxed) {
            return Err(not(
                "nixl_not_there",
                "the agent reads nothing by NIXL (--nixl-library)".to_owned(),
            ));
        }
        let (lends, parts) = (lender.clone(), tensors::parts(fields));
        let lent = tokio::task::spawn_blocking(move || lends.lend(&parts)).await;
        let loan = lent.ok().flatten();
        let loan = loan
            .ok_or_else(|| not("nixl_no_room", "there is no room among what is lent".to_owned()))?;
        let within = lender.within();
        let request = ReadTensorsRequest {
            mm_hash: Bytes::copy_from_slice(hash.as_bytes()),
            fields: tensors::announcement(fields),
            memory: lender.metadata().clone(),
            address: loan.address(),
            loan: loan.number(),
            within_ms: within.as_millis().try_into().unwrap_or(u32::MAX),
        };
        let mut files = self.files.clone();
        let reply = match tokio::time::timeout(within + ANSWERS_WITHIN, files.read_tensors(request))
            .await
        {
            Ok(Ok(reply)) => reply.into_inner(),
            // The agent may read on in both cases: the memory rests.
            Ok(Err(status)) => return Err(not("nixl_unanswered", words(&status))),
            Err(_) => return Err(not("nixl_unanswered", "the agent says nothing".to_owned())),
        };
        loan.returned();
        let ReadTensorsReply { not_read, reason } = reply;
        if not_read.is_empty() {
            return Ok(true);
        }
        // A later version may know more causes.
        let cause =
            NotRead::CAUSES.into_iter().find(|cause| *cause == not_read).unwrap_or("nixl_failed");
        if cause == "nixl_off" {
            self.lending.set_read(false);
        }
        Err(not(cause, reason))
    }
}
