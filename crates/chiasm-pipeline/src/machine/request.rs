//! Requests to frontends for the data of items that this machine lacks.

use std::sync::Arc;

use chiasm_media::{Fault, MediaError};

/// Requests the data of a job's item, by its index, from the job's frontend.
pub type RequestItem = Arc<dyn Fn(usize, RequestReason) + Send + Sync>;

/// Requests the data of one item from the job's frontend.
pub(super) type RequestData = Arc<dyn Fn(RequestReason) + Send + Sync>;

/// The reason why an item's data is requested.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RequestReason {
    /// This machine lacks the item.
    Lacking,
    /// The file was not fetched from its URL.
    NotFetched(FetchFailure),
    /// The cut of a video was not decoded, so the tensors of the whole file are requested.
    NotDecoded(CutFailure),
}

/// The reason why a file was not fetched from the frontend's URL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FetchFailure {
    /// One of [`CAUSES`](Self::CAUSES), for metrics.
    pub cause: &'static str,
    /// An explanation for operators, without the URL.
    pub reason: String,
}

impl FetchFailure {
    /// All causes.
    pub const CAUSES: [&'static str; 4] =
        ["fetch_refused", "fetch_slow", "fetch_failed", "fetched_other"];

    pub(super) fn new(cause: &'static str, reason: impl ToString) -> Self {
        Self { cause, reason: reason.to_string() }
    }
}

impl From<MediaError> for FetchFailure {
    fn from(error: MediaError) -> Self {
        let cause = match error.fault() {
            Fault::Forbidden => "fetch_refused",
            Fault::OriginTimeout => "fetch_slow",
            _ => "fetch_failed",
        };
        Self::new(cause, error)
    }
}

/// The reason why the cut of a video was not decoded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CutFailure {
    /// [`OTHER_FRAMES`](Self::OTHER_FRAMES) or another short name.
    pub cause: &'static str,
    /// An explanation for operators.
    pub reason: String,
}

impl CutFailure {
    /// The cause for a cut that decodes to other frames than were planned.
    pub const OTHER_FRAMES: &'static str = "other_frames";

    /// Returns the failure of a cut that decodes to other frames than were planned.
    pub(super) fn other_frames() -> Self {
        let reason = "the cut decodes to other frames than were planned".to_owned();
        Self { cause: Self::OTHER_FRAMES, reason }
    }

    /// Returns the failure for a video that exceeds a limit of this process.
    pub(super) fn limit() -> Self {
        let reason = "the video exceeds a limit of the agent (--max-video-seconds, \
                      --max-video-pixels, --processor-item-bytes)";
        Self { cause: "limit", reason: reason.to_owned() }
    }

    /// Returns the failure of a video that this process plans in another way than the frontend.
    pub(super) fn other_plan(how: &str) -> Self {
        let reason = format!(
            "the agent plans the video differently ({how}): its version or its settings of videos \
             are not the frontend's"
        );
        Self { cause: "other_plan", reason }
    }

    /// Returns the failure for a processor that can't be started.
    pub(super) fn processor(error: impl ToString) -> Self {
        Self { cause: "processor", reason: error.to_string() }
    }
}
